"""Reading request traces: Azure's CSV and Mooncake's JSON lines, told apart by their content.

Azure LLM inference trace 2023: `TIMESTAMP,ContextTokens,GeneratedTokens`. Mooncake (FAST '25): `timestamp` in
milliseconds, `input_length`, `output_length` and `hash_ids`, one id per block of 512 input tokens; equal
leading ids are a shared prefix.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast

from cases.errors import CaseError, read_text

TRACE_BLOCK = 512
"""Input tokens per id in `hash_ids`."""

_DIGITS = 15
"""Of a length or a time in a trace: as many as a float has."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
Format = Literal["azure", "mooncake"]


@dataclass(frozen=True, slots=True)
class Row:
    """One request. `arrival` in seconds from the first one's; `blocks`: ids of its full 512-token blocks."""

    arrival: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in order of arrival."""

    format: Format
    rows: tuple[Row, ...]


def read_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        CaseError: the file is neither format, or a line is wrong: one sentence with file and line number.
    """
    lines = read_text(path).splitlines()
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip("\ufeff").startswith(_AZURE[0]):
        form, rows = "azure", _azure(str(path), lines)
    elif first.lstrip().startswith("{"):
        form, rows = "mooncake", _mooncake(str(path), lines)
    else:
        raise CaseError(
            f"{path}: is no known trace, neither CSV that begins with {','.join(_AZURE)} nor JSON lines"
        )
    if not rows:
        raise CaseError(f"{path}: holds no request")
    rows.sort(key=lambda row: row.arrival)
    start = rows[0].arrival
    shifted = (Row(row.arrival - start, row.input_len, row.output_len, row.blocks) for row in rows)
    return Trace(form, tuple(shifted))


def _azure(path: str, lines: list[str]) -> list[Row]:
    rows: list[Row] = []
    columns: dict[str, int] = {}
    width = 0
    for where, cells in _cells(path, lines):
        if not cells:
            continue
        if not columns:
            names = [cell.strip().lstrip("\ufeff") for cell in cells]
            missing = [name for name in _AZURE if name not in names]
            if missing:
                raise CaseError(f"{where}: the header has no column {missing[0]}")
            columns = {name: names.index(name) for name in _AZURE}
            width = len(names)
            continue
        if len(cells) != width:
            raise CaseError(f"{where}: has {len(cells)} cells, the header {width}")
        stamp, context, generated = (cells[columns[name]].strip() for name in _AZURE)
        try:
            arrival = datetime.fromisoformat(stamp).timestamp()
        except (ValueError, OverflowError):
            raise CaseError(f"{where}: TIMESTAMP must be a date and time, got {_shown(stamp)}") from None
        rows.append(Row(arrival, _cell(where, _AZURE[1], context, 1), _cell(where, _AZURE[2], generated, 0)))
    return rows


def _cells(path: str, lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Where a row ends, and what it holds."""
    reader = csv.reader(lines)
    try:
        for cells in reader:
            yield f"{path}:{reader.line_num}", cells
    except csv.Error as error:
        raise CaseError(f"{path}:{reader.line_num}: is not CSV: {error}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _cell(where: str, name: str, text: str, least: int) -> int:
    if not text.isascii() or not text.removeprefix("-").isdigit():
        raise CaseError(f"{where}: {name} must be a whole number, got {_shown(text)}")
    if len(text) > _DIGITS:
        raise CaseError(f"{where}: {name} must have at most {_DIGITS} digits, got {len(text)}")
    return _at_least(where, name, int(text), least)


def _at_least(where: str, name: str, value: int, least: int) -> int:
    if value < least:
        raise CaseError(f"{where}: {name} must be at least {least}, got {_shown(value)}")
    return value


def _mooncake(path: str, lines: list[str]) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise CaseError(f"{where}: is not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise CaseError(f"{where}: is nested too deeply") from None
        except ValueError:  # of `int`, which reads no more
            raise CaseError(
                f"{where}: holds a number of more than {sys.get_int_max_str_digits()} digits"
            ) from None
        if not isinstance(found, dict):
            raise CaseError(f"{where}: must be an object, got {line.strip()[:40]}")
        rows.append(_mooncake_row(where, cast("dict[str, Any]", found)))
    return rows


def _mooncake_row(where: str, found: Mapping[str, Any]) -> Row:
    missing = [name for name in _MOONCAKE if name not in found]
    if missing:
        raise CaseError(f"{where}: {missing[0]} is missing")
    stamp, input_len, output_len, ids = (found[name] for name in _MOONCAKE)
    if isinstance(stamp, bool) or not isinstance(stamp, (int, float)):
        raise CaseError(f"{where}: timestamp must be a number of milliseconds, got {_shown(stamp)}")
    if not abs(stamp) < 10**_DIGITS:
        raise CaseError(f"{where}: timestamp must have at most {_DIGITS} digits, got {_shown(stamp)}")
    input_len = _length(where, "input_length", input_len, 1)
    output_len = _length(where, "output_length", output_len, 0)
    if not isinstance(ids, list):
        raise CaseError(f"{where}: hash_ids must be an array, got {_shown(ids)}")
    blocks = tuple(_whole(where, "hash_ids", block, 0) for block in cast("list[object]", ids))
    wanted = -(-input_len // TRACE_BLOCK)
    if len(blocks) != wanted:
        raise CaseError(
            f"{where}: hash_ids holds {len(blocks)} ids, but {input_len} tokens are {wanted} blocks"
            f" of {TRACE_BLOCK}"
        )
    return Row(stamp / 1000, input_len, output_len, blocks[: input_len // TRACE_BLOCK])


def _length(where: str, name: str, value: object, least: int) -> int:
    length = _whole(where, name, value, least)
    if length >= 10**_DIGITS:
        raise CaseError(f"{where}: {name} must have at most {_DIGITS} digits, got {_shown(length)}")
    return length


def _whole(where: str, name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CaseError(f"{where}: {name} must be a whole number, got {_shown(value)}")
    return _at_least(where, name, value, least)
