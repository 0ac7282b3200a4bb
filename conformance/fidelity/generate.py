"""Random calls, half of them sound and half malformed; every malformation of every entry point in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from conformance.fidelity.call import ENTRIES, FLASHINFER_APPEND, Layout, LibraryCall, Variant
from conformance.fidelity.catalogue import known_to, malformation

HEADS = ((1, 1), (2, 1), (4, 1), (8, 2), (4, 4), (8, 1), (6, 2), (5, 1), (7, 1), (14, 2))
PAGE_SIZES = (1, 1, 2, 3, 16, 16, 16, 32, 64)
MAX_KEYS = 400
MAX_REQUESTS = 6
SECOND = 0.2
"""Share of the malformed calls that have a second malformation."""

RARE = 4
"""A rare malformation is drawn in one of so many rounds."""

VARIANTS: dict[str, tuple[Variant, ...]] = {"cuda_core": ("plain", "window"), "fa3": ("plain", "window")}
"""Kernel variants that are drawn, by kernel; others have all three."""


def calls(count: int, seed: int, entries: tuple[str, ...] = ENTRIES) -> list[LibraryCall]:
    """`count` calls, even ones sound, odd ones malformed; a prefix of what more would give."""
    order = _rounds(seed, entries)
    drawn: list[LibraryCall] = []
    for index in range(count):
        random = Random(f"{seed} {index}")
        if index % 2:
            drawn.append(_malformed(random, *next(order)))
        else:
            drawn.append(draw(random, entries[index // 2 % len(entries)]))
    return drawn


def _rounds(seed: int, entries: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(entry, malformation), all of them in a random order, round after round."""
    every = [(entry, name) for entry in entries for name in known_to(entry)]
    number = 0
    while True:
        number += 1
        order = [
            (entry, name)
            for at, (entry, name) in enumerate(every)
            if not _rare(name) or (at + number) % RARE == 0
        ]
        Random(f"{seed} round {number}").shuffle(order)
        yield from order


def _rare(full: str) -> bool:
    return malformation(full).is_rare(full.partition(":")[2])


def _malformed(random: Random, entry: str, name: str) -> LibraryCall:
    names = [name]
    first = malformation(name)
    if random.random() < SECOND:
        others = [
            other
            for other in known_to(entry)
            if other.partition(":")[2] != name.partition(":")[2]
            and not _rare(other)
            and malformation(other).variant is None
            and first.variant is None
        ]
        if others:
            names.append(random.choice(others))
    call = draw(random, entry, first.variant)
    return replace(call, malformations=tuple(names))


def draw(random: Random, entry: str, variant: Variant | None = None) -> LibraryCall:
    """A sound call of an entry point: small, with lengths at the edges of pages and windows."""
    kernel = entry.rpartition(".")[2]
    if variant is None:
        variant = random.choice(VARIANTS.get(kernel, ("plain", "plain", "window", "cap")))
    if "merge" in entry:
        return _merge(random, entry, variant)
    if entry in FLASHINFER_APPEND:
        return _append(random, entry, variant)
    heads = random.choice(HEADS)
    page_size = random.choice(PAGE_SIZES)
    count = random.choice((1, 2, 2, 3, 3, 4, 5, MAX_REQUESTS))
    decode = "decode" in entry or (entry == "sgl.kvcache" and random.random() < 0.4)
    window = random.choice((0, 1, 4, 15, 16, 40)) if variant == "window" else -1
    kv_lens = tuple(_length(random, page_size, window) for _ in range(count))
    causal = "decode" not in entry and random.random() < 0.7
    qo_lens = (1,) * count if decode else tuple(_rows(random, n) for n in kv_lens)
    options: dict[str, Any] = {}
    if "fa2" in entry and random.random() < 0.2:
        options["custom_mask"] = True
    if entry.startswith("fi.") and "ragged" not in entry:
        options["seq_lens"] = random.random() < 0.2
        options["layout"] = random.choice(("NHD", "NHD", "HND"))
        options["host_metadata"] = random.random() < 0.2
    if entry.startswith("fi.ragged"):
        options["host_metadata"] = random.random() < 0.2
    if entry == "sgl.kvcache":
        options["num_splits"] = random.choice((0, 0, 1, 2, 4))
    paged = entry == "sgl.kvcache" or (entry.startswith("fi.") and "ragged" not in entry)
    if paged:
        options["stacked_cache"] = random.random() < 0.2
        options["poisoned"] = random.random() < 0.2
    layout: Layout = options.pop("layout", "NHD")
    return LibraryCall(
        entry=entry,
        variant=variant,
        qo_lens=qo_lens,
        kv_lens=kv_lens,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        page_size=page_size if paged else 1,
        layout=layout,
        causal=causal,
        window_left=window,
        soft_cap=random.choice((1.0, 30.0)) if variant == "cap" else 0.0,
        strided_q=random.random() < 0.2,
        seed=random.randrange(1 << 16),
        **options,
    )


def _append(random: Random, entry: str, variant: Variant) -> LibraryCall:
    page_size = random.choice(PAGE_SIZES)
    heads = random.choice(HEADS)[1]
    kv_lens = [
        _length(random, page_size, -1) for _ in range(random.choice((1, 2, 2, 3, 3, 4, 5, MAX_REQUESTS)))
    ]
    qo_lens = [min(_rows(random, n), n) for n in kv_lens]
    if not sum(qo_lens):
        qo_lens[-1] = kv_lens[-1] = max(1, kv_lens[-1])
    return LibraryCall(
        entry=entry,
        variant="plain" if variant == "cap" else variant,
        qo_lens=tuple(qo_lens),
        kv_lens=tuple(kv_lens),
        num_qo_heads=heads,
        num_kv_heads=heads,
        page_size=page_size,
        layout=random.choice(("NHD", "HND")),
        strided_q=random.random() < 0.2,
        stacked_cache=random.random() < 0.2,
        seed=random.randrange(1 << 16),
    )


def _merge(random: Random, entry: str, variant: Variant) -> LibraryCall:
    rows = random.choice((1, 1, 2, 3, 5, 17))
    heads = random.choice((1, 2, 5, 8))
    return LibraryCall(
        entry=entry,
        variant="plain" if variant == "cap" else variant,
        qo_lens=(rows,),
        num_qo_heads=heads,
        num_kv_heads=heads,
        num_states=random.choice((1, 2, 3, 5)) if entry == "fi.merge_states" else 2,
        empty_states=random.random() < 0.3,
        seed=random.randrange(1 << 16),
    )


def _length(random: Random, page_size: int, window: int) -> int:
    """Keys of a request: mostly few, at edges, now and then none or many."""
    chance = random.random()
    if chance < 0.04:
        return 0
    if chance < 0.12:
        return random.randrange(129, MAX_KEYS)
    if chance < 0.55:
        edges = [page_size * random.randrange(1, 4) + by for by in (-1, 0, 0, 1)]
        edges += [window + by for by in (0, 1, 2)] if window >= 0 else []
        return min(max(1, random.choice(edges)), 130)
    return random.randrange(1, 65)


def _rows(random: Random, kv_len: int) -> int:
    """Query rows of a request: one, some of its keys, all of them, none, or more than it has keys."""
    chance = random.random()
    if chance < 0.3:
        return 1
    if chance < 0.35:
        return 0
    if chance < 0.45:
        return min(kv_len, 40) + random.randrange(1, 4)
    return random.randrange(1, max(2, min(kv_len, 40) + 1))
