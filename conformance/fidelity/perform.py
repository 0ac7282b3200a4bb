"""Making a call: the same code for a library and its fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from conformance.fidelity.call import (
    FLASHINFER_APPEND,
    FLASHINFER_MERGE,
    FLASHINFER_PAGED,
    FLASHINFER_RAGGED,
)
from conformance.fidelity.draft import Draft
from conformance.fidelity.surroundings import Place


@dataclass(slots=True)
class Stage:
    """How far a call came: "create", "plan" or "run"."""

    name: str = "create"


@dataclass(slots=True)
class Hands:
    """What performing a call needs: the library, where tensors go, and what hears which batch begins."""

    library: Any
    place: Place
    stage: Stage = field(default_factory=Stage)
    mark: Callable[[int], object] = int


FUSED = ("q", "append_key", "append_value")
"""What engines cut out of one tensor of q, k and v."""

Answer = tuple[torch.Tensor, torch.Tensor]


def perform(draft: Draft, hands: Hands) -> Answer:
    """Make the call; returns out `[rows, heads, dim]` and LSE `[rows, heads]` as the library gave them.

    Raises:
        Exception: whatever the library raises.
    """
    entry = draft.call.entry
    if entry in FLASHINFER_PAGED:
        return _paged(draft, hands)
    if entry in FLASHINFER_RAGGED:
        return _ragged(draft, hands)
    if entry in FLASHINFER_APPEND:
        return _append(draft, hands)
    if entry in FLASHINFER_MERGE:
        return _flashinfer_merge(draft, hands)
    hands.stage.name = "run"
    tensors = {name: _put(draft, hands, name) for name in (*draft.tensors, *draft.arrays)}
    if entry == "sgl.merge_state_v2":
        merge = import_module(f"{hands.library.__name__}.attention").merge_state_v2
        out, lse = merge(*(tensors[name] for name in ("v_a", "s_a", "v_b", "s_b")))
        return out, lse
    flash_attn = import_module(f"{hands.library.__name__}.flash_attn")
    if entry == "sgl.kvcache":
        tensors["k_cache"], tensors["v_cache"] = _caches(draft, hands, tensors.pop("k"), tensors.pop("v"))
        out, lse, *_ = flash_attn.flash_attn_with_kvcache(
            **(tensors | draft.options), return_softmax_lse=True
        )
    else:
        out, lse, *_ = flash_attn.flash_attn_varlen_func(**(tensors | draft.options), return_softmax_lse=True)
    return out, lse.transpose(-1, -2)


def _put(draft: Draft, hands: Hands, name: str, tensor: torch.Tensor | None = None) -> torch.Tensor:
    if tensor is None:
        tensor = draft.tensors[name] if name in draft.tensors else draft.arrays[name]
    if name in FUSED and draft.call.strided_q:
        fused = torch.cat((tensor, torch.full_like(tensor, torch.nan)), dim=1)
        return hands.place.put(name, fused, on_host=name in draft.on_host, strided=False)[
            :, : tensor.shape[1]
        ]
    return hands.place.put(name, tensor, on_host=name in draft.on_host, strided=name in draft.strided)


def _caches(
    draft: Draft, hands: Hands, k: torch.Tensor | None = None, v: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as two tensors, or as views of one that stacks them."""
    if draft.call.stacked_cache:
        stacked = torch.stack((draft.tensors["k"], draft.tensors["v"]), dim=1)
        placed = hands.place.put("kv", stacked, on_host=False, strided=False)
        return placed[:, 0], placed[:, 1]
    if k is None or v is None:
        return _put(draft, hands, "k"), _put(draft, hands, "v")
    return k, v


