"""FlashMLA's dense decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fakes.contract.check import Requests, requests
from fakes.contract.paged_fa import RELEASE, both, module, page_table, place
from fakes.contract.rule import RIGHT, Lab, Observation, Rule, Verdict, refused, value
from fakes.contract.sgl_kernel_attention import MEASURED

HEADS = 16
DIM_QK, DIM_VO = 576, 512


def _rule(name: str, cause: str, probe: Callable[[Lab], Observation], verdict: Verdict = RIGHT) -> Rule:
    return Rule(f"sgl_kernel.mla.{name}", "sgl_kernel", cause, {RELEASE: verdict}, MEASURED, probe)


def _latent(kv_lens: Sequence[int], rows: int = 1, page_size: int = 64) -> Requests:
    """Requests whose values are the first columns of their keys."""
    r = requests(
        kv_lens, [rows] * len(kv_lens), heads=(HEADS, 1), dim=DIM_QK, page_size=page_size, poison=torch.nan
    )
    return replace(r, v=[k[..., :DIM_VO] for k in r.k])


def _call(lab: Lab, r: Requests, *, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[rows, heads, 512]` and LSE `[rows, heads]` of a causal call."""
    mla = module(lab, "flash_mla")
    rows = r.qo_lens[0]
    lens = place(lab, torch.tensor(r.kv_lens, dtype=torch.int32))
    schedule, num_splits = mla.get_mla_metadata(lens, rows * HEADS, 1)
    out, lse = mla.flash_mla_with_kvcache(
        place(lab, r.q.unflatten(0, (-1, rows))),
        place(lab, r.k_cache),
        place(lab, page_table(r, padding=padding)),
        lens,
        DIM_VO,
        schedule,
        num_splits,
        causal=True,
    )
    return out.cpu().flatten(0, 1), lse.cpu().transpose(1, 2).flatten(0, 1)


def _decode(lab: Lab) -> Observation:
    r = _latent([200, 64, 5])
    return both(_call(lab, r), r.expected(causal=True))


def _verify(lab: Lab) -> Observation:
    r = _latent([200, 64, 5], rows=3)
    return both(_call(lab, r, padding=-1), r.expected(causal=True))


def _page_size(lab: Lab) -> Observation:
    r = _latent([40, 17], page_size=16)
    return both(_call(lab, r), r.expected(causal=True))


def _page_size_32(lab: Lab) -> Observation:
    r = _latent([40, 17], page_size=32)
    return both(_call(lab, r), r.expected(causal=True))


def _empty(lab: Lab) -> Observation:
    out, lse = _call(lab, _latent([0, 70]))
    zero = bool((out[0] == 0).all())
    return Observation("value", f"output {0 if zero else 'not 0'}, LSE {lse[0, 0].item()}")


RULES = (
    _rule("decode", "Values are the first 512 columns of the keys; LSE is a natural logarithm.", _decode),
    _rule("verify", "Rows of a request are aligned bottom right; padding is not read.", _verify),
    _rule(
        "page_size",
        "The kernel is built for pages of 64, which the operator checks.",
        _page_size,
        refused("RuntimeError", "Currently page_block_size must be 64"),
    ),
    _rule(
        "page_size_32",
        "The kernel is built for pages of 64, which the operator checks.",
        _page_size_32,
        refused("RuntimeError", "Currently page_block_size must be 64"),
    ),
    _rule(
        "empty",
        "A sum of 0 is told by an LSE of +inf, the other way than FlashAttention 3.",
        _empty,
        value("output 0, LSE inf"),
    ),
)
