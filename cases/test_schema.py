"""The committed schema is the record's own, and says of the corpus what the record says."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases.codec import digest, load
from cases.edges import EDGES
from cases.schema import SCHEMA_FILE, schema_text

CORPUS = sorted(Path(__file__).with_name("corpus").glob("*.json"))
SCHEMA: dict[str, Any] = json.loads(SCHEMA_FILE.read_text())
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_NOTES = {"title", "description", "default", "$defs", "$schema"}


_SIMPLE: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda value, rule: (
        isinstance(value, _TYPES[rule]) and isinstance(value, bool) <= (rule == "boolean")
    ),
    "enum": lambda value, rule: value in rule,
    "pattern": lambda value, rule: re.search(rule, value) is not None,
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "minItems": lambda value, rule: len(value) >= rule,
    "maxItems": lambda value, rule: len(value) <= rule,
    "minLength": lambda value, rule: len(value) >= rule,
}


def problems(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """What JSON schema has against a value; only for the keywords that our schema uses."""
    if "type" in schema and not _SIMPLE["type"](value, schema["type"]):
        return [f"{at}: is no {schema['type']}"]
    found: list[str] = []
    for keyword, rule in schema.items():
        if keyword in _NOTES:
            continue
        if keyword == "$ref":
            found += problems(value, SCHEMA["$defs"][rule.removeprefix("#/$defs/")], at)
        elif keyword == "anyOf":
            found += [f"{at}: fits none"] if all(problems(value, one, at) for one in rule) else []
        elif keyword == "required":
            found += [f"{at}: lacks {name}" for name in rule if name not in value]
        elif keyword == "additionalProperties":
            assert rule is False
            found += [f"{at}: has {name}" for name in value if name not in schema["properties"]]
        elif keyword == "properties":
            for name in rule.keys() & value.keys():
                found += problems(value[name], rule[name], f"{at}.{name}")
        elif keyword == "items":
            for i, item in enumerate(value):
                found += problems(item, rule, f"{at}[{i}]")
        elif not _SIMPLE[keyword](value, rule):
            found.append(f"{at}: breaks {keyword} {rule}")
    return found


def test_schema_is_current() -> None:
    assert SCHEMA_FILE.read_text() == schema_text(), "run python -m cases.schema"


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(path: Path) -> None:
    file = load(path)
    assert file.digest is not None
    assert file.digest in digest(file.case)
    assert file.why.endswith(".")
    assert problems(json.loads(path.read_text()), SCHEMA) == []


def test_schema_refuses() -> None:
    good: dict[str, Any] = json.loads(CORPUS[0].read_text())
    assert problems(good | {"reason": ""}, SCHEMA) == [": has reason"]
    assert problems(good | {"case": {}}, SCHEMA) == [".case: lacks steps"]
    bad = {"steps": [{"requests": [{"extend_len": 0}]}]}
    assert problems(good | {"case": bad}, SCHEMA) == [".case.steps[0].requests[0]: fits none"]


def test_every_named_case_stands_once() -> None:
    cases = [load(path).case for path in CORPUS] + [case for case, _ in EDGES.values()]
    assert len(CORPUS) >= 25
    assert len(EDGES) >= 25
    assert len({digest(case) for case in cases}) == len(cases)


def test_edges_reach_what_the_reports_need() -> None:
    cases = [load(path).case for path in CORPUS] + [case for case, _ in EDGES.values()]
    lengths = {(c.page_size, r.kv_len) for c in cases for s in c.steps for r in s.requests}
    assert {(16, 15), (16, 16), (16, 17), (16, 32), (64, 65), (256, 257)} <= lengths
    assert {5, 7, 16} <= {c.heads.group_size for c in cases}
    assert {"verify", "draft_extend", "chunked", "mixed", "decode", "prefill"} <= {
        s.kind for c in cases for s in c.steps
    }
