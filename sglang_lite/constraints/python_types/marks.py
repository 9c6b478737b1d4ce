"""Internal marks in the schemas that pydantic's generator builds. They record facts that a JSON
schema can't express, and are removed at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_lite.constraints.json_schema.document import subschemas
from sglang_lite.constraints.json_schema.quotes import KEYWORD, SOURCES

Json = dict[str, Any]

NOT_EXPRESSED = "x-checked-when-read"
SET = "x-set"


@dataclass(frozen=True, slots=True)
class SchemaOfType:
    """JSON schema of a type.

    Attributes:
        schema: JSON schema as a dict.
        not_expressed: requirements that the schema does not express, as (JSON Pointer into
            it, reason).
        sets: JSON Pointers of arrays that spell sets, whose items a grammar need not keep
            distinct.
    """

    schema: Json
    not_expressed: tuple[tuple[str, str], ...]
    sets: tuple[str, ...]


def add_mark(found: Json, why: str) -> Json:
    if NOT_EXPRESSED in found:
        return {**found, NOT_EXPRESSED: f"{found[NOT_EXPRESSED]}; {why}"}
    return (
        {"allOf": [found], NOT_EXPRESSED: why}
        if "anyOf" in found
        else {**found, NOT_EXPRESSED: why}
    )


def without_marks(schema: Json) -> SchemaOfType:
    """Removes the internal marks from a schema. Returns the schema with the JSON Pointers of the
    marks.
    """
    not_expressed: list[tuple[str, str]] = []
    sets: list[str] = []
    queue = [("", schema)]
    for pointer, each in queue:
        if isinstance(each, dict):
            if NOT_EXPRESSED in each:
                not_expressed.append((pointer, each.pop(NOT_EXPRESSED)))
                if len(each.get("allOf", ())) == 1 and not each["allOf"][0].keys() & each.keys():
                    # undoes the wrapper that add_mark puts around alternatives
                    each.update(each.pop("allOf")[0])
            if each.pop(SET, False):
                sets.append(pointer)
            queue += [(pointer + steps, below) for steps, below in subschemas(each)]
    reference = schema.get("$ref", "")
    if (
        not_expressed and not_expressed[0][0] == "" and schema.keys() == {"$ref", "$defs"}
    ):  # a $ref to the marked definition
        name = reference.removeprefix("#/$defs/")
        schema = {**schema["$defs"][name], "$defs": schema["$defs"]}
        sets += [
            each.removeprefix(f"/$defs/{name}")
            for each in sets
            if each.startswith(f"/$defs/{name}/")
        ]
    return SchemaOfType(schema, tuple(not_expressed), tuple(sets))


def share_quote_sources(schema: Json) -> Json:
    """Returns the schema with each quoted document stored only once. Quotes refer to the stored
    documents.
    """
    numbers: dict[str, str] = {}
    queue = [schema]
    for each in queue:
        if isinstance(each, dict):
            if KEYWORD in each:
                found = [
                    numbers.setdefault(text, str(len(numbers))) for text in each[KEYWORD]["sources"]
                ]
                each[KEYWORD] = {
                    **each[KEYWORD],
                    "sources": [{"$ref": f"#/{SOURCES}/{number}"} for number in found],
                }
            queue += [below for _, below in subschemas(each)]
    return (
        {**schema, SOURCES: {number: text for text, number in numbers.items()}}
        if numbers
        else schema
    )
