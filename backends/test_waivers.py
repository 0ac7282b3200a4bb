"""Waivers: what may stand in a file, which cases one covers, and that ours follow the contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.registry import BUILT_IN, BackendError, resolve
from backends.waivers import WaiverError, load
from backends.waivers.expression import ExpressionError, Predicate
from backends.waivers.facts import NAMES, facts
from cases.codec import save
from cases.model import Case, Heads, KernelRequest, Mask, Step
from fakes import contract
from fakes.releases import KNOWN

PLAIN = Case((Step((KernelRequest(2, 2),)),), level="kernel")
BEFORE = Case((Step((KernelRequest(5, 2),)),), level="kernel", page_size=16, mask=Mask(window=3))
DIGEST = "b10674d2cf1702c4966e22744ddc934f"
ENTRY = f"""
[[waiver]]
backend = "mine"
checks = ["values"]
when = "rows_before_keys"
kind = "notyet"
reason = "it is known"
issue = "flashinfer#4452"
digest = "{DIGEST}"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "plain", "before"),
    [
        ("rows_before_keys", False, True),
        ("not rows_before_keys", True, False),
        ("page_size == 16 and causal", False, True),
        ("page_size in (1, 2) or window is not None", True, True),
        ("window < 4", False, True),
        ("not window < 4", True, False),
        ("window is None", True, False),
        ("1 < max_qo_len <= 4", True, False),
        ('dtype != "bfloat16"', True, True),
        ("max_qo_len > -1", True, True),
    ],
)
def test_predicates(text: str, plain: bool, before: bool) -> None:
    predicate = Predicate(text, NAMES)
    assert [predicate(facts(case)) for case in (PLAIN, BEFORE)] == [plain, before]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os').system('true')", "may only be compared"),
        ("window.__class__", "may only be compared"),
        ("[x for x in (1,)]", "may only be compared"),
        ("page_size + 1 == 2", "may only be compared"),
        ("pagesize == 1", "names 'pagesize'; the facts of a case are causal, "),
        ("page_size ==", "is no expression"),
    ],
)
def test_nothing_else_is_read(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message.replace("(", r"\(")):
        Predicate(text, NAMES)


def test_facts_of_rows_without_keys() -> None:
    keyless = Case((Step((KernelRequest(1, 0), KernelRequest(1, 3, uid=1))),), level="kernel")
    names = ("rows_without_keys", "rows_before_keys", "requests_without_keys")
    assert [facts(keyless)[name] for name in names] == [True, False, True]
    assert [facts(BEFORE)[name] for name in names] == [True, True, False]
    full = replace(BEFORE, mask=Mask(causal=False))
    assert not any(facts(full)[name] for name in names)


def test_an_entry_is_read(tmp_path: Path) -> None:
    (waiver,) = load(written(tmp_path, ENTRY))
    assert waiver.covers("values", "mismatch", BEFORE)
    assert not waiver.covers("values", "raised", BEFORE)
    assert not waiver.covers("lse", "mismatch", BEFORE)
    assert not waiver.covers("values", "mismatch", PLAIN)
    assert waiver.in_force(None)
    assert str(waiver) == "notyet: it is known (flashinfer#4452)"


@pytest.mark.parametrize(
    ("versions", "release", "holds"),
    [
        ("<0.7.2", "0.6.6", True),
        ("<0.7.2", "0.7.4", False),
        (">=0.6,<0.7", "0.6.6.post1", True),
        ("<0.7.2", None, False),
    ],
)
def test_releases(tmp_path: Path, versions: str, release: str | None, holds: bool) -> None:
    text = f'{ENTRY}library = "flashinfer"\nversions = "{versions}"\n'
    assert load(written(tmp_path, text))[0].in_force(release) is holds


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("notyet", "someday", "mine.toml, waiver 1: kind must be one of 'notimpl', 'notyet', 'never'"),
        ("reason", "because", "unknown"),
        ("rows_before_keys", "before_keys", "waiver 1: when: 'before_keys' names 'before_keys'"),
        ("rows_before_keys", "page_size == 3", "the pinned case is not one of those that it waives"),
        (DIGEST, "0" * 32, "no case of the corpus or beside the file has the digest 000"),
        ('issue = "flashinfer#4452"', "", "names neither an issue nor a rule"),
        ('"notyet"', '"notyet"\nversions = "<1"', "versions belong to a library"),
        ('"notyet"', '"notyet"\nlibrary = "x"\nversions = "one"', "versions: Invalid specifier"),
        ("[[waiver]]", "[waiver]", r"expected entries \[\[waiver\]\]"),
        ("[[waiver]]", "[[waiver", "cannot be read"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, ENTRY.replace(old, new))
    with pytest.raises(WaiverError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


MODULE = """
from backends.torch_sdpa import TorchBackend

class Mine(TorchBackend):
    pass
"""


def test_a_backend_finds_the_waivers_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, folder = tmp_path / "an_engine", tmp_path / "an_engine" / "waivers"
    folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(MODULE)
    own = save(folder / "own.json", PLAIN, why="it is mine")
    text = ENTRY.replace('"mine"', '"an_engine.attention:Mine"').replace("rows_before_keys", "page_size == 1")
    written(folder, text.replace(DIGEST, str(own.digest)))
    monkeypatch.syspath_prepend(tmp_path)
    (waiver,) = resolve("an_engine.attention:Mine").waivers
    assert waiver.case == PLAIN


def test_a_broken_file_is_told_with_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "another_engine.py").write_text(MODULE)
    (tmp_path / "waivers").mkdir()
    written(tmp_path / "waivers", "nothing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=r"^backend 'another_engine:Mine': .*mine.toml: cannot be read"):
        resolve("another_engine:Mine")


def built_in_waivers() -> list[Any]:
    return [waiver for name in BUILT_IN for waiver in resolve(name).waivers]


def test_ours_are_measured() -> None:
    """Each names a rule of the contract; in force for the release that shows the fault, and only there."""
    rules = {rule.id: rule for rule in contract.rules()}
    assert len(built_in_waivers()) == 4
    for waiver in built_in_waivers():
        rule = rules[waiver.rule]
        assert rule.library == waiver.library
        worst = rule.verdicts[KNOWN[waiver.library][0]]
        for release, verdict in rule.verdicts.items():
            assert waiver.in_force(release) is (verdict == worst)


def test_heads_are_facts() -> None:
    wide = replace(PLAIN, heads=Heads(8, 2, 192, 128))
    assert facts(wide)["group_size"] == 4
    assert Predicate("head_dim_qk > head_dim_vo", NAMES)(facts(wide))
