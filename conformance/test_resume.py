"""A report that was cut goes on where it ends, and ends as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance import report, sweep
from conformance.__main__ import main
from conformance.examine import examine
from conformance.outcome import Verdict

RUN = [
    *("run", "--backend", "torch", "--backend", "conformance.misbehave:WrongShape", "--cases", "6"),
    *("--case", '{"steps":[{"requests":[{}]}]}', "--case", '{"page_size":2,"steps":[{"requests":[{}]}]}'),
    *("--check", "values", "--seed", "4", "--report", "r.jsonl"),
]


@pytest.fixture(autouse=True)
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The report of a run that came to its end."""
    monkeypatch.chdir(tmp_path)
    assert main(RUN) == 1
    return Path("r.jsonl").read_text()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of what is asked from now on."""
    digests: list[str] = []

    def counted(question: sweep.Question, *rest: object) -> Verdict:
        digests.append(question.digest)
        return examine(question, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sweep, "examine", counted)
    return digests


def without_times(text: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in {"started", "finished", "command"}} for line in lines]


def verdicts(text: str) -> list[tuple[object, object]]:
    """Backend and digest of every verdict."""
    lines = without_times(text)
    return [(v["backend"], v["digest"]) for v in lines if v["kind"] == "verdict" and "shrunk" not in v]


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_cut_run_goes_on(
    share: float, whole: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    head, _, rest = whole.partition("\n")
    cut = f"{head}\n{rest[: int(len(rest) * share)]}"
    Path("r.jsonl").write_text(cut)
    kept = verdicts(cut.rpartition("\n")[0])
    assert main([*RUN, "--resume"]) == 1
    assert without_times(Path("r.jsonl").read_text()) == without_times(whole)
    assert [d[:32] for d in asked] == [d for b, d in verdicts(whole)[len(kept) :] if (b, d) not in kept]
    assert (
        f"resumed      {len(kept)} verdicts are in the report and not asked again\n"
        in capsys.readouterr().out
    )


def test_complete_run_asks_nothing_again(whole: str, asked: list[str]) -> None:
    assert main([*RUN, "--resume"]) == 1
    assert asked == []
    assert without_times(Path("r.jsonl").read_text()) == without_times(whole)


@pytest.mark.parametrize("left", ["", '{"kind":"header","ver'])
def test_run_that_never_began_begins(left: str, whole: str) -> None:
    Path("r.jsonl").unlink() if not left else Path("r.jsonl").write_text(left)
    assert main([*RUN, "--resume"]) == 1
    assert without_times(Path("r.jsonl").read_text()) == without_times(whole)


def test_other_run_is_refused(whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([*RUN, "--seed", "5", "--resume"]) == 2
    assert capsys.readouterr().err == (
        "conformance: error: r.jsonl: cannot be resumed: its seed is 4, this run's is 5\n"
    )
    Path("r.jsonl").write_text(whole.replace('"device":"cpu"', '"device":"abacus"'))
    assert main([*RUN, "--resume"]) == 2
    assert "its device is 'abacus', this run's is 'cpu'" in capsys.readouterr().err
    head, _, rest = whole.partition("\n")
    library = {"kind": "real", "version": "9.9", "file": "flashinfer/__init__.py"}
    Path("r.jsonl").write_text(
        f"{json.dumps(json.loads(head) | {'libraries': {'flashinfer': library}})}\n{rest}"
    )
    assert main([*RUN, "--resume"]) == 2
    assert "its libraries are {'flashinfer': ('real', '9.9')}, this run's are " in capsys.readouterr().err
    for other in (whole.partition("\n")[2], "my notes", "my notes\r", "\n", '{"kind": "case"}'):
        Path("r.jsonl").write_text(other, newline="")
        assert main([*RUN, "--resume"]) == 2
        assert "r.jsonl" in capsys.readouterr().err
        assert Path("r.jsonl").read_bytes() == other.encode()


def test_other_checks_are_refused(whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--check", "pool", "--resume"]) == 2
    assert capsys.readouterr().err == (
        "conformance: error: r.jsonl: cannot be resumed: its checks are values, this run's are values, pool\n"
    )
    assert Path("r.jsonl").read_text() == whole


@pytest.mark.parametrize("name", ["torch", "numpy", "hypothesis", "python"])
def test_other_releases_are_refused(name: str, whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    head, _, rest = whole.partition("\n")
    Path("r.jsonl").write_text(f"{json.dumps({**json.loads(head), name: '0.1'})}\n{rest}")
    assert main([*RUN, "--resume"]) == 2
    assert f"r.jsonl: cannot be resumed: its {name} is '0.1', this run's is " in capsys.readouterr().err


def test_report_is_still_complete(whole: str) -> None:
    assert main([*RUN, "--resume"]) == 1
    found = report.read("r.jsonl")
    assert found.footer.verdicts == len(verdicts(whole))


def test_shorter_run_keeps_what_it_does_not_ask(whole: str) -> None:
    fewer = [*RUN, "--cases", "2", "--resume"]
    assert main(fewer) == 1
    found = report.read("r.jsonl")
    assert verdicts(Path("r.jsonl").read_text()) == verdicts(whole)
    assert found.footer.model_dump(exclude={"finished"}) == {
        **{k: v for k, v in without_times(whole)[-1].items() if k != "finished"},
    }


def test_resume_needs_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--backend", "torch", "--resume"]) == 2
    assert "--resume is about a report: it needs --report FILE" in capsys.readouterr().err
