"""Faults on purpose, in real worker processes: every one gets its own outcome, and nothing else is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases.codec import digest, load
from cases.model import Case, Request, Step
from conformance.campaign import Campaign
from conformance.isolation import faults
from conformance.isolation.session import IsolatedSession, WorkerAsker
from conformance.outcome import Outcome, Verdict
from conformance.render import render

DEADLINE = 2.0
FAULTS = {
    "Aborts": (Outcome.CRASHED, "the process died of SIGABRT, at "),
    "Leaves": (Outcome.CRASHED, "the process left with exit status 0 in the middle of the case"),
    "HangsWithGil": (Outcome.TIMED_OUT, "no answer within 2 s; the process was killed, at "),
    "OutOfMemory": (Outcome.RAISED, "forward raised: MemoryError"),
    "Lies": (Outcome.MISMATCH, "the output at row "),
}
"""What cannot be shown in fewer processes; `conformance faults` shows all of them."""
HARMLESS = [Case((Step((Request(n, 1),)),)) for n in range(4)]
FATAL = Case((Step((Request(2, faults.TRIGGER), Request(1, 5, uid=1))),), page_size=4)


def name(fault: str) -> str:
    return f"{faults.__name__}:{fault}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conformance")


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[IsolatedSession]:
    with IsolatedSession(
        [name(fault) for fault in [*FAULTS, "Right"]], deadline=DEADLINE, folder=folder
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def told(session: IsolatedSession) -> dict[tuple[str, str], Verdict]:
    """Every verdict of one run, by backend and digest."""
    found: dict[tuple[str, str], Verdict] = {}

    def tell(case: Case, verdict: Verdict) -> None:
        assert (verdict.backend, verdict.digest) not in found
        found[verdict.backend, verdict.digest] = verdict

    given = [*HARMLESS[:2], FATAL, *HARMLESS[2:]]
    Campaign(session.askers, given=given, checks=("metadata", "values"), told=tell).run()
    return found


def asker(session: IsolatedSession, fault: str) -> WorkerAsker:
    return next(a for a in session.askers if a.spec.name == name(fault))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_has_its_outcome(fault: str, told: dict[tuple[str, str], Verdict]) -> None:
    outcome, sentence = FAULTS[fault]
    verdict = told[name(fault), digest(FATAL)]
    assert verdict.outcomes["values"] is outcome
    assert sentence in (verdict.findings[0].message if verdict.findings else "")


def test_neighbours_are_complete(told: dict[tuple[str, str], Verdict]) -> None:
    assert len(told) == len([*FAULTS, "Right"]) * len([*HARMLESS, FATAL])
    assert told[name("Right"), digest(FATAL)].outcomes["values"] is Outcome.PASSED
    for fault in [*FAULTS, "Right"]:
        for case in HARMLESS:
            assert told[name(fault), digest(case)].outcomes["values"] is Outcome.PASSED


def test_place_of_a_crash_and_its_last_words(told: dict[tuple[str, str], Verdict]) -> None:
    (finding,) = told[name("Aborts"), digest(FATAL)].findings
    assert "faults.py:" in finding.message
    assert finding.message.endswith(
        " in fault; it said last: terminate called after throwing an instance of 'std::logic_error'"
    )
    assert " in fault" in told[name("HangsWithGil"), digest(FATAL)].findings[0].message


def test_wrong_answer_is_told_in_full(session: IsolatedSession, told: dict[tuple[str, str], Verdict]) -> None:
    text = render(asker(session, "Lies"), FATAL, told[name("Lies"), digest(FATAL)])
    assert "weights read back with one-hot V" in text
    assert f"replay: conformance replay --backend {name('Lies')} --isolate '" in text


@pytest.mark.slow
def test_crash_is_made_small(session: IsolatedSession) -> None:
    larger = Case((Step((Request(0, faults.TRIGGER), Request(0, 1, uid=1))),), page_size=2)
    campaign = Campaign([asker(session, "Leaves")], given=[larger])
    campaign.run()
    (failure,) = campaign.failures(name("Leaves"))
    assert failure.checks == {"values"}
    assert failure.verdict.outcomes["values"] is Outcome.CRASHED
    (step,) = failure.case.steps
    assert [(r.kv_len, r.qo_len) for r in step.requests] == [(faults.TRIGGER, faults.TRIGGER)]
    text = render(failure.asker, failure.case, failure.verdict)
    assert "values: the process left with exit status 0" in text


def test_worker_killed_between_two_cases(session: IsolatedSession) -> None:
    right = asker(session, "Right")
    assert right.examine(HARMLESS[0], None).passed
    (pid,) = session.pool.pids
    os.kill(pid, signal.SIGKILL)
    assert right.examine(HARMLESS[1], None).passed


def test_case_is_on_disk_before_it_runs(session: IsolatedSession, folder: Path) -> None:
    asker(session, "Right").examine(FATAL, {"values"})
    files = [load(path) for path in (folder / "running").glob(f"{os.getpid()}-*.json") if path.stat().st_size]
    assert FATAL in [file.case for file in files]
    assert f"was running on backend {name('Right')} when the run was cut" in [file.why for file in files]
