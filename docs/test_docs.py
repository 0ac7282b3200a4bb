"""README and docs say what is so: their code runs, their output is real, their commands and links exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import conformance
from backends.registry import BUILT_IN
from cases.codec import from_json
from conformance import plugin
from conformance.__main__ import main
from conformance.checks import CHECKS
from conformance.cli import run

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ROOT / "examples/my_engine/my_engine/attention.py"
BACKEND = "my_engine.attention:MyBackend"


def blocks(page: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page."""
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield language, text


def commands(page: Path) -> Iterator[list[str]]:
    """The command lines of a page's console blocks, and those in backticks in its prose."""
    for _, text in blocks(page, "console"):
        for line in text.splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`((?:make|conformance|pytest|python -m conformance) [^`]+)`", prose):
        yield shlex.split(span)


MENTIONED = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)}") for page in PAGES for words in commands(page)
]


@pytest.mark.parametrize("words", MENTIONED)
def test_command_exists(words: list[str], pytestconfig: pytest.Config) -> None:
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)
    elif program == "conformance":
        from conformance.cli import COMMANDS, _parse

        assert rest[0] in COMMANDS
        with suppress(SystemExit):  # --help
            _parse(rest if len(rest) > 1 else [*rest, "--help"])
    elif program == "pytest":
        for option in re.findall(r"--[a-z-]+", " ".join(rest)):
            pytestconfig.getoption(option)
    else:
        assert program in ("pip", "git", "cd"), f"{' '.join(words)} is no command that this test knows"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_json_is_a_case(page: Path) -> None:
    for _, text in blocks(page, "json"):
        json.loads(text)
        from_json(text)


def test_report_is_read_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = '{"steps":[{"requests":[{}]}]}'
    assert main(["run", "--backend", "torch", "--case", case, "--report", "report.jsonl"]) == 0
    ((_, code),) = blocks(ROOT / "docs/reports.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["report"].footer.verdicts == len(names["report"].verdicts)
    assert names["failed"] == []


def test_shown_test_is_that_of_the_example() -> None:
    test = (EXAMPLE.parent.parent / "tests/test_attention.py").read_text()
    for page in ("README.md", "docs/adapters.md"):
        assert test in [text for _, text in blocks(ROOT / page, "python")]


def test_every_check_is_described_in_order() -> None:
    rows = re.findall(r"^\| (\w+) \|", (ROOT / "docs/checks.md").read_text(), re.MULTILINE)
    assert rows == ["check", *CHECKS]


class Source:
    """A module that blocks build up: each is the whole module, or members of `MyBackend` to replace."""

    def __init__(self) -> None:
        self.module = ast.Module([], [])

    def take(self, block: str) -> None:
        tree = ast.parse(block)
        if _backend(tree) is not None:
            self.module = tree
            return
        cls = _backend(self.module)
        assert cls is not None, "the page changes MyBackend before it is there"
        members = {_name(node): node for node in cls.body} | {_name(node): node for node in tree.body}
        cls.body = sorted(members.values(), key=lambda node: isinstance(node, ast.FunctionDef))

    def text(self) -> str:
        return ast.unparse(self.module)


def _backend(tree: ast.Module) -> ast.ClassDef | None:
    found = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MyBackend")
    return next(found, None)


def _name(member: ast.stmt) -> str:
    if isinstance(member, ast.Assign):
        return ast.unparse(member.targets[0])
    assert isinstance(member, ast.FunctionDef)
    return member.name


def steps() -> list[tuple[str, str | None]]:
    """The backend's source after each change that adapters.md makes, and what it prints (None: it passes)."""
    source = Source()
    found: list[tuple[str, str | None]] = []
    for language, text in blocks(ROOT / "docs/adapters.md", "python", "text"):
        if language == "text":
            found[-1] = (found[-1][0], text)
        elif "def test_" not in text:
            source.take(text)
            found.append((source.text(), None))
    return found


STEPS = steps()


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_adapter_step(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step prints what the page shows; "..." stands for lines that it leaves out.

    Decimals are not compared: the values of a case's tensors are nothing to describe.
    A step without output passes the cases on which the steps before it failed.
    """
    source, shown = STEPS[step]
    _become(source, tmp_path, monkeypatch)
    if shown is None:
        failed = [replay for _, text in STEPS[:step] if text and (replay := _replay(text))]
        assert failed
        assert [main(replay) for replay in failed] == [0] * len(failed)
        return
    replay = _replay(shown)
    code = main(replay or ["run", "--backend", BACKEND])
    printed = "".join(capsys.readouterr())
    assert code == (1 if replay else 2), printed
    lines = _without_decimals(printed)
    missing = [line for line in _without_decimals(shown) if line not in ("", "...") and line not in lines]
    assert missing == [], f"not printed any more; printed is:\n{printed}"


def test_readme_shows_one_of_these_outputs() -> None:
    ((_, text),) = blocks(ROOT / "README.md", "text")
    assert text in [shown for _, shown in STEPS]


def test_last_step_is_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = STEPS[-1][0].replace("return (out, lse)", "return (out, lse.T)")
    assert _without_docstrings(source) == _without_docstrings(EXAMPLE.read_text())
    _become(EXAMPLE.read_text(), tmp_path, monkeypatch)
    conformance.check(BACKEND, cases=20)


def _without_decimals(text: str) -> list[str]:
    return re.sub(r"-?\d+\.\d+(e-\d+)?", "#", text).splitlines()


def _replay(shown: str) -> list[str] | None:
    """The arguments in the replay line of an output."""
    line = re.search(r"^replay: conformance (.*)$", shown, re.MULTILINE)
    return shlex.split(line[1]) if line else None


def _become(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `source` the module that BACKEND names."""
    package = folder / "my_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(source)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)


def _without_docstrings(source: str) -> list[str]:
    """The classes of a module."""
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for cls in classes:
        cls.body = [node for node in cls.body if not isinstance(node, ast.Expr)]
    return [ast.unparse(cls) for cls in classes]


def test_numbers_in_words_are_those_of_the_code() -> None:
    adapters = sum(name.startswith("kernel:") for name in BUILT_IN)
    assert adapters == 10
    assert "(`backends/kernels/` has ten)" in (ROOT / "docs" / "adapters.md").read_text()
    sessions = (ROOT / "docs" / "sessions.md").read_text()
    assert (
        f"asks {run.DEFAULT_SESSIONS} per engine-level backend,\n`pytest` {plugin.DEFAULT_SESSIONS} ("
        in sessions
    )
