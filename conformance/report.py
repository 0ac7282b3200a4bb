"""The report of a run: JSON lines, appended as they come, with a header and a footer.

`report.schema.json` is the schema of a line (`conformance.lines`). A report without its footer was cut off,
and is refused.
"""

from __future__ import annotations

import fcntl
import json
import platform
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

from pydantic import ValidationError

from backends.libraries import Answer
from cases.codec import STORED_DIGITS, to_json
from cases.coverage import Reached
from cases.errors import explain
from cases.model import Case, Level
from conformance.lines import KINDS, Footer, Header, Judged, Library, Line, ReachedTable
from conformance.outcome import Finding, Verdict
from conformance.version import own_version
from fakes.recorder import Mode


class ReportError(ValueError):
    """A file that is no complete report. The message is one sentence."""


class Report(Line):
    """A complete report."""

    header: Header
    verdicts: list[Judged]
    reached: list[ReachedTable]
    footer: Footer


def header(
    *,
    command: Sequence[str],
    backends: Sequence[str],
    libraries: Mapping[str, Answer],
    device: str,
    mode: Mode,
    seed: int,
    checks: Sequence[str],
) -> Header:
    """A header about this process."""
    return Header(
        version=own_version(),
        started=datetime.now(UTC),
        command=list(command),
        python=f"{platform.python_version()} {sys.platform}",
        torch=version("torch"),
        numpy=version("numpy"),
        hypothesis=version("hypothesis"),
        backends=list(backends),
        libraries={
            name: Library(kind=a.kind, version=a.version, file=a.file) for name, a in libraries.items()
        },
        device=device,
        mode=mode,
        seed=seed,
        checks=list(checks),
    )


@dataclass
class Resumed:
    """Of an earlier run's report: its verdicts by backend and digest (32 digits), and how far into the file these reach
    (`conformance.resume`).

    `lines` counts those on file, which are not to be written again.
    """

    size: int = 0
    known: dict[tuple[str, str], Verdict] = field(default_factory=dict[tuple[str, str], Verdict])
    lines: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])


class Writer:
    """Appends lines to a file, each flushed. Leaving the context writes the footer.

    An exception other than KeyboardInterrupt is a fault of the harness: then there is no footer. Nor is there one
    where the file could not be written to its end: `lost` says why, and the run goes on.
    With `resumed`, the file goes on behind the verdicts that it has, and these are not written again.

    Raises:
        ReportError: the file cannot be written, or another run writes it.
    """

    def __init__(self, path: str | Path, header: Header, resumed: Resumed | None = None) -> None:
        self._verdicts = self._failed = self._unsupported = 0
        earlier = resumed or Resumed()
        self._on_file = earlier.lines.copy()
        for key, lines in self._on_file.items():
            self._count(earlier.known[key], lines)
        self.interrupted = False
        self.lost: str | None = None
        self._file = _opened(path, 0 if resumed is None else resumed.size)
        if resumed is None:
            self._write(header)

    def verdict(self, case: Case, verdict: Verdict, *, shrunk: bool = False) -> None:
        """One line for one verdict."""
        failed = bool(verdict.failed)
        line: dict[str, Any] = {
            "kind": "verdict",
            "backend": verdict.backend,
            "digest": verdict.digest[:STORED_DIGITS],
        }
        if verdict.outcomes:
            line["outcomes"] = verdict.outcomes
        if verdict.findings:
            line["findings"] = [_problem(finding) for finding in verdict.findings]
        if verdict.unsupported is not None:
            line["unsupported"] = verdict.unsupported
        if failed:
            line["case"] = json.loads(to_json(case))
        if shrunk:
            line["shrunk"] = True
        else:
            if self._on_file[verdict.backend, line["digest"]] > 0:
                self._on_file[verdict.backend, line["digest"]] -= 1
                return
            self._count(verdict)
        self._line(json.dumps(line, separators=(",", ":")))

    def _count(self, verdict: Verdict, lines: int = 1) -> None:
        self._verdicts += lines
        self._failed += lines * bool(verdict.failed)
        self._unsupported += lines * (verdict.unsupported is not None)

    def reached(self, level: Level, reached: Reached) -> None:
        """One line for what the cases of a level reached."""
        self._write(ReachedTable.model_validate({"level": level, **reached.to_dict()}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self._write(
                Footer(
                    finished=datetime.now(UTC),
                    interrupted=self.interrupted or kind is not None,
                    verdicts=self._verdicts,
                    failed=self._failed,
                    unsupported=self._unsupported,
                )
            )
        with self._losing():
            self._file.close()

    def _write(self, line: Line) -> None:
        self._line(line.model_dump_json())

    def _line(self, text: str) -> None:
        if self.lost is None:
            with self._losing():
                self._file.write(text + "\n")
                self._file.flush()

    @contextmanager
    def _losing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.lost = self.lost or str(error.strerror)


def _opened(path: str | Path, size: int) -> TextIO:
    """The file, cut to `size` bytes and locked: two runs would write into each other's lines."""
    try:
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed on exit
        _lock(file, path)
        if Path(path).is_file():
            file.truncate(size)
    except OSError as error:
        raise ReportError(f"{path}: cannot be written ({error.strerror})") from None
    return file


def _lock(file: TextIO, path: str | Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ReportError(f"{path}: another run is writing it") from None
    except OSError:
        return  # a file system without locks


def _problem(finding: Finding) -> dict[str, Any]:
    """A finding without what it does not say."""
    return {name: value for name, value in vars(finding).items() if value is not None}


def read(path: str | Path) -> Report:
    """Read a report.

    Raises:
        ReportError: no such file, a line that is no JSON, unknown or broken, no header, no footer.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    parsed = [parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    if not parsed or not isinstance(parsed[0], Header):
        raise ReportError(f"{path}: does not begin with a header, so it is no report")
    if not isinstance(parsed[-1], Footer):
        raise ReportError(f"{path}: has no footer: the run that wrote it did not come to its end")
    for number, line in enumerate(parsed[1:-1], 2):
        if isinstance(line, Header | Footer):
            raise ReportError(f"{path}, line {number}: a {line.kind} in the middle of the report")
    return Report(
        header=parsed[0],
        verdicts=[line for line in parsed if isinstance(line, Judged)],
        reached=[line for line in parsed if isinstance(line, ReachedTable)],
        footer=parsed[-1],
    )


def parse_line(text: str, where: str) -> Line:
    """One line of a report. `where` stands before the message of an error.

    Raises:
        ReportError: no JSON, unknown, or broken.
    """
    try:
        plain: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ReportError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from None
    kind: Any = cast("dict[str, Any]", plain).get("kind") if isinstance(plain, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ReportError(f"{where}: kind is {kind!r}, must be one of {', '.join(KINDS)}")
    model = KINDS[kind]
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        sentence = explain(error, lambda _: model.model_fields)
        raise ReportError(f"{where}: {sentence}") from None
