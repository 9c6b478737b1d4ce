"""Fits JSON Schemas to the rules of a provider's strict outputs, and reports what becomes of each
keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sglang_lite.constraints.json_schema.document import pointer_token
from sglang_lite.constraints.json_schema.quotes import KEYWORD, SOURCES, describe_quote
from sglang_lite.lang.backend.profiles.profile import SchemaRules


@dataclass(frozen=True, slots=True)
class Fit:
    """Schema that a provider accepts, with a report on the keywords of the original schema. All
    pointers are JSON Pointers into the original. The report uses the terms of `sgl.grammar.check`.

    Attributes:
        schema: JSON text of the schema to send; empty if the original is rejected.
        enforced: pointers of keywords that the provider enforces.
        checked: pointers of keywords that the model only reads in a description, with reasons; the
            finished value is checked against them.
        refused: pointers of everything that the provider does not accept in any form, with reasons;
            the complete list of necessary changes.
        required: pointers of properties that were optional and become required.
    """

    schema: str
    enforced: tuple[str, ...] = ()
    checked: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    required: tuple[str, ...] = ()

    def subschema_report(self, pointer: str) -> Fit:
        """Returns the report on the part of the schema at a pointer. The report's pointers are
        relative to that part.
        """

        def cut(found: str) -> str:
            return found.removeprefix(pointer)

        return Fit(
            self.schema,
            tuple(cut(each) for each in self.enforced if each.startswith(pointer + "/")),
            tuple((cut(each), why) for each, why in self.checked),
            tuple((cut(each), why) for each, why in self.refused),
            tuple(cut(each) for each in self.required),
        )


@lru_cache(maxsize=1024)
def fit_schema(schema: str, rules: SchemaRules) -> Fit:
    """Fits a schema, given as JSON text, to a provider's rules."""
    return _Fitter(json.loads(schema), rules).fit()


