"""`Waiver`: one known failure, and the files that hold them.

A file is `waivers/*.toml` beside the module of a backend or beside a package around it, and holds entries such as

    [[waiver]]
    backend = "kernel:fi-prefill-fa3"
    checks = ["values"]
    when = "rows_before_keys"
    library = "flashinfer"
    versions = "<0.7.2"
    kind = "notyet"
    reason = "one sentence: what is wrong, and in whose code"
    issue = "flashinfer#4452"
    rule = "flashinfer.rows-before-keys.fa3"
    digest = "b10674d2cf1702c4966e22744ddc934f"

`issue` is a public report, `rule` the rule of `fakes/contract/` that measured the fault; one of the two must stand
there. `digest` pins a case, of the corpus or of a case file (`*.json`) beside the TOML. That case is asked in every
run; when it passes, the waiver is stale and the run fails. Without `library` and `versions` a waiver always holds.
`outcome` is how the check ends, "mismatch" unless it says otherwise: a wrong answer that is known excuses no crash.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import cases
from backends.waivers.expression import ExpressionError, Predicate
from backends.waivers.facts import NAMES, facts
from cases.codec import load as load_case
from cases.errors import CaseError, explain
from cases.model import Case

Outcome = Literal["mismatch", "raised", "crashed", "timed_out"]
Kind = Literal["notimpl", "notyet", "never"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Ours to do; upstream's to do; by design."""

FOLDER = "waivers"
_CORPUS = Path(cases.__file__).parent / "corpus"


class WaiverError(ValueError):
    """A file of waivers that cannot be used. The message is one sentence."""


class _Entry(BaseModel):
    """An entry as it stands in the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    backend: Annotated[str, Field(min_length=1)]
    checks: Annotated[list[str], Field(min_length=1)]
    when: Annotated[str, Field(min_length=1)]
    kind: Kind
    reason: Annotated[str, Field(min_length=1)]
    issue: Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?#\d+$")] | None = None
    rule: Annotated[str, Field(min_length=1)] | None = None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32,64}$")]
    outcome: Outcome = "mismatch"
    library: str | None = None
    versions: str = ""


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A known failure of one backend: which checks may fail, on which cases, with which releases, and why.

    Args:
        when: predicate over the facts of a case (`backends.waivers.facts`).
        library: the library whose release decides; None: always in force.
        versions: a specifier of releases, as pip takes them.
        case: the pinned case, which must fail one of `checks` as long as the fault is there.
        place: file and number of the entry.
    """

    backend: str
    checks: frozenset[str]
    when: Predicate
    kind: Kind
    reason: str
    issue: str | None
    rule: str | None
    case: Case
    place: str
    outcome: Outcome
    library: str | None
    versions: SpecifierSet

    def covers(self, check: str, outcome: str, case: Case) -> bool:
        """Whether this check, ending so on this case, shows the known failure."""
        return check in self.checks and outcome == self.outcome and self.when(facts(case))

    def in_force(self, version: str | None) -> bool:
        """Whether it holds for a release of `library` (None: no such release answers)."""
        if self.library is None:
            return True
        return version is not None and self.versions.contains(version, prereleases=True)

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason} ({self.issue or self.rule})"


def waivers_of(backend: str, module_file: str | None) -> tuple[Waiver, ...]:
    """The waivers that name a backend, in the folder `waivers` beside its module or beside a package around it.

    Raises:
        WaiverError: a file that cannot be used.
    """
    if module_file is None:
        return ()
    folder = Path(module_file).resolve().parent
    folders = [folder]
    while (folder / "__init__.py").is_file():
        folder = folder.parent
        folders.append(folder)
    return tuple(w for where in folders for w in _all_in(where / FOLDER) if w.backend == backend)


@cache
def _all_in(folder: Path) -> tuple[Waiver, ...]:
    return tuple(waiver for path in sorted(folder.glob("*.toml")) for waiver in load(path))


def load(path: Path) -> list[Waiver]:
    """Read a file of waivers.

    Raises:
        WaiverError: one sentence that names the file, the entry and the rule.
    """
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WaiverError(f"{path}: cannot be read ({error})") from None
    entries = content.pop("waiver", None)
    if not isinstance(entries, list) or content:
        raise WaiverError(
            f"{path}: holds {', '.join(content) or 'nothing'}, expected entries [[waiver]] alone"
        )
    pinned = _pinned(path.parent)
    return [_read(entry, f"{path}, waiver {number}", pinned) for number, entry in enumerate(entries, 1)]


def _read(plain: Any, place: str, pinned: dict[str, Case]) -> Waiver:
    try:
        entry = _Entry.model_validate(plain)
        when = Predicate(entry.when, NAMES)
        versions = SpecifierSet(entry.versions)
    except ValidationError as error:
        raise WaiverError(f"{place}: {explain(error, lambda _: _Entry.model_fields)}") from None
    except ExpressionError as error:
        raise WaiverError(f"{place}: when: {error}") from None
    except InvalidSpecifier as error:
        raise WaiverError(f"{place}: versions: {error}") from None
    if entry.issue is None and entry.rule is None:
        raise WaiverError(f"{place}: names neither an issue nor a rule of the contract")
    if entry.versions and entry.library is None:
        raise WaiverError(f"{place}: versions belong to a library, and none is named")
    case = pinned.get(entry.digest[:32])
    if case is None:
        raise WaiverError(f"{place}: no case of the corpus or beside the file has the digest {entry.digest}")
    if not when(facts(case)):
        raise WaiverError(f"{place}: the pinned case is not one of those that it waives ({entry.when})")
    return Waiver(
        backend=entry.backend,
        checks=frozenset(entry.checks),
        when=when,
        kind=entry.kind,
        reason=entry.reason,
        issue=entry.issue,
        rule=entry.rule,
        case=case,
        place=place,
        outcome=entry.outcome,
        library=entry.library,
        versions=versions,
    )


def _pinned(folder: Path) -> dict[str, Case]:
    """Every case that may be pinned, by the 32 digits of its digest."""
    try:
        return dict(_digests([*_CORPUS.glob("*.json"), *folder.glob("*.json")]))
    except CaseError as error:
        raise WaiverError(str(error)) from None


def _digests(paths: Iterable[Path]) -> Iterable[tuple[str, Case]]:
    for path in paths:
        file = load_case(path)
        if file.digest is not None:
            yield file.digest[:32], file.case
