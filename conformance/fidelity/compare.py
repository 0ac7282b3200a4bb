"""Comparing what two libraries did with the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conformance.errors import UsageError
from conformance.fidelity.call import LibraryCall, to_json
from conformance.fidelity.record import Observations
from conformance.fidelity.verdict import BY_LUCK, ROUNDING, Seen, differ
from fakes.contract import rules as contract_rules

UNDEFINED_SHARE = 0.1
"""Of the malformed calls, at most so many may end undefined on the fake."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A call that two libraries answered differently. `why`: which part differs."""

    call: LibraryCall
    fake: Seen
    other: Seen
    why: str

    @property
    def group(self) -> tuple[str, tuple[str, ...], str, str]:
        """What findings of one cause share: entry, malformations and both verdicts."""
        fake, other = (f"{seen.kind} {seen.error}".strip() for seen in (self.fake, self.other))
        return self.call.entry, self.call.malformations, fake, other


def disagreement(call: LibraryCall, fake: Seen, other: Seen, *, real: bool) -> Disagreement | None:
    """Whether two answers to a call differ: in verdict, error type, or numbers.

    `real`: the other is the real library. Then the fake's "undefined" stands for whatever luck gave the
    real one, except a refusal that Python code makes, unless the fake says that it may: the fake knows what
    is read, two runs only show it.
    """
    if (
        real
        and fake.kind == "undefined"
        and (other.kind != "refused" or other.error in (*BY_LUCK, fake.error))
    ):
        return None
    about_right = fake.numbers is not None and {fake.kind, other.kind} == {"right", "wrong"}
    if about_right and not differ(fake.numbers, other.numbers, ROUNDING):
        return None  # one result, whose error is about the limit of a verdict
    if fake.kind != other.kind:
        return Disagreement(call, fake, other, "verdict")
    if fake.error != other.error:
        return Disagreement(call, fake, other, "error type")
    gap = differ(fake.numbers, other.numbers)
    return Disagreement(call, fake, other, gap) if gap else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`rules`: ids of contract rules that a library does not obey, with what it did."""

    fake: str
    other: str
    asked: int
    malformed: int
    undefined: int
    """Malformed calls that the fake calls undefined."""
    shown: int
    """Those of them that the other calls undefined, too: two runs in other surroundings differed."""
    disagreements: tuple[Disagreement, ...]
    rules_asked: int
    rules: tuple[str, ...]
    unasked: tuple[str, ...]
    """Rules that one of the two could not be asked."""

    def kinds(self) -> list[list[Disagreement]]:
        """Disagreements of one cause together, most frequent first, the smallest call first in each."""
        groups: dict[object, list[Disagreement]] = {}
        for one in self.disagreements:
            groups.setdefault(one.group, []).append(one)
        for group in groups.values():
            group.sort(key=lambda one: len(to_json(one.call)))
        return sorted(groups.values(), key=len, reverse=True)

    @property
    def too_undefined(self) -> bool:
        return self.undefined > UNDEFINED_SHARE * self.malformed

    @property
    def clean(self) -> bool:
        return not self.disagreements and not self.rules and not self.too_undefined


def compare(first: Observations, second: Observations) -> Comparison:
    """Compare two runs of the same calls. In each disagreement the fake comes first, of two fakes the first.

    Raises:
        UsageError: they were asked different calls.
    """
    if first.calls.keys() != second.calls.keys():
        only = len(first.calls.keys() ^ second.calls.keys())
        raise UsageError(
            f"{first.name} and {second.name} were asked different calls: {only} were asked of one alone"
        )
    fake, other = (second, first) if second.kind == "fake" != first.kind else (first, second)
    real = other.kind == "real" != fake.kind
    malformed = [call for call in fake.calls if not call.valid]
    undefined = [call for call in malformed if fake.calls[call].kind == "undefined"]
    found = [disagreement(call, seen, other.calls[call], real=real) for call, seen in fake.calls.items()]
    broken, unasked, asked = _rules((fake, other))
    return Comparison(
        fake=fake.name,
        other=other.name,
        asked=len(fake.calls),
        malformed=len(malformed),
        undefined=len(undefined),
        shown=sum(other.calls[call].kind == "undefined" for call in undefined),
        disagreements=tuple(one for one in found if one is not None),
        rules_asked=asked,
        rules=tuple(broken),
        unasked=tuple(unasked),
    )


def _rules(sides: Sequence[Observations]) -> tuple[list[str], list[str], int]:
    """Rules that a side does not obey, rules that a side was not asked, and how many were asked."""
    broken: list[str] = []
    unasked: list[str] = []
    asked = 0
    for side in sides:
        if not side.rules:
            continue
        for rule in contract_rules():
            release = side.versions.get(rule.library, "")
            if release not in rule.verdicts:
                continue
            seen = side.rules.get(rule.id)
            if seen is None:
                unasked.append(f"{rule.id} on {side.name}: it needs the {rule.device} device")
                continue
            asked += 1
            if not rule.verdicts[release].accepts(seen):
                broken.append(f"{rule.id} on {side.name}: {rule.verdicts[release]} expected, saw {seen}")
    return broken, unasked, asked