# Annotations, which do not restrict values.
_REMARKS = frozenset({
    "title", "default", "examples", "$schema", "$comment", "deprecated", "discriminator", "readOnly", "writeOnly",
    SOURCES,
})  # fmt: skip
# Keywords that only restrict a schema: they can be left out and described to the model instead.
_NARROWING = frozenset({
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties",
})  # fmt: skip
_STRUCTURE = frozenset(
    {"properties", "$defs", "items", "anyOf", "required", "additionalProperties", "$ref"}
)
_LOOKAROUND = re.compile(r"\(\?<?[=!]")  # automata can't express it
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class _Fitter:
    def __init__(self, root: Any, rules: SchemaRules) -> None:
        self._root = root
        self._rules = rules
        self._enforced: list[str] = []
        self._checked: list[tuple[str, str]] = []
        self._refused: list[tuple[str, str]] = []
        self._required: list[str] = []

    def fit(self) -> Fit:
        schema = self._fit_subschema(self._root, "")
        self._check_limits()
        refused = dict(self._refused)
        enforced = tuple(each for each in self._enforced if each not in refused)
        text = "" if refused else json.dumps(schema)
        return Fit(
            text, enforced, tuple(self._checked), tuple(refused.items()), tuple(self._required)
        )

    def _refuse(self, pointer: str, why: str) -> dict[str, Any]:
        self._refused.append((pointer, why))
        return {}

    def _fit_subschema(self, schema: Any, at: str) -> dict[str, Any]:
        if not isinstance(schema, dict):
            return self._refuse(at, "a schema that is true or false does not describe the value")
        kept: dict[str, Any] = {}
        descriptions: list[str] = []
        for key, value in schema.items():
            here = f"{at}/{pointer_token(key)}"
            if key == "description":
                kept[key] = value
            elif key in _REMARKS or key in _STRUCTURE:
                continue
            elif key == "oneOf":
                if "anyOf" in schema:
                    self._refuse(here, "oneOf and anyOf together are not supported")
                self._checked.append(
                    (here, "sent as anyOf: the answer is checked to match only one of them")
                )
            elif self._supports_keyword(key, value):
                kept[key] = value
                self._enforced.append(here)
            elif key == KEYWORD:
                descriptions.append(describe_quote(value))
                self._checked.append((here, "not enforced by the provider"))
            elif key in _NARROWING:
                descriptions.append(f"{key}: {value}")
                self._checked.append((here, "not enforced by the provider"))
            else:
                self._refuse(here, f"{key} is not supported in strict outputs")
        if descriptions:
            kept["description"] = (
                f"{kept.get('description', '')} ({', '.join(sorted(descriptions))})".strip()
            )
        if "$ref" in schema:
            return self._fit_reference(schema, kept, at)
        return self._fit_unreferenced(schema, kept, at)

    def _supports_keyword(self, key: str, value: Any) -> bool:
        rules = self._rules
        if key not in rules.kept:
            return False
        if key == "format":
            return value in rules.formats
        if key == "pattern":
            return not _LOOKAROUND.search(str(value))
        return key != "minItems" or rules.least_items is None or value <= rules.least_items

    def _fit_reference(
        self, schema: dict[str, Any], kept: dict[str, Any], at: str
    ) -> dict[str, Any]:
        beside = schema.keys() - {"$ref", "description", "$defs"} - _REMARKS
        if beside:
            return self._refuse(
                f"{at}/$ref",
                f"keywords beside a reference are not supported ({', '.join(sorted(beside))})",
            )
        target = schema["$ref"]
        if not self._rules.recursion and self._leads_to_target(target, target, set()):
            return self._refuse(f"{at}/$ref", "a schema that refers to itself is not supported")
        self._enforced.append(f"{at}/$ref")
        return {"$ref": target, **self._fit_definitions(schema, at)}

    def _fit_definitions(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        if "$defs" not in schema:
            return {}
        return {
            "$defs": {
                name: self._fit_subschema(each, f"{at}/$defs/{pointer_token(name)}")
                for name, each in schema["$defs"].items()
            }
        }

    def _fit_unreferenced(
        self, schema: dict[str, Any], kept: dict[str, Any], at: str
    ) -> dict[str, Any]:
        self._fit_type(schema, kept, at)
        options = schema.get("anyOf", schema.get("oneOf"))
        if options is not None:
            key = "anyOf" if "anyOf" in schema else "oneOf"
            if "properties" not in schema:
                kept.pop("type", None)  # each alternative has its own type
            kept["anyOf"] = [
                self._fit_subschema(each, f"{at}/{key}/{i}") for i, each in enumerate(options)
            ]
            if key == "anyOf":
                self._enforced.append(f"{at}/anyOf")
        if "items" in schema:
            kept["items"] = self._fit_subschema(schema["items"], f"{at}/items")
            self._enforced.append(f"{at}/items")
        elif kept.get("type") == "array":
            self._refuse(at, "the items of a list are not described")
        if "properties" in schema or kept.get("type") == "object":
            kept |= self._fit_object(schema, at)
        return kept | self._fit_definitions(schema, at)

    def _fit_type(self, schema: dict[str, Any], kept: dict[str, Any], at: str) -> None:
        if "type" in kept:
            if isinstance(kept["type"], list) and not self._rules.type_lists:
                self._refuse(f"{at}/type", "a list of types is not supported: use anyOf")
            return
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if values:
            if len({type(value) for value in values}) > 1 or type(values[0]) not in _JSON_TYPES:
                self._refuse(
                    f"{at}/{'enum' if 'enum' in schema else 'const'}",
                    "values of several types, or values that are not plain, are not supported",
                )
                return
            kept["type"] = _JSON_TYPES[type(values[0])]
        elif not schema.keys() & {"anyOf", "oneOf", "properties"}:
            self._refuse(at, "the value's type is not given")
        elif "properties" in schema:
            kept["type"] = "object"

    def _fit_object(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if schema.get("additionalProperties", not properties) is not False:
            pointer = f"{at}/additionalProperties" if "additionalProperties" in schema else at
            self._refuse(pointer, "an object allows properties that are not named")
        if not set(required) <= properties.keys():
            self._refuse(f"{at}/required", "a required property is not named")
        optional = [name for name in properties if name not in required]
        if self._rules.all_required:
            for name in optional:
                pointer = f"{at}/properties/{pointer_token(name)}"
                reference = isinstance(properties[name], dict) and properties[name].get("$ref")
                if reference and self._leads_to_target(reference, reference, set()):
                    self._refuse(
                        pointer, "an optional property that refers to itself would become required"
                    )
                self._required.append(pointer)
        self._enforced += [
            f"{at}/{key}"
            for key in ("properties", "required", "additionalProperties")
            if key in schema
        ]
        found: dict[str, Any] = {
            "properties": {
                name: self._fit_subschema(each, f"{at}/properties/{pointer_token(name)}")
                for name, each in properties.items()
            },
            "required": list(properties) if self._rules.all_required else list(required),
            "additionalProperties": False,
        }
        return found

    def _leads_to_target(self, start: str, target: str, seen: set[str]) -> bool:
        """Returns True if a chain of references leads from the schema at `start` to `target`."""
        return any(
            each == target
            or (each not in seen and self._leads_to_target(each, target, seen | {each}))
            for each in _walk_references(self._resolve_reference(start))
        )

    def _resolve_reference(self, reference: str) -> Any:
        found = self._root
        for step in reference.lstrip("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _check_limits(self) -> None:
        rules = self._rules
        schemas = list(_walk_schemas(self._root, 0))
        named = [each.get("properties", {}) for each, _ in schemas]
        optional = sum(
            len(each.get("properties", {})) - len(each.get("required", ())) for each, _ in schemas
        )
        unions = sum(
            "anyOf" in each or "oneOf" in each or isinstance(each.get("type"), list)
            for each, _ in schemas
        )
        counts = (
            ("properties", sum(map(len, named)), rules.properties),
            ("levels", max((depth for _, depth in schemas), default=0), rules.depth),
            (
                "values in enums",
                sum(len(each.get("enum", ())) for each, _ in schemas),
                rules.enum_values,
            ),
            ("optional properties", 0 if rules.all_required else optional, rules.optional),
            ("unions", unions, rules.unions),
        )
        for what, count, limit in counts:
            if limit is not None and count > limit:
                self._refuse("", f"{count} {what}, the limit is {limit}")


def _walk_schemas(schema: Any, depth: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields a schema and all schemas inside it, each with its depth. The depth counts objects and
    lists around the schema, and the schema itself if it is one.
    """
    if not isinstance(schema, dict):
        return
    inner = depth + (schema.get("type") in ("object", "array"))
    yield schema, inner
    for key in ("properties", "$defs"):
        for each in schema.get(key, {}).values():
            yield from _walk_schemas(each, inner if key == "properties" else 0)
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")):
        yield from _walk_schemas(each, inner)


def _walk_references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            else:
                yield from _walk_references(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _walk_references(each)
