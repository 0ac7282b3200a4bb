"""The parts of isolation that need no other process."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from backends.registry import BackendSpec, resolve
from cases.codec import digest
from cases.model import Case, Request, Step
from conformance.campaign import MAX_DEATHS, Campaign
from conformance.isolation.deadlines import compiler_ticks
from conformance.isolation.lastwords import ending, last_words
from conformance.isolation.messages import Retired
from conformance.isolation.pool import visible_gpus
from conformance.isolation.verdicts import died, spent
from conformance.outcome import Finding, Outcome, Verdict
from conformance.render import render
from conformance.sweep import MAX_LOST, Sweep
from conformance.trial import RemoteAsker

CASES = [Case((Step((Request(n, 1),)),)) for n in range(MAX_LOST + 5)]
FAULT = """
terminate called after throwing an instance of 'c10::Error'
  what():  no kernel

Fatal Python error: Aborted

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/threading.py", line 1 in wait

Current thread 0x00007f02 (most recent call first):
  File "{stdlib}/ctypes/__init__.py", line 519 in string_at
  File "/home/me/engine/attention.py", line 30 in forward
  File "{harness}/engine.py", line 136 in forward

Extension modules: numpy, torch (total: 2)
"""


def written(path: Path, text: str) -> Path:
    harness = Path(sys.modules[Sweep.__module__].__file__ or "").parent
    path.write_text(text.format(stdlib=Path(os.__file__).parent, harness=harness))
    return path


def test_last_words_name_the_users_own_line(tmp_path: Path) -> None:
    words = last_words(written(tmp_path / "log", FAULT))
    assert words.where == "/home/me/engine/attention.py:30 in forward"
    assert words.said == "what():  no kernel"
    assert str(words) == ", at /home/me/engine/attention.py:30 in forward; it said last: what():  no kernel"


def test_last_words_without_any(tmp_path: Path) -> None:
    assert str(last_words(tmp_path / "none")) == ""
    assert str(last_words(written(tmp_path / "log", ""))) == ""
    assert last_words(written(tmp_path / "log", "x" * 1000)).said == "x" * 300


def test_last_words_name_the_innermost_line_where_all_are_the_harnesses(tmp_path: Path) -> None:
    text = 'Thread 0x1 (most recent call first):\n  File "{harness}/pool.py", line 3 in fill\n'
    assert (last_words(written(tmp_path / "log", text)).where or "").endswith("conformance/pool.py:3 in fill")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "left with exit status 0 in the middle of the case"),
        (None, "left in order in the middle of the case"),
        (-6, "died of SIGABRT"),
        (-9, "was killed from outside (SIGKILL; for want of memory, perhaps)"),
        (-15, "closed its channel, or was ended from outside (SIGTERM)"),
        (-99, "died of signal 99"),
    ],
)
def test_endings(status: int | None, said: str) -> None:
    assert ending(status) == said


def test_causes_stand_beside_a_lost_context() -> None:
    findings = (
        Finding(check="lifecycle", message="ran before plan"),
        Finding(check="values", message="forward raised: AcceleratorError", outcome=Outcome.RAISED),
        Finding(check="pool", message="garbage that was read through the lost context"),
    )
    outcomes = {"lifecycle": Outcome.MISMATCH, "values": Outcome.RAISED, "pool": Outcome.MISMATCH}
    half = Verdict(backend="fi", digest="d", outcomes=outcomes, findings=findings)
    verdict = spent(CASES[0], "fi", Retired(Outcome.CRASHED, "the context is lost", half), "assert failed")
    assert verdict.outcomes == {"lifecycle": Outcome.MISMATCH, "values": Outcome.CRASHED}
    assert [f.message for f in verdict.findings] == [
        "ran before plan",
        "the context is lost; it said last: assert failed",
        "forward raised: AcceleratorError",
    ]
    assert verdict.digest == digest(CASES[0])


def test_gpus_are_named_as_this_process_may_see_them() -> None:
    assert list(visible_gpus(None, 2)) == ["0", "1"]
    assert list(visible_gpus("3, 5", 2)) == ["3", "5"]
    assert list(visible_gpus("GPU-1f,GPU-2e", 2)) == ["GPU-1f", "GPU-2e"]
    assert list(visible_gpus("", 2)) == ["0", "1"]


def test_busy_compilers_are_seen() -> None:
    busy = subprocess.Popen(
        ["/bin/sh", "-c", f"{sys.executable} -c 'while True: pass' & wait"], start_new_session=True
    )
    try:
        end = time.monotonic() + 30
        while compiler_ticks(busy.pid) < 5:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        os.killpg(busy.pid, 9)
        busy.wait()
    while compiler_ticks(busy.pid):  # killed, but not gone at once
        assert time.monotonic() < end + 30


class Crashes(RemoteAsker):
    """Stands for a pool of workers in which every case costs a process."""

    def __init__(self, spec: BackendSpec) -> None:
        super().__init__(spec, "strict")
        self.asked: list[Case] = []

    def examine(self, case: Case, checks: Collection[str] | None) -> Verdict:
        self.asked.append(case)
        return died(case, self.spec.name, Outcome.CRASHED, "the process died of SIGSEGV")

    def stream(
        self, items: Iterable[tuple[Case, Sequence[str]]], checks: Collection[str] | None
    ) -> Iterator[tuple[Case, Verdict]]:
        for case, _ in items:
            yield case, self.examine(case, checks)

    def read_back(self, case: Case, findings: Sequence[Finding]) -> str:
        return "weights"


def test_backend_that_always_crashes_is_given_up() -> None:
    asker = Crashes(resolve("torch"))
    sweep = Sweep([asker])
    told = list(sweep.ask_each((case, [asker]) for case in CASES))
    assert [case for case, _ in told] == CASES
    assert asker.asked == CASES[:MAX_LOST]
    (tally,) = sweep.tallies.values()
    assert tally.lost == tally.ran == MAX_LOST
    assert dict(tally.unsupported) == {f"not asked after {MAX_LOST} cases that cost their process": 5}


def test_making_a_crash_small_costs_few_processes() -> None:
    """Every case crashes, so that the smallest of all is within reach of 30 crashes."""
    long = Case(
        (Step(tuple(Request(900 + n, 2, uid=n) for n in range(6))),), page_size=16, placement="scattered"
    )
    asker = Crashes(resolve("torch"))
    campaign = Campaign([asker], given=[long], count=50)
    (tally,) = campaign.tallies.values()
    tally.add(long, asker.examine(long, None))
    failure = campaign.shrink("torch", "values")
    assert 5 < len(asker.asked) <= MAX_DEATHS + 1
    assert failure.case == Case((Step((Request(),), "decode", "decode"),))
    assert failure.verdict.outcomes == {"values": Outcome.CRASHED}


def test_only_the_same_outcome_counts_as_smaller() -> None:
    class CrashesOrHangs(Crashes):
        def examine(self, case: Case, checks: Collection[str] | None) -> Verdict:
            self.asked.append(case)
            outcome = Outcome.TIMED_OUT if case.page_size == 1 else Outcome.CRASHED
            return died(case, self.spec.name, outcome, "gone")

    asker = CrashesOrHangs(resolve("torch"))
    large = Case((Step((Request(5, 2),)),), page_size=4)
    campaign = Campaign([asker])
    (tally,) = campaign.tallies.values()
    tally.add(large, asker.examine(large, None))
    failure = campaign.shrink("torch", "values")
    assert failure.case.page_size == 2
    assert failure.verdict.outcomes == {"values": Outcome.CRASHED}


def test_verdicts_from_elsewhere_are_told_in_full() -> None:
    asker = Crashes(resolve("torch"))
    capped = Case((Step((Request(),)),), dtype="float16", page_size=4, layout="HND")
    (verdict,) = Sweep([asker]).ask(capped)
    assert verdict.unsupported == "layout HND"
    (verdict,) = Sweep([asker]).ask(CASES[0])
    text = render(asker, CASES[0], verdict)
    assert "values: the process died of SIGSEGV" in text
    assert "\nweights\n" in text
    assert "(strict mode)\n" in text
    assert "\nreplay: conformance replay --backend torch --isolate '" in text
    asker.real = True
    text = render(asker, CASES[0], verdict)
    assert "(real libraries)\n" in text
    assert "\nreplay: conformance replay --backend torch --library real '" in text


def test_a_fault_is_told_after_a_library_took_its_signal() -> None:
    code = (
        "import ctypes, signal; from conformance.isolation import worker; worker._watch_faults(); "
        "ctypes.CDLL(None).signal(signal.SIGSEGV, 0); worker._watch_faults(); ctypes.string_at(16)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "in string_at" in done.stderr


def test_installed_code_is_the_libraries_wherever_it_lies(tmp_path: Path) -> None:
    pebble = Path(importlib.import_module("pebble").__file__ or "")
    text = (
        "Thread 0x1 (most recent call first):\n"
        f'  File "{{harness}}/engine.py", line 3 in forward\n  File "{pebble}", line 9 in _trampoline\n'
    )
    assert (last_words(written(tmp_path / "log", text)).where or "").endswith("engine.py:3 in forward")
