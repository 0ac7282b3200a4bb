from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

import cases
from cases.codec import save
from cases.model import Case, Request, Step
from conformance import report
from conformance.__main__ import main
from conformance.campaign import Campaign
from conformance.checks import CHECKS
from conformance.outcome import Verdict
from conformance.sweep import Asked, Sweep
from conformance.version import own_version
from fakes.cuda.full import build

ROOT = Path(__file__).resolve().parent.parent
TRACE = Path(cases.__file__).parent / "testdata" / "azure_tiny.csv"
GOOD = '{"steps":[{"requests":[{"extend_len":3}]}]}'
WRONG = "conformance.misbehave:WrongShape"

FAULTY = """
from backends.torch_sdpa import TorchBackend

class Wrong(TorchBackend):
    def forward(self, *args):
        return super().forward(*args) + 1

class Half:
    def __init__(self, engine): ...
    def forward(self, q, k, v, layer_id, batch): ...

a_function = len
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of the user's, with one module of backends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_backends", raising=False)
    (tmp_path / "my_backends.py").write_text(FAULTY)
    return tmp_path


def sentence(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a wrong command line is told."""
    capsys.readouterr()
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("conformance: error: ")
    assert said.count("\n") == 1
    return said.removeprefix("conformance: error: ").rstrip()


