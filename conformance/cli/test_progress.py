"""Progress of long runs."""

from __future__ import annotations

import pytest

from cases.model import Case, Request, Step
from conformance.cli.progress import Progress
from conformance.outcome import Outcome, Verdict

CASE = Case((Step((Request(0, 1),)),))
RIGHT = Verdict(backend="mine", digest="0", outcomes={"values": Outcome.PASSED})
WRONG = Verdict(backend="mine", digest="0", outcomes={"values": Outcome.MISMATCH})


def test_a_line_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 10.0, 30.0, 59.0, 61.0])
    heard: list[Verdict] = []
    tell = Progress(lambda _, verdict: heard.append(verdict), clock=lambda: next(seconds))
    for verdict in (RIGHT, WRONG, RIGHT, RIGHT):
        tell(CASE, verdict)
    assert heard == [RIGHT, WRONG, RIGHT, RIGHT]
    assert capsys.readouterr().err.splitlines() == [
        "2 answers after 30 s, 0 a second, 1 of them failures",
        "4 answers after 61 s, 0 a second, 1 of them failures",
    ]


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tell = Progress()
    tell(CASE, RIGHT)
    assert capsys.readouterr().err == ""
