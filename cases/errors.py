"""`CaseError`: what is wrong with a case, a mix or a trace that somebody wrote, in one sentence."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

_TAGS = {"engine", "kernel"}
_CONSEQUENCES = {"too_short", "missing"}
"""Errors that often follow from another one: an item that is wrong is missing in its array as well."""


_LONGEST_NAME = 255
"""Of a file: what is longer was never one."""


class CaseError(ValueError):
    """Bad input. Its text names the file (if any), the place and the rule."""


def read_text(path: str | Path) -> str:
    """The text of a file, or a `CaseError` that says why there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        name = str(path)
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        raise CaseError(f"{shown}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise CaseError(f"{path}: is not UTF-8 text") from None


def check_json(text: str, name: str) -> None:
    """Refuse what pydantic's own JSON parser lets pass or words badly: doubled keys, NaN, no JSON at all."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        for key in keys:
            if keys.count(key) > 1:
                raise CaseError(f"{name}: key {key!r} stands twice in one object")
        return dict(items)

    def constant(text: str) -> NoReturn:
        raise CaseError(f"{name}: {text} is no JSON number")

    try:
        json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise CaseError(f"{name}: is not JSON: {_lowered(error.msg)} at {at}") from None
    except RecursionError:
        raise CaseError(f"{name}: is nested too deeply") from None
    except CaseError:
        raise
    except ValueError:  # of `int`, which reads no more
        raise CaseError(
            f"{name}: holds a number of more than {sys.get_int_max_str_digits()} digits"
        ) from None


def unknown_key(key: str, known: Iterable[str], place: str = "") -> str:
    """A sentence about a key that nothing reads, with the nearest one that something does."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(names)}"
    return f"{place + ': ' if place else ''}unknown key {key!r}, {hint}"


def explain(error: ValidationError, known_keys: Callable[[Sequence[str | int]], Iterable[str]]) -> str:
    """The first error that is no mere consequence of another, in one sentence of our own.

    `known_keys(loc)` names the keys of the object at a place.
    """
    errors = error.errors(include_url=False)
    first = min(errors, key=lambda e: _rank(e, errors))
    loc, kind = first["loc"], first["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown_key(str(loc[-1]), known_keys(loc[:-1]), place(loc[:-1]))
    where = place(loc)
    if kind in ("value_error", "assertion_error"):
        text = str(first.get("ctx", {}).get("error", first["msg"]))
        return f"{where}: {text}" if where else text
    if kind == "json_invalid":  # say, half of a surrogate pair
        return f"is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"
    rule = _rule(kind, first.get("ctx", {}))
    got = len(first["input"]) or "none" if kind in ("too_short", "too_long") else _shown(first["input"])
    text = f"must {rule}, got {got}" if rule else _lowered(first["msg"])
    if kind == "missing":
        text = "is missing"
    return f"{where or 'the document'} {text}"


def place(loc: Sequence[str | int]) -> str:
    """`("steps", 0, "requests", 1, "engine", "uid")` as `steps[0].requests[1].uid`."""
    text = ""
    for before, part in zip((None, *loc), loc, strict=False):
        if isinstance(part, int):
            text += f"[{part}]"
        elif not (part in _TAGS and isinstance(before, int)):
            text += f".{part}" if text else part
    return text


def _rank(error: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> int:
    loc, kind = error["loc"], error["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return 0
    if kind not in _CONSEQUENCES:
        return 1
    inner = any(e["loc"][: len(loc)] == loc and e is not error for e in errors)
    return 3 if inner else 2


def _rule(kind: str, ctx: Mapping[str, Any]) -> str:
    if kind == "too_short":
        return f"hold at least {ctx['min_length']}"
    if kind == "too_long":
        return f"hold at most {ctx['max_length']}"
    return {
        "greater_than_equal": f"be at least {_bound(ctx, 'ge')}",
        "greater_than": f"be above {_bound(ctx, 'gt')}",
        "less_than_equal": f"be at most {_bound(ctx, 'le')}",
        "less_than": f"be below {_bound(ctx, 'lt')}",
        "literal_error": f"be one of {str(ctx.get('expected')).replace(' or ', ', ')}",
        "int_type": "be an integer",
        "float_type": "be a number",
        "bool_type": "be true or false",
        "string_type": "be a string",
        "tuple_type": "be an array",
        "list_type": "be an array",
        "dict_type": "be an object",
        "dataclass_type": "be an object",
        "dataclass_exact_type": "be an object",
        "finite_number": "be finite",
    }.get(kind, "")


def _bound(ctx: Mapping[str, Any], key: str) -> object:
    bound = ctx.get(key)
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
