"""`kernel:fi-merge`: FlashInfer's `merge_state` for two partial results, `merge_states` for more."""

from __future__ import annotations

from typing import ClassVar

import torch

from backends.contract import Attention, Capabilities, EngineContext, KernelCall
from backends.fi import FI_HEAD_DIMS


class FlashInferMerge:
    """Masks and pages lie behind the states: whatever the case asks, the merge is the same."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        level="kernel",
        library=frozenset({"flashinfer"}),
        layouts=frozenset({"NHD", "HND"}),
        head_dims=FI_HEAD_DIMS | {(192, 128)},
        non_causal=True,
        window=True,
        soft_cap=True,
        custom_mask=True,
        rows_without_keys=True,
        empty_requests=True,
        merges=True,
        lse="2",
        empty_lse="sentinel",  # of three and more states
    )

    def __init__(self, engine: EngineContext) -> None:
        from flashinfer import merge_state, merge_states  # pyright: ignore[reportAttributeAccessIssue]

        self.engine = engine
        self.merge_state = merge_state
        self.merge_states = merge_states

    def attend(self, call: KernelCall) -> Attention:
        if len(call.states) == 2:
            (v_a, s_a), (v_b, s_b) = call.states
            return Attention(*self.merge_state(v_a, s_a, v_b, s_b))
        outs, lses = zip(*call.states, strict=True)
        return Attention(*self.merge_states(torch.stack(outs, dim=1), torch.stack(lses, dim=1)))
