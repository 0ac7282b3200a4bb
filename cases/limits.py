"""Whether a case is small enough for a computer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cases.model import Case

MAX_NUMBERS = 1 << 32
"""Most numbers in the tensors of one step."""


def check_size(case: Case) -> None:
    """Q, K, V and the output of all layers, the pool with its pages, the page table and the custom masks.

    Raises:
        ValueError: there is a step in which they hold more than `MAX_NUMBERS`.
    """
    heads = case.heads
    width = case.num_layers * (heads.head_dim_qk + heads.head_dim_vo)
    for index, step in enumerate(case.steps):
        pages = sum(-(-length // case.page_size) for length in step.kv_lens) + case.spare_pages
        numbers = width * heads.num_kv_heads * (pages * case.page_size + step.num_rows)
        numbers += width * heads.num_qo_heads * step.num_rows
        numbers += len(step.requests) * case.table_width
        if case.mask.custom is not None:
            numbers += sum(rows * keys for rows, keys in zip(step.qo_lens, step.kv_lens, strict=True))
        if numbers > MAX_NUMBERS:
            raise ValueError(
                f"step {index} is too large: its tensors hold {numbers} numbers, must be at most {MAX_NUMBERS}"
            )
