"""Tensors, options and an order of calls that do not fit each other."""

from __future__ import annotations

from random import Random

import torch

from conformance.fidelity.call import FLASHINFER_PAGED
from conformance.fidelity.draft import Draft, csr
from conformance.fidelity.malformation import (
    ATTEND,
    GRAPH,
    PLANNED,
    RAGGED,
    arrays_of,
    named,
    on,
    rows_of,
)


@named("strided", lambda entry: arrays_of(entry) + rows_of(entry))
def _strided(draft: Draft, target: str, random: Random) -> None:
    draft.strided.add(target)


@named("host", lambda entry: (*arrays_of(entry), *rows_of(entry), *(("q",) if entry in ATTEND else ())))
def _host(draft: Draft, target: str, random: Random) -> None:
    draft.on_host.add(target)


@named("dtype", lambda entry: ("q", "kv") if entry in ATTEND else rows_of(entry))
def _dtype(draft: Draft, target: str, random: Random) -> None:
    """The other 16-bit dtype; of states, an `s` in 16 bits; of what is stored, one of the two."""
    other = torch.float16 if draft.call.dtype == "bfloat16" else torch.bfloat16
    for name in ("k", "v") if target == "kv" else (target,):
        draft.tensors[name] = draft.tensors[name].to(other)


@named("float32", lambda entry: ("q", "all") if entry in ATTEND else ("all",))
def _float32(draft: Draft, target: str, random: Random) -> None:
    for name in ("q",) if target == "q" else tuple(draft.tensors):
        draft.tensors[name] = draft.tensors[name].float()


@named("rows", on(ATTEND, "more", "double", "fewer"))
def _rows(draft: Draft, target: str, random: Random) -> None:
    """Rows of q beside those of the batch, or missing."""
    q = draft.tensors["q"]
    if target == "fewer":
        draft.tensors["q"] = q[: max(0, len(q) - random.randrange(1, 3))].contiguous()
    else:
        extra = len(q) if target == "double" else random.randrange(1, 4)
        draft.tensors["q"] = torch.cat((q, q.new_full((extra, *q.shape[1:]), 0.5)))


@named("keys", on(RAGGED, "fewer", "more"))
def _keys(draft: Draft, target: str, random: Random) -> None:
    """Rows of ragged k and v missing, or beside those of the batch."""
    for name in ("k", "v"):
        rows = draft.tensors[name]
        if target == "fewer":
            draft.tensors[name] = rows[: max(0, len(rows) - 2)].contiguous()
        else:
            draft.tensors[name] = torch.cat((rows, rows.new_full((2, *rows.shape[1:]), 0.5)))


@named("heads", on(PLANNED, "double", "half", "kv"))
def _heads(draft: Draft, target: str, random: Random) -> None:
    """Planned for other numbers of heads than q and the cache have."""
    if target == "kv":
        draft.options["num_kv_heads"] = draft.call.num_qo_heads if draft.call.num_kv_heads == 1 else 1
        return
    heads = draft.call.num_qo_heads
    draft.options["num_qo_heads"] = heads * 2 if target == "double" else max(1, heads // 2)


@named("page_size", on(FLASHINFER_PAGED, "double", "half"))
def _page_size(draft: Draft, target: str, random: Random) -> None:
    """Planned for another page size than the cache has."""
    size = draft.call.page_size
    draft.options["page_size"] = size * 2 if target == "double" else max(1, size // 2)


@named("plan", on(PLANNED, "none", "stale", "float32"))
def _plan(draft: Draft, target: str, random: Random) -> None:
    if target == "none":
        draft.planned = False
    elif target == "float32":
        draft.options |= {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    elif "indices" in draft.arrays:  # each request as it was before its last tokens
        call = draft.call
        lens = [max(min(n, 1), n - random.randrange(1, call.page_size + 3)) for n in call.kv_lens]
        counts = [[0] * -(-n // call.page_size) for n in call.kv_lens]
        starts: list[int] = csr(call.kv_lens, counts, call.page_size)["kv_indptr"].numpy().tolist()
        ids: list[int] = draft.arrays["indices"].numpy().tolist()
        pages = [ids[a : a + -(-n // call.page_size)] for a, n in zip(starts, lens, strict=False)]
        draft.earlier = csr(lens, pages, call.page_size)
    else:
        indptr = draft.arrays["kv_indptr"]
        draft.earlier = {"kv_indptr": torch.clamp(indptr - 1, min=0)}


@named("default_dtype", on(PLANNED, "q"), variant="window")
def _default_dtype(draft: Draft, target: str, random: Random) -> None:
    """Planned without dtypes, which means float16, and run in bfloat16."""
    draft.options.pop("q_data_type")
    draft.options.pop("kv_data_type")
    for name in ("q", "k", "v"):
        draft.tensors[name] = draft.tensors[name].to(torch.bfloat16)


@named("late", on(PLANNED, "window_left", "logits_soft_cap"))
def _late(draft: Draft, target: str, random: Random) -> None:
    """Given to the older `forward` alone, or another than planned."""
    draft.late = {
        "window_left": draft.call.window_left,
        "logits_soft_cap": draft.call.soft_cap or None,
        target: 4 if target == "window_left" else 2.0,
    }
    if draft.options["causal"]:
        draft.late["causal"] = True


@named("workspace", on(PLANNED, "1024", "65536", "1048576"))
def _workspace(draft: Draft, target: str, random: Random) -> None:
    draft.workspace_bytes = int(target)


@named("graph", on(GRAPH, "batch", "indices"))
def _graph(draft: Draft, target: str, random: Random) -> None:
    """Buffers made for another batch size, or with room for fewer page ids."""
    if target == "batch":
        draft.graph_batch += 1
    else:
        draft.graph_indices = max(1, len(draft.arrays["indices"]) - 1)


@named("max_q", on(("sgl.kvcache", "sgl.varlen"), "one", "long", "none"))
def _max_q(draft: Draft, target: str, random: Random) -> None:
    draft.options["max_seqlen_q"] = {"one": 1, "long": max(draft.call.qo_lens) + 60, "none": None}[target]


@named("max_k", on(("sgl.varlen",), "one", "long", "none"))
def _max_k(draft: Draft, target: str, random: Random) -> None:
    draft.options["max_seqlen_k"] = {"one": 1, "long": max(draft.call.kv_lens) + 60, "none": None}[target]


@named("states", rows_of)
def _states(draft: Draft, target: str, random: Random) -> None:
    """One row less in this tensor alone."""
    draft.tensors[target] = draft.tensors[target][:-1].contiguous()


@named("transposed", lambda entry: tuple(n for n in rows_of(entry) if n.startswith("s")))
def _transposed(draft: Draft, target: str, random: Random) -> None:
    """LSE as FlashAttention returns it, heads before rows."""
    draft.tensors[target] = draft.tensors[target].transpose(0, -1).contiguous()
