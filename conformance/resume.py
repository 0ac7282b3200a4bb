"""What a report that was cut, or ended early, says already: taken over instead of asked again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from conformance.lines import Header, Judged, Line
from conformance.outcome import Finding, Verdict
from conformance.report import ReportError, Resumed, parse_line

_BEGINNING = b'{"kind":"header"'


def resume(path: str | Path, header: Header) -> Resumed | None:
    """Read a report as far as its verdicts go; None where there is none. What follows them is written anew.

    Raises:
        ReportError: it cannot be read, or comes from a run that would have come to other verdicts.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror})") from None
    lines = _lines(data, str(path))
    first = next(lines, None)
    if first is None:
        if _BEGINNING.startswith(data[: len(_BEGINNING)]):  # empty, or cut before its header was complete
            return None
        raise ReportError(f"{path}: does not begin with a header, so it is no report")
    if not isinstance(first[1], Header):
        raise ReportError(f"{path}: does not begin with a header, so it is no report")
    _require_same(first[1], header, str(path))
    found = Resumed(size=first[0])
    for end, line in lines:
        if not isinstance(line, Judged) or line.shrunk:
            break
        key = (line.backend, line.digest)
        found.size = end
        found.known[key] = _verdict(line)
        found.lines[key] += 1
    return found


def _lines(data: bytes, path: str) -> Iterator[tuple[int, Line]]:
    """Every complete line and where it ends; the last one may have been cut."""
    end = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        end += len(line)
        yield end, parse_line(line.decode(errors="replace"), f"{path}, line {number}")


def _require_same(old: Header, new: Header, path: str) -> None:
    """What decides the verdicts, and which cases are drawn."""
    for name in (
        "version",
        "backends",
        "device",
        "mode",
        "seed",
        "torch",
        "numpy",
        "hypothesis",
        "python",
        "checks",
    ):
        then, now = getattr(old, name), getattr(new, name)
        if then != now:
            verb = "are" if name in {"backends", "checks"} else "is"
            raise ReportError(
                f"{path}: cannot be resumed: its {name} {verb} {_told(then)}, this run's {verb} {_told(now)}"
            )
    libraries = [{name: (a.kind, a.version) for name, a in h.libraries.items()} for h in (old, new)]
    if libraries[0] != libraries[1]:
        raise ReportError(
            f"{path}: cannot be resumed: its libraries are {libraries[0]}, this run's are {libraries[1]}"
        )


def _told(value: object) -> str:
    return ", ".join(cast("list[str]", value)) if isinstance(value, list) else repr(value)


def _verdict(line: Judged) -> Verdict:
    return Verdict(
        backend=line.backend,
        digest=line.digest,
        outcomes=dict(line.outcomes),
        findings=tuple(Finding(**problem.model_dump()) for problem in line.findings),
        unsupported=line.unsupported,
    )
