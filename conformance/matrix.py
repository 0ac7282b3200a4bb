"""The matrix backend x check, as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from conformance.checks import CHECKS
from conformance.outcome import Outcome
from conformance.sweep import Tally

WIDTH = 120
"""Columns of a terminal; where the matrix is wider, long headings are broken in two."""


_BREAKS = {
    "metadata": 4,
    "lifecycle": 4,
    "host_reads": 5,
    "determinism": 5,
    "relations": 4,
    "refusals": 4,
    "unsupported": 5,
}
"""Where a long heading is broken."""


def matrix(tallies: Iterable[Tally], checks: Iterable[str] | None = None) -> str:
    """One row a backend, one column a check: `ok 300`, `FAIL 3/300`, `-` where nothing was there to look at,
    `known 3/300` where all that failed is waived.

    `cases` counts the cases that were run, `unsupported` those that the backend does not declare.
    """
    tallies = list(tallies)
    # a crash fails a check that was not asked for
    failed = {name for tally in tallies for name in tally.failures}
    every = [*CHECKS, *sorted(failed - CHECKS.keys())]
    shown = [name for name in every if checks is None or name in {*checks, *failed}]
    rows = [[tally.backend, *(cell(tally, name) for name in shown), *_counts(tally)] for tally in tallies]
    headings = ["backend", *shown, "cases", "unsupported"]
    broken = _sum(_widths([headings, *rows])) > WIDTH
    head = [[top for top, _ in map(_broken, headings)], [low for _, low in map(_broken, headings)]]
    lines = [*head, *rows] if broken else [headings, *rows]
    return "\n\n".join("\n".join(_aligned(block)) for block in _blocks(lines))


def _blocks(lines: Sequence[Sequence[str]]) -> Iterator[list[list[str]]]:
    """The same in as many tables as it takes to keep to `WIDTH`, each with the first column."""
    widths = _widths(lines)
    groups: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        if len(groups[-1]) > 1 and _sum([widths[c] for c in (*groups[-1], column)]) > WIDTH:
            groups.append([0])
        groups[-1].append(column)
    for group in groups:
        block = [[line[c] for c in group] for line in lines]
        yield [line for line in block if any(line)]


def cell(tally: Tally, check: str) -> str:
    """What one check on one backend came to."""
    counts = tally.outcomes.get(check)
    if not counts:
        return "-"
    total, failed = counts.total(), tally.failed(check)
    if failed:
        return f"FAIL {failed}/{total}"
    known = counts[Outcome.KNOWN]
    return f"known {known}/{total}" if known else f"ok {total}"


def _counts(tally: Tally) -> tuple[str, str]:
    return str(tally.ran), str(tally.unsupported.total())


def _broken(heading: str) -> tuple[str, str]:
    cut = _BREAKS.get(heading)
    return (heading, "") if cut is None else (f"{heading[:cut]}-", heading[cut:])


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _sum(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = _widths(rows)
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