def test_correct_backend_exits_0(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    argv = ["run", "--backend", "torch", "--cases", "10", "--seed", "2", "--report", "r.jsonl"]
    assert main([*argv, "--device-sim", "light"]) == 0
    said = capsys.readouterr().out
    assert "backends     torch\n" in said
    assert "left out     graphs and the room of their buffers, in-flight copies: they need the full" in said
    assert "\nreached, level engine\n" in said
    assert "page_size" in said
    assert "sessions     30 random ones per engine-level backend" in said
    found = report.read(here / "r.jsonl")
    assert found.header.seed == 2
    assert found.footer.failed == 0
    assert found.footer.verdicts == len(found.verdicts) > 50
    assert found.reached[0].reached["level"] == {"engine": found.footer.verdicts - found.footer.unsupported}


def test_library_that_answered_is_on_record(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--backend", "fa", "--cases", "2", "--check", "values", "--report", "r.jsonl"]) == 0
    answered = report.read(here / "r.jsonl").header.libraries["sgl_kernel"]
    assert (answered.kind, answered.version) == ("fake", "0.4.6")
    assert Path(answered.file).is_file()
    assert "sgl_kernel 0.4.6 (fake), strict mode" in (said := capsys.readouterr().out)
    assert re.search(r"^device       simulated cuda \((light|full)\)$", said, re.MULTILINE)


def test_findings_exit_1_and_are_replayed(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    argv = ["run", "--backend", "my_backends:Wrong", "--cases", "5", "--sessions", "2", "--report", "r.jsonl"]
    assert main([*argv, "--check", "smoke", "--check", "values"]) == 1
    said = capsys.readouterr().out
    assert "FAIL " in said
    line = next(line for line in said.splitlines() if line.startswith("replay: "))
    words = shlex.split(line.removeprefix("replay: "))
    assert words[0] == "conformance"
    assert main(words[1:]) == 1
    assert "backend my_backends:Wrong fails smoke, values on case " in capsys.readouterr().out
    found = report.read(here / "r.jsonl")
    failed = [v for v in found.verdicts if v.case is not None]
    assert found.footer.failed == sum(not v.shrunk for v in failed) > 0
    assert [v.shrunk for v in failed][-1]


def test_misbehaving_backend_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", "--backend", WRONG, "--backend", "conformance.misbehave:Exits", "--backend", "torch"]
    assert main([*argv, "--cases", "2", "--check", "values"]) == 1
    said = capsys.readouterr().out
    row = {line.split("  ")[0]: line for line in said.splitlines() if "  " in line}
    assert "FAIL" in row[WRONG]
    assert "FAIL" in row["conformance.misbehave:Exits"]
    assert "FAIL" not in row["torch"]
    assert "raised: SystemExit: the engine has had enough" in said


def test_replay(capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["replay", "--backend", "torch", GOOD]) == 0
    assert capsys.readouterr().out.startswith("torch: passed values, pool, poison, inputs, determinism")
    (here / "bare.json").write_text(GOOD)
    save(here / "file.json", Case((Step((Request(),)),)), why="one token")
    for path in ("bare.json", "file.json"):
        assert main(["replay", "--backend", "torch", path]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(GOOD))
    assert main(["replay", "--backend", "torch", "-"]) == 0
    assert main(["replay", "--backend", "torch", "--backend", WRONG, GOOD]) == 1
    assert "the output has shape [3, 64], must have [3, 1, 64]" in capsys.readouterr().out


def test_case_nobody_declares_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    capped = '{"mask":{"soft_cap":1.0},"steps":[{"requests":[{}]}]}'
    assert "declares what case " in sentence(capsys, "replay", "--backend", "torch", capped)


def test_run_of_a_case_file_and_of_a_trace(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "case.json").write_text(GOOD)
    assert main(["run", "--backend", "torch", "--case", "case.json"]) == 0
    assert "cases        0 random ones per backend" in (said := capsys.readouterr().out)
    assert "\ncases       3\n" in said
    assert (
        main(["run", "--backend", "torch", "--trace", str(TRACE), "--batches", "5", "--page-size", "4"]) == 0
    )
    said = capsys.readouterr().out
    assert f"trace        {TRACE}: azure, " in said
    assert "batches            5" in said
    assert "page_size   1: 2  4: 5" in said


def test_case_of_another_level_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = '{"level":"kernel","steps":[{"requests":[{"qo_len":1,"kv_len":4}]}]}'
    assert re.fullmatch(
        "case [0-9a-f]{8} is of level kernel, and every backend that is asked is of level engine",
        sentence(capsys, "run", "--backend", "torch", "--case", kernel),
    )
    assert "is of level engine, and every" in sentence(
        capsys, "run", "--backend", "kernel:fa-varlen", "--trace", str(TRACE)
    )
    argv = ["run", "--backend", "torch", "--backend", "kernel:fa-varlen", "--case", kernel]
    assert main([*argv, "--check", "values"]) == 0


def test_backends_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    listed = capsys.readouterr().out
    assert "torch " in listed
    assert "kernel:fa-varlen" in listed
    assert main(["backends", "fi"]) == 0
    assert capsys.readouterr().out.startswith("fi  engine, decode+prefill, needs flashinfer")


def test_wrong_backends_are_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    def said(name: str) -> str:
        return sentence(capsys, "run", "--backend", name)

    assert said("tosch").startswith("unknown backend 'tosch'; did you mean 'torch'? (known: torch, fi, ")
    assert said("nowhere.mod:Class") == (
        "backend 'nowhere.mod:Class': module nowhere.mod does not import: "
        "ModuleNotFoundError: No module named 'nowhere'"
    )
    assert said("my_backends:Half") == (
        "backend 'my_backends:Half': class Half lacks the method prepare_metadata (level engine)"
    )
    assert said("my_backends:None_such") == (
        "backend 'my_backends:None_such': module my_backends has no attribute None_such"
    )
    assert said("my_backends:a_function") == (
        "backend 'my_backends:a_function' is a builtin_function_or_method, expected a class"
    )


def test_module_that_exits_is_told_so(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "script_without_guard.py").write_text("raise SystemExit(0)\n")
    assert sentence(capsys, "run", "--backend", "script_without_guard:X") == (
        "backend 'script_without_guard:X': module script_without_guard does not import: SystemExit: 0"
    )


def test_wrong_cases_are_told_so(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    def said(text: str) -> str:
        return sentence(capsys, "replay", "--backend", "torch", text)

    assert said('{"steps":') == "case: is not JSON: expecting value at line 1, column 10"
    assert said("none.json") == "none.json: cannot be read (No such file or directory)"
    assert said("[" * 5000) == "[" * 255 + "...: cannot be read (File name too long)"
    assert said('{"steps":[{"requests":[{"extend_len":0}]}]}') == (
        "case: steps[0].requests[0].extend_len must be at least 1, got 0"
    )
    assert said('{"steps":[{"requests":[{}]}],"page_sise":4}') == (
        "case: unknown key 'page_sise', did you mean 'page_size'?"
    )
    save(here / "file.json", Case((Step((Request(),)),)), why="one token")
    plain = json.loads((here / "file.json").read_text())
    (here / "other.json").write_text(json.dumps(plain | {"digest": "0" * 32}))
    assert said("other.json").startswith(f"other.json: digest {'0' * 32} does not match the case, which has ")
    (here / "text.json").write_text("not a case")
    assert said("text.json").startswith("text.json: is not JSON: ")


def test_wrong_options_are_told_so(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*argv: str) -> str:
        return sentence(capsys, "run", *argv)

    assert said("--check", "value") == (
        f"unknown check 'value'; did you mean 'values'? (known: {', '.join(CHECKS)})"
    )
    (here / "no.csv").write_text("when,what\n1,2\n")
    assert said("--trace", "no.csv").startswith("no.csv: is no known trace")
    assert said("--trace", "none.csv") == "none.csv: cannot be read (No such file or directory)"
    assert said("--batches", "3") == "--batches is about a trace: it needs --trace FILE"
    assert said("--trace", str(TRACE), "--page-size", "512").startswith(f"{TRACE}: ")
    assert said("--cases", "-1") == (
        "argument --cases: must be at least 0, got -1 (see conformance run --help)"
    )
    assert said("--cases", "many").startswith("argument --cases: must be an integer, got 'many'")
    assert said("--library", "unreal").startswith("argument --library: invalid choice: 'unreal'")
    assert said("--report", "no/folder.jsonl", "--backend", "torch") == (
        "no/folder.jsonl: cannot be written (No such file or directory)"
    )
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(build, "_loaded", [])
        elsewhere.setenv("ATTENTION_CONFORMANCE_CACHE", str(here))
        elsewhere.setenv("CXX", "no-such-compiler")
        assert said("--device-sim", "full", "--backend", "fa").startswith(
            "the full simulated CUDA device needs a C++ compiler, and there is no 'no-such-compiler' here"
        )
    assert sentence(capsys).startswith("the following arguments are required: COMMAND")
    assert sentence(capsys, "fly").startswith("argument COMMAND: invalid choice: 'fly'")
    for option in ("--cases", "--trials"):
        assert sentence(capsys, "bench", "needles", option, "0") == (
            f"argument {option}: must be at least 1, got 0 (see conformance bench --help)"
        )
    assert sentence(capsys, "bench", "press") == (
        "no bench 'press'; there are throughput, needles, oracle, device"
    )
    assert sentence(capsys, "mutants", "nobody").startswith("unknown mutant 'nobody' (known: ")


def test_fault_of_the_harness_exits_3(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Sweep, items: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Sweep, "ask_each", fail)
    assert main(["run", "--backend", "torch", "--report", "r.jsonl"]) == 3
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback")
    assert said[-1] == "conformance: the harness itself failed: ZeroDivisionError: by zero"
    with pytest.raises(report.ReportError, match="no footer"):
        report.read(here / "r.jsonl")


def test_a_full_disk_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["run", "--backend", "torch", "--cases", "1", "--sessions", "0", "--check", "values"]
    assert main([*argv, "--report", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert "torch" in told.out
    assert told.err.startswith("conformance: error: /dev/full: cannot be written (No space left on device): ")

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    left: list[bool] = []
    monkeypatch.setattr("conformance.cli._leave_stdout", lambda: left.append(True))
    with contextlib.redirect_stdout(Full()):
        assert main(["backends"]) == 2
    assert left
    assert capsys.readouterr().err == (
        "conformance: error: No space left on device: the run could not be told to its end\n"
    )


def test_interrupted_run_keeps_what_it_has(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_each, told = Sweep.ask_each, itertools.count(1)

    def impatient(self: Sweep, items: Iterable[Asked]) -> Iterator[tuple[Case, Verdict]]:
        for verdict in ask_each(self, items):
            yield verdict
            if next(told) == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "ask_each", impatient)
    monkeypatch.setattr(Campaign, "shrink", None)
    assert main(["run", "--backend", WRONG, "--report", "r.jsonl"]) == 130
    caught = capsys.readouterr()
    assert "FAIL 5/5" in caught.out
    assert f"backend {WRONG} fails" in caught.out
    assert caught.err == "conformance: interrupted; what was asked until then is above\n"
    found = report.read(here / "r.jsonl")
    assert found.footer.interrupted
    assert found.footer.verdicts == 5


def test_interrupt_of_an_import_exits_130(here: Path) -> None:
    (here / "torch.py").write_text("raise KeyboardInterrupt\n")
    done = run_python(
        "-c", "import sys; from conformance.__main__ import main; sys.exit(main(['run']))", cwd=here
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "conformance: interrupted\n")


def run_python(*argv: str, cwd: Path, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_folder_that_shadows_ours_is_named(here: Path) -> None:
    (here / "cases").mkdir()
    (here / "cases" / "__init__.py").touch()
    done = run_python("-m", "conformance", "run", cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"conformance: error: {here / 'cases'} shadows the package 'cases' of attention-conformance: "
        "run from another folder or rename yours\n"
    )


@pytest.mark.skipif(
    own_version() == "not installed", reason="it is found by PYTHONPATH, before any other folder"
)
def test_mere_folders_of_our_names_do_no_harm(here: Path) -> None:
    for name in ("cases", "fakes"):
        (here / name).mkdir()
    code = "import sys; from conformance.__main__ import main; sys.exit(main(['backends']))"
    done = run_python("-c", code, cwd=here, path="")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("torch ")


def test_folder_that_ours_shadows_is_named(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "backends").mkdir()
    (here / "backends" / "mine.py").write_text(FAULTY)
    assert sentence(capsys, "run", "--backend", "backends.mine:Wrong") == (
        f"backend 'backends.mine:Wrong': {here / 'backends'} is shadowed by the package 'backends' of "
        "attention-conformance: rename yours"
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="a GPU may answer here")
def test_real_libraries_are_no_fakes(here: Path) -> None:
    done = run_python("-m", "conformance", "run", "--backend", "fi", "--library", "real", cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("conformance: error: no GPU answers: torch .* is built without CUDA\n", done.stderr)


def test_importing_the_package_imports_nothing(here: Path) -> None:
    code = (
        "import sys, conformance\n"
        "heavy = {'torch', 'numpy', 'hypothesis', 'pydantic', 'pytest'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "assert 'check' in dir(conformance)\n"
    )
    done = run_python("-c", code, cwd=here)
    assert done.returncode == 0, done.stderr
