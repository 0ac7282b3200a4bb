"""`Malformation`: one way to spoil a call, and what of each entry point can be spoilt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from conformance.fidelity.call import (
    ENTRIES,
    FLASHINFER_APPEND,
    FLASHINFER_MERGE,
    FLASHINFER_PAGED,
    FLASHINFER_RAGGED,
    Variant,
)
from conformance.fidelity.draft import Draft

Spoil = Callable[[Draft, str, Random], None]
Targets = Callable[[str], tuple[str, ...]]

RUNNING_SUMS = ("qo_indptr", "kv_indptr", "cu_seqlens_q", "cu_seqlens_k")

PLANNED = FLASHINFER_PAGED + FLASHINFER_RAGGED
GRAPH = tuple(entry for entry in ENTRIES if "graph" in entry)
PAGED = (*FLASHINFER_PAGED, "sgl.kvcache")
CSR = (*FLASHINFER_PAGED, *FLASHINFER_APPEND)
RAGGED = (*FLASHINFER_RAGGED, "sgl.varlen")
ATTEND = (*PLANNED, "sgl.kvcache", "sgl.varlen")
MERGE = (*FLASHINFER_MERGE, "sgl.merge_state_v2")


@dataclass(frozen=True, slots=True)
class Malformation:
    """One way to spoil a call. `targets(entry)`: what of that entry point it can spoil.

    `variant`: the only kernel variant that it is drawn with, because it makes a variant of its own. `rare`: targets
    (or all of them) drawn less often, because such calls mostly read memory that no argument describes, crash, or cost
    a build.
    """

    name: str
    targets: Targets
    spoil: Spoil
    variant: Variant | None = None
    rare: bool | tuple[str, ...] = False

    def is_rare(self, target: str) -> bool:
        return self.rare if isinstance(self.rare, bool) else target in self.rare


MALFORMATIONS: dict[str, Malformation] = {}


def named(
    name: str, targets: Targets, *, variant: Variant | None = None, rare: bool | tuple[str, ...] = False
) -> Callable[[Spoil], Spoil]:
    """Enter a function under a name; it is given the draft, the target and a random generator of its own."""

    def keep(spoil: Spoil) -> Spoil:
        MALFORMATIONS[name] = Malformation(name, targets, spoil, variant, rare)
        return spoil

    return keep


def on(entries: tuple[str, ...], *targets: str) -> Targets:
    """The same targets for each of these entry points."""
    return lambda entry: targets if entry in entries else ()


def arrays_of(entry: str) -> tuple[str, ...]:
    """Names of the index arrays that every call of an entry point takes."""
    if entry.startswith("fi.prefill"):
        return ("qo_indptr", "kv_indptr", "indices", "last_page_len")
    if entry in FLASHINFER_APPEND:
        return ("batch_indices", "positions", "kv_indptr", "indices", "last_page_len")
    if entry in FLASHINFER_PAGED:
        return ("kv_indptr", "indices", "last_page_len")
    if entry in FLASHINFER_RAGGED:
        return ("qo_indptr", "kv_indptr")
    return {
        "sgl.kvcache": ("page_table", "cache_seqlens", "cu_seqlens_q"),
        "sgl.varlen": ("cu_seqlens_q", "cu_seqlens_k"),
    }.get(entry, ())


def sums_of(entry: str) -> tuple[str, ...]:
    """Those of them that are running sums."""
    return tuple(name for name in arrays_of(entry) if name in RUNNING_SUMS)


def rows_of(entry: str) -> tuple[str, ...]:
    """Names of the tensors that a merge takes, or that are stored."""
    if entry in FLASHINFER_APPEND:
        return ("append_key", "append_value")
    if entry == "fi.merge_states":
        return ("v", "s")
    return ("v_a", "s_a", "v_b", "s_b") if entry in MERGE else ()
