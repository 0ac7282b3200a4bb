"""Isolation from the doors that users come through."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cases
from cases.codec import load
from conformance import report
from conformance.__main__ import main
from conformance.isolation import faults
from conformance.isolation.journal import Journal, left_behind

HANGS = f"{faults.__name__}:HangsWithGil"
ROOT = Path(cases.__file__).parent.parent
CASE = f'{{"steps":[{{"requests":[{{"extend_len":{faults.TRIGGER}}}]}}]}}'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_hang_is_reported_and_the_report_has_its_footer(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", "--backend", HANGS, "--case", CASE, "--deadline", "0.5", "--check", "metadata"]
    assert main([*argv, "--report", "r.jsonl"]) == 1
    said = capsys.readouterr().out
    assert "device       cpu (isolated)" in said
    assert "values: no answer within 0.5 s; the process was killed, at " in said
    assert "FAIL 1/1" in said
    found = report.read("r.jsonl")
    assert found.footer.failed == 1
    assert [v.outcomes for v in found.verdicts if v.shrunk] == [{"values": "timed_out"}]


def test_what_the_worker_cannot_have_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--backend", "tosch", "--isolate", CASE]) == 2
    assert capsys.readouterr().err.startswith("conformance: error: unknown backend 'tosch'; did you mean ")


def test_folder_that_cannot_be_written_is_wrong_usage(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / ".conformance").touch()
    assert main(["replay", "--backend", "torch", "--isolate", CASE]) == 2
    assert capsys.readouterr().err == (
        "conformance: error: .conformance/running: cannot be written (Not a directory), and with --isolate the case "
        "that runs is kept there: run in another folder or with --no-isolate\n"
    )


def test_options_make_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, sentence in (
        (["--deadline", "0"], "--deadline: must be more than 0, got 0"),
        (["--deadline", "soon"], "--deadline: must be a number of seconds, got 'soon'"),
        (["--workers", "0"], "--workers: must be at least 1, got 0"),
    ):
        assert main(["run", "--backend", "torch", *argv]) == 2
        assert sentence in capsys.readouterr().err


def test_interrupt_while_a_worker_starts_is_the_parents(here: Path) -> None:
    """Ctrl-C goes to every process of the group, those too that have only begun."""
    (here / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if '--multiprocessing-fork' in sys.orig_argv:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "conformance", "replay", "--backend", "torch", "--isolate", CASE],
        env={**os.environ, "PYTHONPATH": f"{here}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("torch: passed ")


@pytest.mark.slow
def test_workers_die_with_their_parent(here: Path) -> None:
    """And the case that was running is still there to be replayed."""
    argv = ["run", "--backend", HANGS, "--case", CASE, "--isolate", "--deadline", "300"]
    run = subprocess.Popen(
        [sys.executable, "-m", "conformance", *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        running = here / ".conformance" / "running"
        _until(lambda: any(f'"extend_len":{faults.TRIGGER}' in f.read_text() for f in running.glob("*.json")))
        workers = _children(run.pid)
        assert workers
    finally:
        run.kill()
        run.wait()
    _until(lambda: not any(map(_lives, workers)))
    (left,) = [left for left in left_behind(here / ".conformance") if left.why.startswith("was running")]
    assert left.why == f"was running on backend {HANGS} when the run was cut"
    (request,) = load(left.file).case.steps[0].requests
    assert request.qo_len == faults.TRIGGER
    assert left_behind(here / ".conformance") == []


def test_journal_of_a_living_run_is_left_alone(here: Path) -> None:
    path = here / "running" / f"{os.getpid()}-0.json"
    Journal(path).running("torch", CASE)
    assert left_behind(here) == []
    path.rename(path.with_name("999999999-0.json"))
    (left,) = left_behind(here)
    assert load(left.file).case.steps[0].num_rows == faults.TRIGGER


def _until(holds: object, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
