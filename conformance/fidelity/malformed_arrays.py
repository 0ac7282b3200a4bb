"""Index arrays and masks that say something else than they should."""

from __future__ import annotations

from random import Random

import torch

from conformance.fidelity.call import FLASHINFER_APPEND, FLASHINFER_PAGED
from conformance.fidelity.draft import Draft, ints
from conformance.fidelity.malformation import CSR, GRAPH, PAGED, PLANNED, arrays_of, named, on, sums_of

FAR_PAGE = 10**9
"""A page id whose address no allocation of a GPU holds."""


def _narrow_arrays(entry: str) -> tuple[str, ...]:
    """Arrays whose 64-bit form makes no kernel variant of its own."""
    if entry in PLANNED:
        return tuple(name for name in arrays_of(entry) if name != "kv_indptr")
    return arrays_of(entry)


@named("int64", _narrow_arrays)
def _int64(draft: Draft, target: str, random: Random) -> None:
    draft.arrays[target] = draft.arrays[target].long()


@named(
    "wide_indptr",
    lambda entry: ("kv_indptr",) if entry in PLANNED and not entry.endswith("fa3") else (),
    variant="plain",
    rare=True,
)
def _wide_indptr(draft: Draft, target: str, random: Random) -> None:
    draft.arrays[target] = draft.arrays[target].long()


@named("int64_lens", on(FLASHINFER_PAGED, "seq_lens"))
def _int64_lens(draft: Draft, target: str, random: Random) -> None:
    draft.arrays[target] = torch.tensor(draft.call.kv_lens, dtype=torch.int64)


@named("int64_buffers", on(GRAPH, "buffers"))
def _int64_buffers(draft: Draft, target: str, random: Random) -> None:
    draft.buffer_dtype = torch.int64


@named("headless", sums_of)
def _headless(draft: Draft, target: str, random: Random) -> None:
    """Without the leading 0."""
    draft.arrays[target] = draft.arrays[target][1:].clone()


@named("headless_lens", on(FLASHINFER_PAGED, "kv_indptr"), rare=True)
def _headless_lens(draft: Draft, target: str, random: Random) -> None:
    """Without the leading 0, and lengths beside it, as mini-sglang gives them."""
    draft.arrays[target] = draft.arrays[target][1:].clone()
    draft.arrays["seq_lens"] = ints(draft.call.kv_lens)


@named("offset", sums_of, rare=True)
def _offset(draft: Draft, target: str, random: Random) -> None:
    """From 1 instead of 0."""
    draft.arrays[target] = draft.arrays[target] + 1


@named("falls", sums_of)
def _falls(draft: Draft, target: str, random: Random) -> None:
    """Two entries in the wrong order."""
    array = draft.arrays[target].clone()
    if len(array) > 2:
        at = random.randrange(1, len(array) - 1)
        array[at], array[at + 1] = array[at + 1].item(), array[at].item()
    draft.arrays[target] = array


@named("longer", sums_of)
def _longer(draft: Draft, target: str, random: Random) -> None:
    """For one request more, which has nothing."""
    draft.arrays[target] = torch.cat((draft.arrays[target], draft.arrays[target][-1:]))


@named("shorter", arrays_of, rare=("indices",))
def _shorter(draft: Draft, target: str, random: Random) -> None:
    """Without the last entry (row)."""
    draft.arrays[target] = draft.arrays[target][:-1].clone()


@named("last_page", on(CSR, "zero", "above"))
def _last_page(draft: Draft, target: str, random: Random) -> None:
    last = draft.arrays["last_page_len"].clone()
    if len(last):
        at = random.randrange(len(last))
        last[at] = 0 if target == "zero" else last[at] + draft.call.page_size
    draft.arrays["last_page_len"] = last


@named("page", on(PAGED + FLASHINFER_APPEND, "before", "behind"), rare=True)
def _page(draft: Draft, target: str, random: Random) -> None:
    """A page id next to the pool."""
    _foreign_page(draft, -1 if target == "before" else draft.tensors["k"].shape[0], random)


