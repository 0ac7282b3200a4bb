"""A CPU stand-in for `flashinfer`: the attention surface of flashinfer-python, by release (`fakes.releases`).

It computes what the library computes, refuses what it refuses, and gets wrong what it gets wrong;
`fakes.contract` lists which. In strict mode it first records what the library would silently get wrong.
"""

from __future__ import annotations

from typing import Any

from fakes import releases
from fakes.flashinfer import cascade, decode, mla, page, prefill, quantization
from fakes.flashinfer.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from fakes.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from fakes.flashinfer.mla import BatchMLAPagedAttentionWrapper
from fakes.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from fakes.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from fakes.flashinfer.quantization import packbits, segment_packbits

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cascade",
    "decode",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "packbits",
    "page",
    "prefill",
    "quantization",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]

__fake__ = True


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return releases.selected("flashinfer")
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"the fake of flashinfer {releases.selected('flashinfer')} has no {name}; it covers "
        f"{', '.join(__all__)}"
    )
