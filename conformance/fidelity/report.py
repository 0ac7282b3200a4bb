"""A comparison in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from conformance.fidelity.call import in_words, to_json
from conformance.fidelity.compare import UNDEFINED_SHARE, Comparison, Disagreement
from conformance.fidelity.record import Observations
from conformance.fidelity.verdict import KINDS

SHOWN = 40


def table(seen: Observations) -> str:
    """How often each entry point answered how, sound calls and malformed ones apart."""
    counts: Counter[tuple[str, bool, str]] = Counter(
        (call.entry, call.valid, what.kind) for call, what in seen.calls.items()
    )
    entries = sorted({entry for entry, _, _ in counts})
    kinds = [kind for kind in KINDS if any(count[2] == kind for count in counts)]
    lines = [f"{'entry':28}{'calls':10}" + "".join(f"{kind:>10}" for kind in kinds)]
    for entry in entries:
        for valid, name in ((True, "sound"), (False, "malformed")):
            row = [counts[entry, valid, kind] for kind in kinds]
            if any(row):
                lines.append(f"{entry:28}{name:10}" + "".join(f"{n or '-':>10}" for n in row))
    return "\n".join(lines)


def summary(comparison: Comparison) -> str:
    """The counts that a release is judged by."""
    c = comparison
    share = c.undefined / c.malformed if c.malformed else 0.0
    lines = [
        f"{c.asked - len(c.disagreements)} of {c.asked} calls agree ({c.malformed} malformed): "
        f"{c.fake} against {c.other}",
        f"{c.undefined} malformed calls are undefined ({share:.1%}, at most {UNDEFINED_SHARE:.0%} may be); "
        f"{c.shown} of them shown by two runs",
    ]
    if c.rules_asked:
        lines.append(f"{c.rules_asked - len(c.rules)} of {c.rules_asked} contract rules hold")
        lines += [f"  broken: {one}" for one in c.rules]
        if c.unasked:
            lines.append(f"  {len(c.unasked)} rules were not asked, among them {c.unasked[0]}")
    return "\n".join(lines)


def findings(comparison: Comparison, shrunk: Callable[[Disagreement], Disagreement]) -> Iterator[str]:
    """Disagreements in words, one of a kind, made small by `shrunk`, with how many there are of it."""
    kinds = comparison.kinds()
    for kind in kinds[:SHOWN]:
        one = shrunk(kind[0])
        more = f" (and {len(kind) - 1} more like it)" if len(kind) > 1 else ""
        yield f"{in_words(one.call)}{more}"
        yield f"  {comparison.fake}: {one.fake}"
        yield f"  {comparison.other}: {one.other}"
        yield f"  {one.why}; {to_json(one.call)}"
    if len(kinds) > SHOWN:
        yield f"and {len(kinds) - SHOWN} more kinds"
