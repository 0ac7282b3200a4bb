"""Files of observations: JSON lines with a header, one line a call or rule, and a footer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from conformance.errors import UsageError
from conformance.fidelity.call import LibraryCall, from_json, to_json
from conformance.fidelity.verdict import Seen
from fakes.contract.rule import Observation

FORMAT = 2


@dataclass(slots=True)
class Observations:
    """What one kind of libraries did. `rules`: what the probe of each contract rule saw, by its id."""

    kind: str
    """"fake" or "real"."""
    versions: dict[str, str]
    seed: int | None = None
    calls: dict[LibraryCall, Seen] = field(default_factory=dict[LibraryCall, Seen])
    rules: dict[str, Observation] = field(default_factory=dict[str, Observation])

    @property
    def name(self) -> str:
        return " ".join([self.kind, *(f"{library} {version}" for library, version in self.versions.items())])


class Journal:
    """What is observed, line by line as it comes: a file that `write` replaces when all of it is there."""

    def __init__(self, path: str | Path, seen: Observations) -> None:
        self._file = Path(path).open("w", buffering=1)  # noqa: SIM115 - closed by `close`
        self._put(_head(seen))

    def call(self, call: LibraryCall, what: Seen) -> None:
        self._put({"call": json.loads(to_json(call)), "seen": what.to_json()})

    def close(self) -> None:
        self._file.close()

    def _put(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _head(seen: Observations) -> Mapping[str, Any]:
    return {"format": FORMAT, "kind": seen.kind, "versions": seen.versions, "seed": seen.seed}


def require_writable(*paths: str) -> None:
    """Make sure that files can be written, before hours go into what is to be in them. What they hold stays.

    Raises:
        UsageError: one cannot.
    """
    for path in paths:
        new = not Path(path).exists()
        try:
            Path(path).open("a").close()
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        if new:
            Path(path).unlink()


def write(path: str | Path, seen: Observations) -> None:
    """Write a file that `read` reads."""
    with Path(path).open("w") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in _lines(seen))


def _lines(seen: Observations) -> Iterable[Mapping[str, Any]]:
    yield _head(seen)
    for call, what in seen.calls.items():
        yield {"call": json.loads(to_json(call)), "seen": what.to_json()}
    for rule, what in seen.rules.items():
        yield {"rule": rule, "seen": [what.kind, what.detail, *what.errors]}
    yield {"done": True, "calls": len(seen.calls), "rules": len(seen.rules)}


def read(path: str | Path) -> Observations:
    """Read a whole file.

    Raises:
        UsageError: no such file, another format, or it was cut before its footer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not UTF-8 text") from None
    try:
        head, *body, foot = cast("list[dict[str, Any]]", [json.loads(line) for line in text.splitlines()])
        form = head["format"]
        seen = _observations(head, body) if form == FORMAT else Observations("", {})
        whole = foot.get("done") and (foot["calls"], foot["rules"]) == (len(seen.calls), len(seen.rules))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is no file of observations: {type(error).__name__}: {reason}") from error
    if form != FORMAT:
        raise UsageError(f"{path} has format {form!r}, this release reads {FORMAT}")
    if not whole:
        raise UsageError(f"{path} ends before its footer: the run that wrote it was cut")
    return seen


def _observations(head: Mapping[str, Any], body: Iterable[Mapping[str, Any]]) -> Observations:
    seen = Observations(head["kind"], head["versions"], head["seed"])
    for line in body:
        if "rule" in line:
            kind, detail, *errors = line["seen"]
            seen.rules[line["rule"]] = Observation(kind, detail, tuple(errors))
        else:
            seen.calls[from_json(line["call"])] = Seen.from_json(line["seen"])
    return seen
