"""All malformations, and calls spoilt by them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from random import Random

from conformance.fidelity.call import LibraryCall
from conformance.fidelity.draft import Draft
from conformance.fidelity.malformation import MALFORMATIONS, Malformation
from conformance.fidelity.sound import sound

for _module in ("malformed_arrays", "malformed_calls"):  # importing one enters its malformations
    import_module(f"conformance.fidelity.{_module}")


def malformation(full: str) -> Malformation:
    """The one that "name:target" names.

    Raises:
        KeyError: there is none.
    """
    return MALFORMATIONS[full.partition(":")[0]]


def known_to(entry: str) -> Iterator[str]:
    """Every "name:target" that an entry point knows."""
    for one in MALFORMATIONS.values():
        for target in one.targets(entry):
            yield f"{one.name}:{target}"


def drafted(call: LibraryCall) -> Draft:
    """The arguments of a call, malformations included."""
    return malform(sound(call))


def malform(draft: Draft) -> Draft:
    """Spoil a sound draft as its call says; returns it.

    Raises:
        ValueError: a malformation that this entry point does not know.
    """
    for position, full in enumerate(draft.call.malformations):
        name, _, target = full.partition(":")
        known = MALFORMATIONS.get(name)
        if known is None or target not in known.targets(draft.call.entry):
            raise ValueError(f"{draft.call.entry} knows no malformation {full!r}")
        known.spoil(draft, target, Random(draft.call.seed * 8 + position))
    return draft
