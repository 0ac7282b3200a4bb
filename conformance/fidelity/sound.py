"""Sound calls: the arguments that malformations then spoil, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from conformance.fidelity.call import FLASHINFER_APPEND, FLASHINFER_MERGE, LibraryCall
from conformance.fidelity.draft import LN2, Draft, csr, edges, ints, running_sum
from fakes.contract.check import dense

SPARE_PAGES = 3
"""Pages of the pool that no request owns."""


def sound(call: LibraryCall) -> Draft:
    """The arguments of a call without its malformations."""
    random = torch.Generator().manual_seed(call.seed)
    if call.entry in FLASHINFER_MERGE or call.entry == "sgl.merge_state_v2":
        return _merge(call, random)
    if call.entry in FLASHINFER_APPEND:
        return _append(call, random)
    dtype = getattr(torch, call.dtype)
    rows, tokens = sum(call.qo_lens), sum(call.kv_lens)
    q = torch.randn((rows, call.num_qo_heads, call.head_dim), generator=random).to(dtype)
    k, v = (
        torch.randn((tokens, call.num_kv_heads, call.head_dim), generator=random).to(dtype) for _ in range(2)
    )
    masks = _masks(call, random) if call.custom_mask else None
    expected = _expected(call, q, k, v, masks)
    draft = Draft(call, {}, {"q": q}, _options(call, dtype), expected)
    if masks is not None:
        draft.arrays["custom_mask"] = torch.cat([mask.reshape(-1) for mask in masks])
    if call.entry in ("fi.ragged.fa2", "fi.ragged.fa3"):
        draft.tensors |= {"k": k, "v": v}
        draft.arrays |= {"qo_indptr": running_sum(call.qo_lens), "kv_indptr": running_sum(call.kv_lens)}
    elif call.entry == "sgl.varlen":
        draft.tensors |= {"k": k, "v": v}
        draft.arrays |= {"cu_seqlens_q": running_sum(call.qo_lens), "cu_seqlens_k": running_sum(call.kv_lens)}
        draft.options |= {"max_seqlen_q": max(call.qo_lens), "max_seqlen_k": max(call.kv_lens)}
    else:
        pages = _page(call, k, v, draft, random)
        if call.library == "flashinfer":
            draft.arrays |= csr(call.kv_lens, pages, call.page_size)
            if call.entry.startswith("fi.prefill"):
                draft.arrays["qo_indptr"] = running_sum(call.qo_lens)
            if call.seq_lens:
                draft.arrays["seq_lens"] = ints(call.kv_lens)
            draft.options["page_size"] = call.page_size
            draft.graph_batch, draft.graph_indices = len(call.kv_lens), sum(map(len, pages)) + 4
        else:
            draft.arrays |= {
                "page_table": _table(pages),
                "cache_seqlens": ints(call.kv_lens),
                "cu_seqlens_q": running_sum(call.qo_lens),
            }
            draft.options |= {"max_seqlen_q": max(call.qo_lens), "num_splits": call.num_splits}
    if call.host_metadata:
        draft.on_host |= set(draft.arrays) - {"custom_mask"}
    return draft


def _options(call: LibraryCall, dtype: torch.dtype) -> dict[str, Any]:
    if call.library == "flashinfer":
        return {
            "num_qo_heads": call.num_qo_heads,
            "num_kv_heads": call.num_kv_heads,
            "head_dim": call.head_dim,
            "causal": call.causal,
            "window_left": call.window_left,
            "logits_soft_cap": call.soft_cap or None,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
    window = (call.window_left, 0) if call.causal else (call.window_left, -1)
    return {
        "causal": call.causal,
        "window_size": window if call.window_left >= 0 else (-1, -1),
        "softcap": call.soft_cap,
    }


def _masks(call: LibraryCall, random: torch.Generator) -> list[torch.Tensor]:
    masks: list[torch.Tensor] = []
    for rows, keys in zip(call.qo_lens, call.kv_lens, strict=True):
        mask = torch.rand((rows, keys), generator=random) < 0.6
        if keys:
            mask[:, keys - 1] = True
        masks.append(mask)
    return masks


def _expected(
    call: LibraryCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: list[torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    row_edges, key_edges = edges(call.qo_lens), edges(call.kv_lens)
    outs: list[torch.Tensor] = []
    logs: list[torch.Tensor] = []
    for i, ((a, b), (c, d)) in enumerate(zip(pairwise(row_edges), pairwise(key_edges), strict=True)):
        mask = None
        if masks is not None:
            own = torch.arange(b - a)[:, None] + (d - c) - (b - a)
            mask = masks[i]
            if call.window_left >= 0:
                mask = mask & (torch.arange(d - c)[None, :] >= own - call.window_left)
        out, lse = dense(
            q[a:b],
            k[c:d],
            v[c:d],
            causal=call.causal,
            window_left=call.window_left,
            soft_cap=call.soft_cap,
            mask=mask,
        )
        outs.append(out)
        logs.append(lse)
    return torch.cat(outs), torch.cat(logs)


def _page(
    call: LibraryCall, k: torch.Tensor, v: torch.Tensor, draft: Draft, random: torch.Generator
) -> list[list[int]]:
    """Store k and v in scattered pages; returns each request's page ids."""
    size = call.page_size
    counts = [-(-length // size) for length in call.kv_lens]
    total = sum(counts) + SPARE_PAGES
    order: list[int] = torch.randperm(total, generator=random).numpy().tolist()
    ends = edges(counts)
    pages = [order[a:b] for a, b in pairwise(ends)]
    shape = (total, size, call.num_kv_heads, call.head_dim)
    slots = _slots(pages, size, _places([0] * len(pages), call.kv_lens))
    for name, stored in (("k", k), ("v", v)):
        if call.poisoned:
            cache = torch.full(shape, torch.nan, dtype=k.dtype)
        else:
            cache = torch.randn(shape, generator=random).to(k.dtype)
        cache.view(total * size, call.num_kv_heads, call.head_dim)[slots] = stored
        draft.tensors[name] = cache
    return pages


def _places(begins: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """(request, position) of the tokens of each request from one position up to another."""
    return [
        (request, i) for request, (a, b) in enumerate(zip(begins, ends, strict=True)) for i in range(a, b)
    ]


def _slots(pages: list[list[int]], page_size: int, places: list[tuple[int, int]]) -> torch.Tensor:
    """int64, where these tokens stand in the pool."""
    slots = [pages[request][i // page_size] * page_size + i % page_size for request, i in places]
    return torch.tensor(slots, dtype=torch.int64)


def _append(call: LibraryCall, random: torch.Generator) -> Draft:
    """The last tokens of each request, to be stored behind those that its pages hold."""
    dtype = getattr(torch, call.dtype)
    shape = (sum(call.kv_lens), call.num_kv_heads, call.head_dim)
    k, v = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    draft = Draft(call, {}, {}, {}, (k, v))
    pages = _page(call, k, v, draft, random)
    caches = [draft.tensors.pop(name).flatten(0, 1) for name in ("k", "v")]
    stored = torch.cat(caches).double()
    draft.expected = stored, stored.new_zeros(stored.shape[:2])
    stored_lens = [length - new for new, length in zip(call.qo_lens, call.kv_lens, strict=True)]
    places = _places(stored_lens, call.kv_lens)
    slots = _slots(pages, call.page_size, places)
    for name, cache in zip(("append_key", "append_value"), caches, strict=True):
        draft.tensors[name] = cache[slots]
    for name, cache in zip(("k", "v"), caches, strict=True):
        cache[slots] = torch.randn((len(slots), *cache.shape[1:]), generator=random).to(dtype)
        draft.tensors[name] = cache.unflatten(0, (-1, call.page_size))
    draft.arrays = {
        "batch_indices": ints(request for request, _ in places),
        "positions": ints(position for _, position in places),
        **csr(call.kv_lens, pages, call.page_size),
    }
    return draft


def _table(pages: list[list[int]]) -> torch.Tensor:
    """FlashAttention's page table, one column wider than needed; columns behind a request's pages hold 0."""
    table = torch.zeros((len(pages), max(map(len, pages)) + 1), dtype=torch.int32)
    for row, own in enumerate(pages):
        table[row, : len(own)] = ints(own)
    return table


def _merge(call: LibraryCall, random: torch.Generator) -> Draft:
    """States of the disjoint parts of one attention, each of random keys."""
    rows, heads, dim = sum(call.qo_lens), call.num_qo_heads, call.head_dim
    dtype = getattr(torch, call.dtype)
    count = call.num_states if call.entry == "fi.merge_states" else 2
    v = torch.randn((rows, count, heads, dim), generator=random).to(dtype)
    s = torch.randn((rows, count, heads), generator=random) * 3
    if call.empty_states:
        s = torch.where(torch.rand(s.shape, generator=random) < 0.5, -torch.inf, s)
    base = 1.0 if call.library == "sgl_kernel" else LN2
    logs = s.double() * base
    lse = torch.logsumexp(logs, dim=1)
    weights = torch.exp(logs - torch.where(lse.isfinite(), lse, 0.0)[:, None])
    out = (weights[..., None] * v.double()).sum(dim=1)
    if call.entry == "fi.merge_states":
        tensors = {"v": v, "s": s}
    else:
        tensors = {"v_a": v[:, 0], "s_a": s[:, 0], "v_b": v[:, 1], "s_b": s[:, 1]}
    return Draft(call, {}, {name: t.contiguous() for name, t in tensors.items()}, {}, (out, lse))
