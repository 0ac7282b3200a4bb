"""The JSON schema of case files, generated from the record. `python -m cases.schema` writes it anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from cases.codec import CaseFile

SCHEMA_FILE = Path(__file__).with_name("schema.json")


class _Generator(GenerateJsonSchema):
    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """A request without lengths fits both kinds, which `oneOf` would refuse."""
        made = super().tagged_union_schema(schema)
        return {"anyOf": made.pop("oneOf"), **made}


def case_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a one-case file; `$defs/Case` is the case alone."""
    made = TypeAdapter(CaseFile).json_schema(schema_generator=_Generator)
    return {"$schema": _Generator.schema_dialect, **made}


def schema_text() -> str:
    return json.dumps(case_schema(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
