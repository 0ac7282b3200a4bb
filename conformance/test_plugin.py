from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from _pytest.config.argparsing import Parser

import cases
from conformance import plugin
from conformance.session import Session

ROOT = Path(__file__).resolve().parent.parent
TRACE = str(Path(cases.__file__).parent / "testdata" / "azure_tiny.csv")

MINE = """
from dataclasses import replace
from backends.torch_sdpa import TorchBackend

class Right(TorchBackend):  # of one page size: few of the named edges are for it
    capabilities = replace(TorchBackend.capabilities, page_sizes=frozenset({4}))

class Wrong(Right):
    def forward(self, *args):
        return super().forward(*args) + 1
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def run_pytest(cwd: Path, *argv: str, **environment: str) -> tuple[int, str]:
    """As a user with the wheel installed runs it; the entry point is stood in for by -p."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conformance.plugin", "-p", "no:cacheprovider", *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_suite_on_backends_of_ones_own(here: Path) -> None:
    argv = ("--pyargs", "conformance", "--strict-markers", "-m", "cpu", "--cases", "10", "-v")
    argv += ("--device-sim", "light", "--sessions", "3")
    code, said = run_pytest(here, *argv, "--backend", "mine:Right", "--backend", "mine:Wrong")
    assert code == 1
    assert "test_check[mine:Right-values] PASSED" in said
    assert "test_corpus[mine:Right] PASSED" in said
    assert "test_smoke[mine:Wrong] FAILED" in said
    assert "test_check[mine:Wrong-values] FAILED" in said
    assert "test_check[mine:Wrong-pool] PASSED" in said
    assert "test_check[mine:Right-lse] SKIPPED" in said
    assert "test_cli" not in said  # our own tests are no business of the user's
    assert not re.search(r"^(E  |.*test_conformance\.py:\d)|Traceback", said, re.MULTILINE)
    assert "replay: conformance replay --backend mine:Wrong '{" in said
    assert "\ndevice: cpu; left out: graphs and the room" in said


class Options:
    """As much of a `pytest.Config` as the plugin looks at."""

    def __init__(self, root: Path, **options: object) -> None:
        self.rootpath = root
        self.stash = pytest.Stash()
        self.pluginmanager = pytest.PytestPluginManager()
        self._options = {
            "backend": ["torch"],
            "library": None,
            "markexpr": "",
            "engine_path": [],
            "require": None,
            "variants": None,
            "conformance_mode": "strict",
            "device_sim": "auto",
            "cases": 1,
            "sessions": 1,
            "case_seed": 0,
            "trace_file": None,
            "isolate": False,
            "workers": None,
            "deadline": None,
        } | options

    def getoption(self, name: str, default: object = None) -> object:
        del default
        return self._options[name]


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("backend", ["tosch"], "unknown backend 'tosch'; did you mean 'torch'?"),
        ("backend", ["mine:Nobody"], "backend 'mine:Nobody': module mine has no attribute Nobody"),
        ("backend", ["cases.mine:Right"], "backend 'cases.mine:Right': module cases.mine does not import: "),
        ("library", "real", "no GPU answers: torch "),
        ("trace_file", "none.csv", "none.csv: cannot be read (No such file or directory)"),
    ],
)
def test_wrong_usage_is_told_in_one_sentence(
    option: str, value: object, sentence: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with Session(["torch"]), pytest.raises(pytest.UsageError) as caught:
        plugin.results(cast("pytest.Config", Options(here, **{option: value})))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--variants", "0", "must be at least 1, got 0"),
        ("--workers", "0", "must be at least 1, got 0"),
        ("--deadline", "0", "must be more than 0, got 0"),
        ("--deadline", "nan", "must be more than 0, got nan"),
        ("--cases", "-1", "must be at least 0, got -1"),
        ("--cases", "many", "must be an integer, got 'many'"),
        ("--sessions", "-1", "must be at least 0, got -1"),
        ("--case-seed", "-1", "must be at least 0, got -1"),
    ],
)
def test_wrong_number_is_told_as_on_the_command_line(option: str, value: str, sentence: str) -> None:
    parser = Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    with pytest.raises(pytest.UsageError) as caught:
        parser.parse([option, value])
    assert f"argument {option}: {sentence}" in str(caught.value)


def test_trace_for_kernel_adapters_alone_is_wrong_usage(here: Path) -> None:
    options = Options(here, backend=["kernel:fa-varlen"], trace_file=TRACE)
    with pytest.raises(pytest.UsageError, match="is of level engine, and every backend that is asked is of"):
        plugin.results(cast("pytest.Config", options))
    with Session(["torch"]):
        pass  # the other one is closed


@pytest.mark.parametrize(
    ("given", "expression", "found"),
    [
        (None, "", "fake"),
        (None, "cpu", "fake"),
        (None, "gpu", "real"),
        (None, "not gpu", "fake"),
        (None, "gpu or cpu", "fake"),
        ("real", "", "real"),
        ("fake", "gpu", "fake"),
    ],
)
def test_marker_gpu_asks_real_libraries(given: str | None, expression: str, found: str, here: Path) -> None:
    options = Options(here, library=given, markexpr=expression)
    assert plugin.library(cast("pytest.Config", options)) == found


@pytest.mark.skipif(torch.version.cuda is not None, reason="a GPU may answer here")
def test_without_a_gpu_one_line_says_why(here: Path) -> None:
    argv = ("--pyargs", "conformance", "-m", "gpu", "--backend", "mine:Right")
    code, said = run_pytest(here, *argv)
    assert code == 0
    assert "3 skipped" in said
    lines = [line for line in said.splitlines() if "no GPU answers" in line]
    assert len(lines) == 1
    assert lines[0].startswith("conformance: nothing ran on a GPU: no GPU answers: torch ")
    code, said = run_pytest(here, *argv, "--require", "gpu")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert said.strip().startswith("ERROR: no GPU answers: torch ")
    assert said.strip().endswith(", and --require gpu asks for one")


def test_shadowing_folder_is_wrong_usage(here: Path) -> None:
    (here / "cases").mkdir()
    (here / "cases" / "__init__.py").touch()
    code, said = run_pytest(here, "--pyargs", "conformance", "--backend", "mine:Right")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert said.strip() == (
        f"ERROR: {here / 'cases'} shadows the package 'cases' of attention-conformance: "
        "run from another folder or rename yours"
    )


def test_other_peoples_tests_are_left_alone(here: Path) -> None:
    """Neither marked nor slowed down, whatever their folders are called."""
    (here / "cases").mkdir()
    (here / "cases" / "__init__.py").touch()
    (here / "cases" / "test_theirs.py").write_text(
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
    )
    assert run_pytest(here, "-q")[0] == 0
    assert run_pytest(here, "-q", "-m", "cpu")[0] == pytest.ExitCode.NO_TESTS_COLLECTED


def test_our_own_tests_are_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("cpu") is not None


def test_plugin_is_loaded_once(pytestconfig: pytest.Config) -> None:
    loaded = pytestconfig.pluginmanager.get_plugin("conformance.plugin")
    assert loaded is plugin
