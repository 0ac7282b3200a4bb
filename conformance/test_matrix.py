from __future__ import annotations

from collections import Counter

from cases.model import Case, Request, Step
from conformance.checks import CHECKS
from conformance.matrix import WIDTH, cell, matrix
from conformance.outcome import Outcome, Verdict
from conformance.sweep import Tally

CASE = Case((Step((Request(),)),))


def tally(name: str, **outcomes: Outcome) -> Tally:
    found = Tally(name)
    found.add(CASE, Verdict(backend=name, digest="0", outcomes=dict(outcomes)))
    return found


def test_cells() -> None:
    found = tally("fa", values=Outcome.PASSED, pool=Outcome.MISMATCH, poison=Outcome.RAISED)
    found.add(CASE, Verdict(backend="fa", digest="1", outcomes={"pool": Outcome.PASSED}))
    assert cell(found, "values") == "ok 1"
    assert cell(found, "pool") == "FAIL 1/2"
    assert cell(found, "poison") == "FAIL 1/1"
    assert cell(found, "lse") == "-"


def test_columns_stand_in_the_order_of_the_checks() -> None:
    found = tally("torch", values=Outcome.PASSED)
    found.unsupported = Counter({"a soft cap": 3, "layout HND": 1})
    narrow = matrix([found], ["values", "pool"])
    assert narrow.splitlines() == [
        "backend  values  pool  cases  unsupported",
        "torch    ok 1    -     1      4",
    ]
    tables = matrix([found]).split("\n\n")
    headings = [word.rstrip("-") for table in tables for word in table.splitlines()[0].split()[1:]]
    assert headings == [*(n[:k] for n, k in _cut()), "cases", "unsup"]


def _cut() -> list[tuple[str, int | None]]:
    cuts = {"metadata": 4, "lifecycle": 4, "host_reads": 5, "determinism": 5, "relations": 4, "refusals": 4}
    return [(name, cuts.get(name)) for name in CHECKS]


def test_usual_matrix_fits_a_terminal() -> None:
    every = dict.fromkeys(CHECKS, Outcome.PASSED)
    found = tally("kernel:fa-kvcache", **every)
    for outcomes in found.outcomes.values():
        outcomes[Outcome.PASSED] = 300
    found.ran = 300
    assert max(map(len, matrix([found]).splitlines())) <= WIDTH


def test_rows_are_aligned() -> None:
    rows = matrix([tally("a", values=Outcome.PASSED), tally("b-longer", values=Outcome.MISMATCH)], ["values"])
    assert rows.splitlines() == [
        "backend   values    cases  unsupported",
        "a         ok 1      1      0",
        "b-longer  FAIL 1/1  1      0",
    ]


def test_a_matrix_that_is_too_wide_goes_on_below() -> None:
    found = tally("kernel:fa-kvcache" * 5, **dict.fromkeys(CHECKS, Outcome.PASSED))
    first, *more = matrix([found]).split("\n\n")
    assert more
    for block in (first, *more):
        assert max(map(len, block.splitlines())) <= WIDTH
        assert block.splitlines()[-1].startswith(found.backend)
