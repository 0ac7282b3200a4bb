"""One call of `flash_attn_with_kvcache` for the contract's ragged requests, each argument replaceable."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from fakes.contract.check import Requests
from fakes.contract.rule import Lab, Observation, judge

RELEASE = "0.4.6"


def module(lab: Lab, name: str) -> Any:
    """A submodule of the library under test, which the real one does not import by itself."""
    return import_module(f"{lab.library.__name__}.{name}")


def page_table(r: Requests, *, padding: int = 0, spare: int = 1) -> torch.Tensor:
    """int32 `[batch, widest + spare]`; columns behind a request's pages hold `padding`."""
    table = torch.full((len(r.pages), max(map(len, r.pages)) + spare), padding, dtype=torch.int32)
    for row, pages in enumerate(r.pages):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return table


def running_sum(lens: list[int]) -> torch.Tensor:
    """int32 `[len + 1]`, from 0."""
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def attend(lab: Lab, r: Requests, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE (transposed to `[rows, heads]`) of a causal call; `changes` replace or add arguments.

    Tensors among them go to the device, except those of the CPU that `changes` wraps in `OnCPU`.
    """
    given: dict[str, Any] = {
        "q": r.q,
        "k_cache": r.k_cache,
        "v_cache": r.v_cache,
        "page_table": page_table(r),
        "cache_seqlens": torch.tensor(r.kv_lens, dtype=torch.int32),
        "cu_seqlens_q": running_sum(r.qo_lens),
        "max_seqlen_q": max(r.qo_lens),
        "causal": True,
    } | changes
    out, lse, *_ = module(lab, "flash_attn").flash_attn_with_kvcache(
        **{name: place(lab, value) for name, value in given.items()}, return_softmax_lse=True
    )
    return out.cpu(), lse.cpu().transpose(-1, -2)


class OnCPU:
    """An argument that stays on the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def place(lab: Lab, value: Any) -> Any:
    """A tensor on the device under test."""
    if isinstance(value, OnCPU):
        return value.tensor
    return value.to(lab.device) if isinstance(value, torch.Tensor) else value


def both(
    got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], limit: float = 5e-3
) -> Observation:
    """Out and LSE must both be right."""
    return worst(judge(got[0], expected[0], limit), judge(got[1], expected[1]))


def worst(*seen: Observation) -> Observation:
    """The first that is not right, else the last."""
    return next((one for one in seen if one.kind != "right"), seen[-1])
