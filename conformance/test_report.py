from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.libraries import Answer
from cases.coverage import Reached
from cases.model import Case, KernelRequest, Request, Step
from conformance import lines, report
from conformance.outcome import Finding, Outcome, Verdict

CASE = Case((Step((Request(3, 1),)),), page_size=4, seed=7)
PASSED = Verdict(backend="torch", digest="a" * 64, outcomes={"values": Outcome.PASSED})
FAILED = Verdict(
    backend="fa",
    digest="b" * 64,
    outcomes={"values": Outcome.MISMATCH, "pool": Outcome.PASSED},
    findings=(Finding(check="values", step=0, layer=1, request=2, field="q", rule="r", message="wrong"),),
)
LEFT_OUT = Verdict(backend="fi", digest="c" * 64, outcomes={}, unsupported="a soft cap")


def head() -> lines.Header:
    return report.header(
        command=["conformance", "run"],
        backends=["torch", "fa"],
        libraries={"flashinfer": Answer("fake", "0.6.6", "somewhere/__init__.py")},
        device="cpu",
        mode="strict",
        seed=3,
        checks=["values", "pool"],
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "report.jsonl"
    reached = Reached()
    reached.add(CASE)
    with report.Writer(path, head()) as writer:
        for verdict in (PASSED, FAILED, LEFT_OUT):
            writer.verdict(CASE, verdict)
        writer.verdict(CASE, FAILED, shrunk=True)
        writer.reached("engine", reached)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(report.ReportError) as caught:
        report.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "FILE")


def test_what_is_written_is_read_back(written: Path) -> None:
    found = report.read(written)
    assert found.header.libraries["flashinfer"].kind == "fake"
    assert (found.header.backends, found.header.seed) == (["torch", "fa"], 3)
    assert [v.backend for v in found.verdicts] == ["torch", "fa", "fi", "fa"]
    assert [v.shrunk for v in found.verdicts] == [False, False, False, True]
    failed = found.verdicts[1]
    assert failed.digest == "b" * 32
    assert failed.case == CASE
    assert failed.outcomes == FAILED.outcomes
    assert failed.findings[0].model_dump() == vars(FAILED.findings[0])
    assert found.verdicts[0].case is None
    assert found.verdicts[2].unsupported == "a soft cap"
    (table,) = found.reached
    assert Reached.from_dict(table.cases, table.reached).count("page_size", 4) == 1
    footer = found.footer
    assert (footer.verdicts, footer.failed, footer.unsupported, footer.interrupted) == (3, 1, 1, False)
    assert found.header.started <= footer.finished


def test_kernel_cases_survive(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    case = Case((Step((KernelRequest(0, 0),)),), level="kernel")
    with report.Writer(path, head()) as writer:
        writer.verdict(case, FAILED)
    assert report.read(path).verdicts[0].case == case


def test_lines_stand_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    with report.Writer(path, head()) as writer:
        writer.verdict(CASE, FAILED)
        assert len(path.read_text().splitlines()) == 2
        assert refusal(path) == "FILE: has no footer: the run that wrote it did not come to its end"


def test_interrupted_run_says_so(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    with pytest.raises(KeyboardInterrupt), report.Writer(path, head()):
        raise KeyboardInterrupt
    assert report.read(path).footer.interrupted


def test_fault_of_the_harness_leaves_no_footer(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    with pytest.raises(ZeroDivisionError), report.Writer(path, head()):
        raise ZeroDivisionError
    assert refusal(path).startswith("FILE: has no footer")


def test_bad_reports_are_refused_in_one_sentence(written: Path, tmp_path: Path) -> None:
    good = written.read_text().splitlines()

    def said(*changed: str) -> str:
        written.write_text("\n".join(changed) + "\n")
        return refusal(written)

    assert refusal(tmp_path / "none.jsonl") == "FILE: cannot be read (No such file or directory)"
    assert said(*good[:2], "{verdict", *good[2:]) == (
        "FILE, line 3: is not JSON: Expecting property name enclosed in double quotes at column 2"
    )
    kinds = "must be one of header, verdict, reached, footer"
    assert said(*good[:2], '{"kind":"remark"}', *good[2:]) == f"FILE, line 3: kind is 'remark', {kinds}"
    assert said(*good[:2], '{"kind":[]}', *good[2:]) == f"FILE, line 3: kind is [], {kinds}"
    assert said(*good[1:]) == "FILE: does not begin with a header, so it is no report"
    assert said("") == "FILE, line 1: is not JSON: Expecting value at column 1"
    assert said(*good, *good) == f"FILE, line {len(good)}: a footer in the middle of the report"
    odd = json.loads(good[1]) | {"mood": "good"}
    assert said(good[0], json.dumps(odd), *good[2:]).startswith("FILE, line 2: unknown key 'mood', ")
    odd = json.loads(good[1]) | {"outcomes": {"values": "great"}}
    assert said(good[0], json.dumps(odd), *good[2:]).startswith(
        "FILE, line 2: outcomes.values input should be "
    )
    odd = json.loads(good[0]) | {"format": 2}
    assert said(json.dumps(odd), *good[1:]) == "FILE, line 1: format must be one of 1, got 2"


def test_unwritable_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match=r"x/y: cannot be written \(No such file or directory\)"):
        report.Writer(tmp_path / "x" / "y", head())


def test_schema_is_current() -> None:
    assert lines.SCHEMA_FILE.read_text(encoding="utf-8") == lines.schema_text(), (
        "run python -m conformance.lines"
    )


def test_schema_names_what_is_written(written: Path) -> None:
    kinds = {
        d["properties"]["kind"]["const"]: d
        for d in lines.schema()["$defs"].values()
        if "const" in d.get("properties", {}).get("kind", {})
    }
    for line in map(json.loads, written.read_text().splitlines()):
        if line["kind"] == "header":
            assert set(kinds["header"]["required"]) <= line.keys()
        assert line.keys() <= kinds[line["kind"]]["properties"].keys()


def test_a_full_disk_ends_the_report_and_not_the_run() -> None:
    with report.Writer("/dev/full", head()) as writer:
        for _ in range(3):
            writer.verdict(CASE, PASSED)
    assert writer.lost == "No space left on device"


def test_two_runs_write_no_report_together(written: Path) -> None:
    with report.Writer(written, head()) as writer:
        with pytest.raises(report.ReportError, match=r"report\.jsonl: another run is writing it$"):
            report.Writer(written, head())
        writer.verdict(CASE, PASSED)
    assert report.read(written).footer.verdicts == 1
    with report.Writer(written, head()):
        pass
    assert report.read(written).footer.verdicts == 0
