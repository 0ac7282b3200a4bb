"""`kernel:fa-merge`: sgl_kernel's `merge_state_v2`, folded over the partial results from the left."""

from __future__ import annotations

from typing import ClassVar

from backends.contract import Attention, Capabilities, EngineContext, KernelCall
from backends.fa import FA_HEAD_DIMS

NO_KEYS = -1e30
"""A natural-log LSE that carries no weight, yet is finite."""


class FlashAttentionMerge:
    """Masks and pages lie behind the states: whatever the case asks, the merge is the same."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        level="kernel",
        library=frozenset({"sgl_kernel"}),
        layouts=frozenset({"NHD", "HND"}),
        head_dims=FA_HEAD_DIMS,
        non_causal=True,
        window=True,
        soft_cap=True,
        custom_mask=True,
        rows_without_keys=True,
        empty_requests=True,
        merges=True,
        lse="e",
        empty_lse="sentinel",  # NO_KEYS
    )

    def __init__(self, engine: EngineContext) -> None:
        from sgl_kernel.attention import merge_state_v2  # pyright: ignore[reportMissingImports]

        self.engine = engine
        self.merge_state_v2 = merge_state_v2

    def attend(self, call: KernelCall) -> Attention:
        (out, lse), *others = call.states
        if len(others) > 1:
            # merge_state_v2 makes NaN of two empty states, and the first two of a row may be empty.
            lse = lse.clamp(min=NO_KEYS)
        for other, other_lse in others:
            out, lse = self.merge_state_v2(out, lse, other, other_lse)
        return Attention(out, lse)