def _paged(draft: Draft, hands: Hands) -> Answer:
    call = draft.call
    workspace = hands.place.workspace(draft.workspace_bytes)
    library = hands.library
    if call.entry.startswith("fi.prefill"):
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, call.layout, backend=call.kernel)
    elif call.entry.startswith("fi.graph"):
        wrapper = library.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace,
            *(
                _put(draft, hands, name, torch.zeros(size, dtype=draft.buffer_dtype))
                for name, size in (
                    ("indptr_buffer", draft.graph_batch + 1),
                    ("indices_buffer", draft.graph_indices),
                    ("last_page_len_buffer", draft.graph_batch),
                )
            ),
            call.layout,
            use_tensor_cores=call.kernel == "tensor_core",
        )
    else:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, call.layout, use_tensor_cores=call.kernel == "tensor_core"
        )
    hands.stage.name = "plan"
    hands.mark(0)
    if draft.planned:
        _plan_paged(draft, hands, wrapper, draft.arrays | (draft.earlier or {}))
    if draft.earlier is not None:
        hands.mark(1)
    hands.stage.name = "run"
    cache = _paged_cache(draft, hands)
    return _run(draft, wrapper, _put(draft, hands, "q"), cache)


def _paged_cache(draft: Draft, hands: Hands) -> Any:
    k, v = draft.tensors["k"], draft.tensors["v"]
    if draft.call.layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    if draft.call.stacked_cache:
        return hands.place.put("kv", torch.stack((k, v), dim=1), on_host=False, strided=False)
    return tuple(hands.place.put(name, t, on_host=False, strided=False) for name, t in (("k", k), ("v", v)))


def _plan_paged(draft: Draft, hands: Hands, wrapper: Any, arrays: dict[str, torch.Tensor]) -> None:
    index = {name: _put(draft, hands, name, tensor) for name, tensor in arrays.items()}
    options = dict(draft.options)
    numbers = [options.pop(name) for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")]
    pages = [index.pop(name) for name in ("kv_indptr", "indices", "last_page_len")]
    if draft.call.entry.startswith("fi.prefill"):
        wrapper.plan(index.pop("qo_indptr"), *pages, *numbers, **index, **options)
    else:
        del options["causal"]
        wrapper.plan(*pages, *numbers, **index, **options)


def _append(draft: Draft, hands: Hands) -> Answer:
    """Both caches, slot by slot, stand for the output: there is none."""
    hands.stage.name = "run"
    cache = _paged_cache(draft, hands)
    tensors = {name: _put(draft, hands, name) for name in ("append_key", "append_value", *draft.arrays)}
    hands.library.append_paged_kv_cache(
        *(tensors[name] for name in ("append_key", "append_value", "batch_indices", "positions")),
        cache,
        *(tensors[name] for name in ("indices", "kv_indptr", "last_page_len")),
        draft.call.layout,
    )
    k, v = (cache[:, 0], cache[:, 1]) if draft.call.stacked_cache else cache
    if draft.call.layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    stored = torch.cat((k.flatten(0, 1), v.flatten(0, 1)))
    return stored, stored.new_zeros(stored.shape[:2])


def _ragged(draft: Draft, hands: Hands) -> Answer:
    wrapper = hands.library.BatchPrefillWithRaggedKVCacheWrapper(
        hands.place.workspace(draft.workspace_bytes), draft.call.layout, backend=draft.call.kernel
    )
    hands.stage.name = "plan"
    hands.mark(0)
    if draft.planned:
        arrays = draft.arrays | (draft.earlier or {})
        index = {name: _put(draft, hands, name, tensor) for name, tensor in arrays.items()}
        options = dict(draft.options)
        numbers = [options.pop(name) for name in ("num_qo_heads", "num_kv_heads", "head_dim")]
        wrapper.plan(index.pop("qo_indptr"), index.pop("kv_indptr"), *numbers, **index, **options)
    if draft.earlier is not None:
        hands.mark(1)
    hands.stage.name = "run"
    k, v = draft.tensors["k"], draft.tensors["v"]
    if draft.call.layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return _run(
        draft,
        wrapper,
        _put(draft, hands, "q"),
        *(hands.place.put(name, t, on_host=False, strided=False) for name, t in (("k", k), ("v", v))),
    )


def _run(draft: Draft, wrapper: Any, *given: Any) -> Answer:
    if draft.late:
        return wrapper.forward_return_lse(*given, **draft.late)
    return wrapper.run(*given, return_lse=True)


def _flashinfer_merge(draft: Draft, hands: Hands) -> Answer:
    hands.stage.name = "run"
    tensors = [_put(draft, hands, name) for name in draft.tensors]
    name = draft.call.kernel
    result = getattr(hands.library, name)(*tensors)
    if name == "merge_state_in_place":
        return tensors[0], tensors[1]
    return result
