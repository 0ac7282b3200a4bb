"""Cases as text: canonical JSON, the digest that names a case, and one-case files.

Canonical JSON has sorted keys, no spaces and no field that equals its default. Its sha256, 64 hex digits,
is the case's digest: people see its first 8 digits, files keep 32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from cases.errors import CaseError, check_json, explain, read_text
from cases.model import Case, Heads, KernelRequest, Mask, Request, Step

STORED_DIGITS = 32
SHOWN_DIGITS = 8


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class CaseFile:
    """One case in a file of its own.

    `why`: what it is there for, one sentence. `issue`: a public report, as "flashinfer#1654". `digest`: the
    case's, 32 digits or more of it; None in a file that was written by hand.
    """

    case: Case
    why: Annotated[str, Field(min_length=1)]
    issue: Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?#\d+$")] | None = None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32,64}$")] | None = None


def to_json(case: Case) -> str:
    """Canonical JSON."""
    return json.dumps(_plain(case), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(case: Case) -> str:
    """64 hex digits that name the case."""
    return hashlib.sha256(to_json(case).encode()).hexdigest()


def short(digest: str) -> str:
    """The 8 digits that people see."""
    return digest[:SHOWN_DIGITS]


def from_json(text: str, *, name: str = "case") -> Case:
    """Read a case. `name` stands before the message of an error.

    Raises:
        CaseError: one sentence that names the place and the rule.
    """
    check_json(text, name)
    return _validate(_adapter(Case), text, name)


def load(path: str | Path) -> CaseFile:
    """Read a one-case file.

    Raises:
        CaseError: one sentence that names the file, the place and the rule.
    """
    text = read_text(path)
    check_json(text, str(path))
    file = _validate(_adapter(CaseFile), text, str(path))
    actual = digest(file.case)
    if file.digest is not None and not actual.startswith(file.digest):
        raise CaseError(
            f"{path}: digest {file.digest} does not match the case, which has {actual[:STORED_DIGITS]}"
        )
    return file


def save(path: str | Path, case: Case, *, why: str, issue: str | None = None) -> CaseFile:
    """Write a one-case file, for people to read: one step a line."""
    file = CaseFile(case, why, issue, digest(case)[:STORED_DIGITS])
    plain = _plain(file)
    body = plain.pop("case")
    lines = [
        f"  {json.dumps(key)}: {json.dumps(plain[key])}" for key in ("why", "issue", "digest") if key in plain
    ]
    steps = ",\n".join(f"      {json.dumps(step, sort_keys=True)}" for step in body.pop("steps"))
    inner = [f"    {json.dumps(key)}: {json.dumps(body[key], sort_keys=True)}" for key in sorted(body)]
    inner.append(f'    "steps": [\n{steps}\n    ]')
    lines.append('  "case": {\n' + ",\n".join(inner) + "\n  }")
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return file


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    # a request whose lengths are left out is read as an engine's
    always = ("qo_len", "kv_len") if kind is KernelRequest else ()
    return tuple((f.name, MISSING if f.name in always else f.default) for f in fields(kind))


_SCALARS = frozenset((int, float, str, bool, type(None)))


def _plain(value: Any) -> Any:
    kind: type = value.__class__
    if kind in _SCALARS:
        return value
    if kind is tuple:
        return [_plain(item) for item in value]
    found: dict[str, Any] = {}
    for name, default in _defaults(kind):
        item = getattr(value, name)
        if item != default:
            found[name] = _plain(item)
    return found


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _validate(adapter: TypeAdapter[Any], text: str, name: str) -> Any:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        base = ("case",) if error.title == "CaseFile" else ()
        raise CaseError(f"{name}: {_explained(error, base)}") from None


def _explained(error: ValidationError, base: tuple[str, ...]) -> str:
    text = explain(error, _known_keys if base else lambda loc: _known_keys(("case", *loc)))
    return text.removeprefix("case.").removeprefix("case: ")


def _known_keys(loc: Sequence[str | int]) -> Iterable[str]:
    kinds: dict[str | int, type] = {
        "case": Case,
        "heads": Heads,
        "mask": Mask,
        "steps": Step,
        "engine": Request,
        "kernel": KernelRequest,
    }
    last = next((part for part in reversed(loc) if isinstance(part, str)), None)
    return [f.name for f in fields(CaseFile if last is None else kinds[last])]
