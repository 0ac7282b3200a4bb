"""Index arrays that FlashAttention 3 of sgl_kernel refuses, and those it takes without a word."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fakes.contract.check import requests
from fakes.contract.paged_fa import RELEASE, OnCPU, attend, both, page_table, running_sum
from fakes.contract.rule import WRONG, Lab, Observation, Rule, Verdict, refused
from fakes.contract.sgl_kernel_attention import MEASURED


def _rule(
    name: str,
    cause: str,
    probe: Callable[[Lab], Observation],
    verdict: Verdict,
    finding: str | None = None,
) -> Rule:
    return Rule(
        f"sgl_kernel.fa.{name}", "sgl_kernel", cause, {RELEASE: verdict}, MEASURED, probe, finding=finding
    )


def _given(**changes: Callable[[], object]) -> Callable[[Lab], Observation]:
    """A probe that replaces arguments of one sound call."""

    def probe(lab: Lab) -> Observation:
        r = requests([40, 17], [3, 1])
        got = attend(lab, r, **{name: make() for name, make in changes.items()})
        return both(got, r.expected(causal=True))

    return probe


def _table() -> torch.Tensor:
    return page_table(requests([40, 17], [3, 1]))


def _narrow_table() -> torch.Tensor:
    return _table()[:, :2].contiguous()


def _lens(*lens: int) -> torch.Tensor:
    return torch.tensor(lens or (40, 17), dtype=torch.int32)


def _float32(lab: Lab) -> Observation:
    r = requests([40, 17], [3, 1], dtype=torch.float32)
    return both(attend(lab, r), r.expected(causal=True))


RULES = (
    _rule(
        "page_table_int64",
        "Page numbers are read as 32-bit words, which the operator checks.",
        _given(page_table=lambda: _table().long()),
        refused("RuntimeError", "page_table must have dtype torch.int32"),
    ),
    _rule(
        "cache_seqlens_int64",
        "Lengths are read as 32-bit words, which the operator checks.",
        _given(cache_seqlens=lambda: _lens().long()),
        refused("RuntimeError", "seqused_k must have dtype int32"),
    ),
    _rule(
        "cu_seqlens_q_int64",
        "Running sums are read as 32-bit words, which the operator checks.",
        _given(cu_seqlens_q=lambda: running_sum([3, 1]).long()),
        refused("RuntimeError", "cu_seqlens_q must have dtype torch.int32"),
    ),
    _rule(
        "cu_seqlens_q_batch",
        "The batch is counted in cu_seqlens_q and in page_table, and compared.",
        _given(cu_seqlens_q=lambda: running_sum([3, 1, 0])),
        refused("RuntimeError", "batch_size must be equal to batch_size_k"),
    ),
    _rule(
        "cache_seqlens_cpu",
        "The kernel cannot read host memory, which the operator checks.",
        _given(cache_seqlens=lambda: OnCPU(_lens())),
        refused("RuntimeError", "seqused_k must be on CUDA"),
    ),
    _rule(
        "float32",
        "No kernel is built for float32.",
        _float32,
        refused("RuntimeError", "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type"),
    ),
    _rule(
        "token_locations",
        "Page numbers are not compared with the pool: token locations lead out of it.",
        _given(page_table=lambda: _table() * 16),
        WRONG,
        "sgl_kernel.fa.page_table.range",
    ),
    _rule(
        "page_table_narrow",
        "Columns are addressed by stride: behind the last one stands the next row.",
        _given(page_table=_narrow_table),
        WRONG,
        "sgl_kernel.fa.page_table.narrow",
    ),
    _rule(
        "cache_seqlens_long",
        "Lengths are not compared with the table: behind the last column stands the next row.",
        _given(cache_seqlens=lambda: _lens(40 + 64, 17)),
        WRONG,
        "sgl_kernel.fa.page_table.narrow",
    ),
)