@named("far_page", on(PAGED + FLASHINFER_APPEND, "far"), rare=True)
def _far_page(draft: Draft, target: str, random: Random) -> None:
    _foreign_page(draft, FAR_PAGE, random)


def _foreign_page(draft: Draft, page: int, random: Random) -> None:
    name = "indices" if "indices" in draft.arrays else "page_table"
    ids = draft.arrays[name].clone()
    owned = [i for i, length in enumerate(draft.call.kv_lens) if length]
    if name == "indices" and len(ids):
        ids[random.randrange(len(ids))] = page
    elif name == "page_table" and owned and ids.numel():
        row = random.choice(owned)
        ids[min(row, len(ids) - 1), random.randrange(-(-draft.call.kv_lens[row] // draft.call.page_size))] = (
            page
        )
    draft.arrays[name] = ids


@named("place", on(FLASHINFER_APPEND, "later", "earlier", "next", "twice"))
def _place(draft: Draft, target: str, random: Random) -> None:
    """Tokens stored a position later or earlier, in the next request, or one where another goes."""
    name = "batch_indices" if target == "next" else "positions"
    array = draft.arrays[name]
    if target == "twice":
        for found in (draft.arrays["batch_indices"], array):
            found[-1] = found[0]
    else:
        draft.arrays[name] = array + (-1 if target == "earlier" else 1)


@named("token_locations", on(PAGED, "pages"), rare=True)
def _token_locations(draft: Draft, target: str, random: Random) -> None:
    """Locations of each page's first token instead of page ids."""
    name = "indices" if "indices" in draft.arrays else "page_table"
    draft.arrays[name] = draft.arrays[name] * draft.call.page_size


@named("lens", on(FLASHINFER_PAGED, "more", "fewer"))
def _lens(draft: Draft, target: str, random: Random) -> None:
    """`seq_lens` beside the page arrays that says otherwise."""
    by = 3 if target == "more" else -1
    draft.arrays["seq_lens"] = ints(max(0, n + by) for n in draft.call.kv_lens)


@named("cache_lens", on(("sgl.kvcache",), "more", "fewer", "beyond", "negative", "int"))
def _cache_lens(draft: Draft, target: str, random: Random) -> None:
    lens = draft.arrays["cache_seqlens"].clone()
    at = random.randrange(len(lens)) if len(lens) else 0
    if target == "int":
        draft.options["cache_seqlens"] = int(lens[at]) if len(lens) else 0  # in place of the array
        return
    if len(lens):
        width = (
            draft.arrays["page_table"].shape[1] * draft.call.page_size
            if draft.arrays["page_table"].dim() == 2
            else 0
        )
        lens[at] = {
            "more": int(lens[at]) + 1,
            "fewer": max(0, int(lens[at]) - 1),
            "beyond": width + random.randrange(1, 2 * draft.call.page_size + 1),
            "negative": -random.randrange(1, 4),
        }[target]
    draft.arrays["cache_seqlens"] = lens


@named("table", on(("sgl.kvcache",), "narrow", "flat"))
def _table(draft: Draft, target: str, random: Random) -> None:
    table = draft.arrays["page_table"]
    if target == "narrow":  # one column less than the longest request takes
        draft.arrays["page_table"] = table[..., :-2].contiguous()
    else:
        draft.arrays["page_table"] = table.reshape(-1)


def _masked(entry: str) -> tuple[str, ...]:
    if entry.startswith(("fi.prefill", "fi.ragged")):
        return ("short", "long") if entry.endswith("fa2") else ("given",)
    return ()


@named("mask", _masked)
def _mask(draft: Draft, target: str, random: Random) -> None:
    """A custom mask with elements missing or left over, or one that the kernel does not know."""
    if "custom_mask" not in draft.arrays:
        size = sum(n * m for n, m in zip(draft.call.qo_lens, draft.call.kv_lens, strict=True))
        draft.arrays["custom_mask"] = torch.ones(size, dtype=torch.bool)
    mask = draft.arrays["custom_mask"]
    if target == "short":
        draft.arrays["custom_mask"] = mask[: max(0, len(mask) - 5)].clone()
    elif target == "long":
        draft.arrays["custom_mask"] = torch.cat((mask, mask))
