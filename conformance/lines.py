"""The lines of a report, one class a kind, and their JSON schema.

`python -m conformance.lines` writes the schema anew.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema

from backends.libraries import LibraryKind
from cases.model import Case, Level
from conformance.outcome import Outcome
from fakes.recorder import Mode

FORMAT = 1
"""Version of the format. It rises when a reader of the old one could misread the new one."""
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

_SCHEMA = WithJsonSchema({"type": "object", "description": "`$defs/Case` of cases/schema.json"})


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Library(Line):
    kind: LibraryKind
    version: str
    file: str
    """The file that answered to the library's name."""


class Header(Line):
    """The first line: what was asked of whom, on what."""

    kind: Literal["header"] = "header"
    format: Literal[1] = FORMAT
    version: str
    """Of attention-conformance."""
    started: datetime
    command: list[str]
    python: str
    torch: str
    numpy: str
    hypothesis: str
    backends: list[str]
    libraries: dict[str, Library]
    """Those that a backend had imported when the run began."""
    device: str
    """What the backends that need a library ran on."""
    mode: Mode
    """How the fakes behaved."""
    seed: int
    checks: list[str]
    """Those that the run asks for."""


class Problem(Line):
    """One finding."""

    check: str
    outcome: Outcome
    message: str
    step: int | None = None
    layer: int | None = None
    request: int | None = None
    field: str | None = None
    """The argument or tensor at fault."""
    rule: str | None = None
    """The rule of the fakes' contract that was broken."""


class Judged(Line):
    """One case on one backend."""

    kind: Literal["verdict"] = "verdict"
    backend: str
    digest: str
    """Of the case, 32 digits."""
    outcomes: dict[str, Outcome] = {}
    """Of each check that found something to look at."""
    findings: list[Problem] = []
    unsupported: str | None = None
    """Why the case was not run."""
    case: Annotated[Case, _SCHEMA] | None = None
    """The case itself, where a check failed."""
    shrunk: bool = False
    """Whether this is the smallest form of an earlier failure, asked in addition and not counted."""


class ReachedTable(Line):
    """What the cases of one level reached: group -> label -> cases."""

    kind: Literal["reached"] = "reached"
    level: Level
    cases: int
    reached: dict[str, dict[str, int]]


class Footer(Line):
    """The last line. Counts are of verdicts; `interrupted` says that the user ended the run early."""

    kind: Literal["footer"] = "footer"
    finished: datetime
    interrupted: bool
    verdicts: int
    failed: int
    unsupported: int


AnyLine = Annotated[Header | Judged | ReachedTable | Footer, Field(discriminator="kind")]
KINDS: dict[str, type[Line]] = {
    "header": Header,
    "verdict": Judged,
    "reached": ReachedTable,
    "footer": Footer,
}


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of one line."""
    made = TypeAdapter[Any](AnyLine).json_schema()
    return {"$schema": GenerateJsonSchema.schema_dialect, "title": "One line of a report", **made}


def schema_text() -> str:
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
