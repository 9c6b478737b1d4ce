"""JSON schemas of Python types that express everything pydantic requires of a value's JSON, as far
as a schema can.

They are generated from pydantic's core schema, because pydantic's own JSON schema omits
much of it. Requirements that no schema can express, such as a validator function, are
listed with their reason and checked when a text is read.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

from pydantic import PydanticUserError, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from sglang_lite.constraints.json_schema.quotes import Quote
from sglang_lite.constraints.python_types import patterns as patterns
from sglang_lite.constraints.python_types.marks import (
    SET,
    Json,
    SchemaOfType,
    add_mark,
    share_quote_sources,
    without_marks,
)
from sglang_lite.constraints.python_types.readable import ClassReader
from sglang_lite.constraints.python_types.scalars import SCALARS, CoreNode, add_required_patterns
from sglang_lite.protocol import ConstraintError
from sglang_lite.protocol.anything import UserValue

_ASCII_ONLY = r"^[\u0000-\u007F]*$"
_STRIPPED = r"^(?:[^\s\u0085]|[^\s\u0085][\s\S]*[^\s\u0085])?$"
_HANDFUL = 8  # maximum number of enum values for which a grammar enforces distinct items
_SCALARS = ["null", "boolean", "number", "string"]

# Pydantic's own functions that accept every value of their schema, or of the schema given here.
_SOUND: dict[str, Json | None] = {
    **dict.fromkeys((
        "path_validator", "deque_validator", "defaultdict_validator", "sequence_validator", "counter_validator",
        "SecretStr", "SecretBytes",
        "EncodedBytes.decode", "IPvAnyAddress._validate", "IPvAnyInterface._validate", "IPvAnyNetwork._validate",
        "wrap_val", "<lambda>", "Counter", "OrderedDict",
    )),
    "ByteSize._validate": {
        "anyOf": [{"type": "integer", "minimum": 0, "maximum": patterns.MAX_INT},
                  {"type": "string", "pattern": f"^{patterns.BYTE_SIZE}$"}]
    },
}  # fmt: skip


def schema_of(adapter: TypeAdapter[UserValue], name: str) -> SchemaOfType:
    """Returns the JSON schema of a type.

    Args:
        adapter: pydantic adapter of the type.
        name: name of the type, for error messages.

    Raises:
        ConstraintError: values of the type can't be read from JSON.
    """
    try:
        schema = TypeSchema().generate(adapter.core_schema)
    except PydanticUserError as error:
        if error.code == "class-not-fully-defined":
            raise ConstraintError(
                f"type: {name} has no JSON schema: a name in it is not that of a type.",
                hint="Give the type itself: int, float, bool, str, a Literal or Enum, a date, list[…], dict[str, …], "
                "… | None, a dataclass, a TypedDict or a pydantic model.",
            ) from error
        raise ConstraintError(
            f"type: {name} has no JSON schema: {error.message}.",
            hint="Use a type that JSON has values of, or say what they look like with pydantic's WithJsonSchema.",
        ) from error
    found = without_marks(schema)
    return replace(found, schema=share_quote_sources(found.schema))


def schemas_of(
    adapters: Sequence[tuple[str, TypeAdapter[UserValue]]],
) -> tuple[dict[str, Json], Json]:
    """Returns the JSON schemas of several types by name, and the definitions (`$defs`) that they
    share.

    Raises:
        ConstraintError: values of one of the types can't be read from JSON.
    """
    inputs = [(name, "validation", adapter) for name, adapter in adapters]
    try:
        found, shared = TypeAdapter.json_schemas(inputs, schema_generator=TypeSchema)  # type: ignore[arg-type] # a list's type is invariant
    except PydanticUserError as error:
        raise ConstraintError(f"type: no JSON schema: {error.message}.") from error
    by_name = {name: without_marks(schema).schema for (name, _), schema in found.items()}
    return {str(name): schema for name, schema in by_name.items()}, without_marks(shared).schema


class TypeSchema(GenerateJsonSchema):
    """Generates JSON schemas with requirements that pydantic's own generator omits, such as the
    pattern of a format. Objects are closed unless their type has `extra="allow"`.
    """

    # pydantic's table of functions by the core schema's type
    def build_schema_type_to_method(self) -> Any:
        return {**super().build_schema_type_to_method(), **SCALARS}

    def generate_inner(self, schema: CoreNode) -> Json:
        found: Json = super().generate_inner(schema)
        pattern = (
            patterns.FORMATS.get(found.get("format", "")) if found.get("type") == "string" else None
        )
        if pattern is not None:
            found = {"type": "string", "pattern": f"^{pattern}$"}
        kind = schema["type"]
        if kind.startswith("function-"):
            function = schema["function"]["function"]
            name = _function_name(function)
            owner = getattr(function, "__self__", None)
            if isinstance(owner, Quote):
                pass  # the schema expresses it
            elif isinstance(owner, ClassReader):
                found = (
                    add_mark(found, f"by {owner.cls.__name__}: {owner.checks}")
                    if owner.checks
                    else found
                )
            elif _is_from_pydantic(function) and name in _SOUND:
                found = _SOUND[name] or found
            else:
                found = add_mark(found, f"by the function {name}")
        elif kind == "chain" and len(schema["steps"]) > 1:
            found = add_mark(found, "by the later steps of its validation")
        # with a JSON schema supplied by the user
        elif kind in ("is-instance", "is-subclass", "callable"):
            found = add_mark(found, f"by its {kind} schema, which takes no JSON")
        return found

    def is_subclass_schema(self, schema: CoreNode) -> Json:
        return self.handle_invalid_for_json_schema(
            schema, f"classes below {schema['cls'].__name__}"
        )

    def fraction_schema(self, schema: CoreNode) -> Json:
        bounds = {
            name: float(schema[name])
            for name in ("ge", "gt", "le", "lt")
            if schema.get(name) is not None
        }
        if bounds:
            return self.float_schema({"type": "float", **bounds})  # type: ignore[typeddict-item] # only known names
        return {"type": "string", "format": "fraction"}

    # -------------------------------------------------------------------------------------- strings

    def str_schema(self, schema: CoreNode) -> Json:
        found: Json = super().str_schema(schema)
        config = self._config
        for keyword, limit in (
            ("minLength", config.str_min_length),
            ("maxLength", config.str_max_length),
        ):
            if limit:
                found.setdefault(keyword, limit)
        more = [_STRIPPED] if schema.get("strip_whitespace", config.str_strip_whitespace) else []
        more += [_ASCII_ONLY] if schema.get("ascii_only") else []
        return add_required_patterns(found, more)

    def bytes_schema(self, schema: CoreNode) -> Json:
        limits = {"minLength": schema.get("min_length"), "maxLength": schema.get("max_length")}
        given_limits = {keyword: value for keyword, value in limits.items() if value is not None}
        coded = getattr(self._config, "val_json_bytes", "utf8")
        if coded == "utf8":  # lengths count bytes: each ASCII character is one byte
            return {
                "type": "string",
                **given_limits,
                **({"pattern": _ASCII_ONLY} if given_limits else {}),
            }
        pattern = patterns.FORMATS["base64url"] if coded == "base64" else "(?:[0-9a-f]{2})*"
        found: Json = {"type": "string", "pattern": f"^{pattern}$"}
        return add_mark(found, "the length of the decoded bytes") if given_limits else found

    # --------------------------------------------------------------------------- arrays and objects

    def set_schema(self, schema: CoreNode) -> Json:
        """Returns the schema of a set. The array may repeat an item if neither the grammar nor the
        masks can prevent it.
        """
        items = self.generate_inner(schema["items_schema"]) if "items_schema" in schema else {}
        least = schema.get("min_length", 0)
        most = schema.get("max_length")
        found: Json = {"type": "array", "items": items}
        found |= {"minItems": least} if least else {}
        found |= {"maxItems": most} if most is not None else {}
        item_schema = self.resolve_ref_schema(items)
        if not item_schema:
            found["items"] = {"type": _SCALARS}
        elif item_schema.get("type") in ("array", "object"):
            found = add_mark(found, "that items are hashable")
        if (
            item_schema.get("type") == "boolean"
            or len(item_schema.get("enum", range(_HANDFUL + 1))) <= _HANDFUL
        ):
            found["uniqueItems"] = True
            return found
        if least > 1:
            found = add_mark(found, "the number of different items")
        return {**found, SET: True}

    frozenset_schema = set_schema

    def dict_schema(self, schema: CoreNode) -> Json:
        return self._common_dict_schema(schema)

    def _common_dict_schema(self, schema: CoreNode) -> Json:
        keys = schema.get("keys_schema", {"type": "any"})
        if keys["type"] == "decimal" and keys.keys() <= {"type", "metadata"}:
            keys = {"type": "float"}  # as member names, both look the same
        if keys["type"] == "literal":  # no text of a name is read as a number
            texts = [
                each
                for each in keys["expected"]
                if not isinstance(each, int) or isinstance(each, bool)
            ]
            if not texts:
                self.handle_invalid_for_json_schema(
                    schema, f"keys of Literal{keys['expected']}, which no name is read as"
                )
            keys = {**keys, "expected": texts}
        names = self._build_name_schema(self.generate_inner(keys))
        values = (
            self.generate_inner(schema["values_schema"]).copy() if "values_schema" in schema else {}
        )
        if schema["type"] == "counter":
            values = self.generate_inner({"type": "int"})
        values.pop("title", None)
        found: Json = {"type": "object", "additionalProperties": values or True}
        if names.keys() - {"type", "title"}:
            found["propertyNames"] = names
        least = schema.get("min_length", 0)
        most = schema.get("max_length")
        found |= {"maxProperties": most} if most is not None else {}
        found |= {"minProperties": least} if least else {}
        if least > 1 and "enum" not in self.resolve_ref_schema(names):
            found["minProperties"] = 1
            found = add_mark(found, "the number of different names")
        return found

    def _build_name_schema(self, keys: Json) -> Json:
        """Converts the schema of a dictionary's keys to a schema of JSON member names, which are
        always strings.
        """
        resolved = self.resolve_ref_schema(keys)
        if resolved.keys() & {"anyOf", "allOf"}:
            word = "anyOf" if "anyOf" in resolved else "allOf"
            options = [
                self._build_name_schema(each)
                for each in resolved[word]
                if each.get("type") != "null"
            ]
            return {**resolved, word: options}
        if "enum" in resolved or "const" in resolved:
            values = resolved.get("enum", [resolved.get("const")])
            texts = [
                each if isinstance(each, str) else json.dumps(each)
                for each in values
                if _is_member_name(each, resolved)
            ]
            if texts == values and "enum" in resolved:
                return keys
            return (
                {"enum": texts}
                if texts
                else self.handle_invalid_for_json_schema({"type": "any"}, "such keys")
            )
        match resolved.get("type"):
            case "string" | None:
                return keys
            case "integer":
                found: Json = {"type": "string", "pattern": "^(?:0|-?[1-9][0-9]{0,18})$"}
                usual = resolved == {"type": "integer"}
                return found if usual else add_mark(found, "the limits of names that are numbers")
            case "number":
                found = {"type": "string", "pattern": f"^{patterns.FLOAT}$"}
                usual = resolved == {"type": "number"}
                return found if usual else add_mark(found, "the limits of names that are numbers")
            case "boolean":
                return {"enum": ["true", "false"]}
        return self.handle_invalid_for_json_schema(
            {"type": "any"}, f"keys that are no scalars: {resolved}"
        )

    def tagged_union_schema(self, schema: CoreNode) -> Json:
        found: Json = super().tagged_union_schema(schema)
        options = {"anyOf": found["oneOf"]}  # the tag distinguishes them
        chosen = schema["discriminator"]
        return (
            add_mark(options, f"by the function {_function_name(chosen)}")
            if callable(chosen)
            else options
        )

    def literal_schema(self, schema: CoreNode) -> Json:
        values = [
            getattr(each, "value", each) if isinstance(each, Enum) else each
            for each in schema["expected"]
        ]
        if not all(isinstance(value, str | int | None) for value in values):
            self.handle_invalid_for_json_schema(
                schema, f"Literal{schema['expected']}, not all of which JSON has"
            )
        # A member of a plain Enum is only read from Python.
        read = [
            each
            for each in schema["expected"]
            if not isinstance(each, Enum) or isinstance(each, str | int)
        ]
        if not read:
            self.handle_invalid_for_json_schema(
                schema, f"Literal{schema['expected']}, whose members pydantic can't read"
            )
        return super().literal_schema({"type": "literal", "expected": read})

    def enum_schema(self, schema: CoreNode) -> Json:
        if not all(
            isinstance(member.value, str | int | float | bool | None)
            for member in schema["members"]
        ):
            self.handle_invalid_for_json_schema(
                schema, f"{schema['cls'].__name__}, whose values are no scalars"
            )
        return super().enum_schema(schema)

    def model_schema(self, schema: CoreNode) -> Json:
        found = _close_object(super().model_schema(schema))
        post_init = getattr(schema["cls"], schema.get("post_init") or "", None)
        if schema.get("custom_init"):
            return add_mark(found, f"by {schema['cls'].__name__}.__init__")
        own = post_init is not None and not post_init.__module__.startswith("pydantic.")
        return add_mark(found, f"by {_function_name(post_init)}") if own else found

    def dataclass_schema(self, schema: CoreNode) -> Json:
        found = _close_object(super().dataclass_schema(schema))
        if not schema.get("post_init"):
            return found
        return add_mark(found, f"by {schema['cls'].__name__}.__post_init__")

    def typed_dict_schema(self, schema: CoreNode) -> Json:
        return _close_object(super().typed_dict_schema(schema))

    def _named_required_fields_schema(self, named_required_fields: Any) -> Json:
        """Returns the schema of an object with fields. The value of each field is where pydantic
        looks for it: under the field's name, its alias, or nested at an alias path.
        """
        members: dict[Any, Any] = {}
        for name, required, field in named_required_fields:
            if field.get("init") is False:
                continue
            found = self.generate_inner(field).copy()
            path = _shortest_field_path(self._config, field, name)
            inside = members
            for step in path[:-1]:
                inside = inside.setdefault(step, {})
                if not isinstance(inside, dict):
                    self.handle_invalid_for_json_schema(
                        field, f"the field {name}: its alias path leads into a value"
                    )
            if path[-1] in inside or any(isinstance(step, int) and step < 0 for step in path):
                self.handle_invalid_for_json_schema(
                    field, f"the field {name}: its alias can't be written"
                )
            inside[path[-1]] = (self.handle_ref_overrides(found), required)
        found = _nested_schema(members)
        found.pop("additionalProperties")  # set by the schema of the class
        return found


def _nested_schema(members: dict[Any, Any]) -> Json:
    """Returns the schema of an object with members by name, or of an array with items by index.

    Args:
        members: for each name or index, a (schema, required) pair or nested members.
    """
    entries = {
        step: each if isinstance(each, tuple) else (_nested_schema(each), True)
        for step, each in members.items()
    }
    if members and all(isinstance(step, int) for step in members):
        items = [entries.get(i, ({"type": "null"}, False)) for i in range(max(entries) + 1)]
        least = max((i + 1 for i, (_, required) in enumerate(items) if required), default=0)
        return {
            "type": "array",
            "prefixItems": [each for each, _ in items],
            "items": False,
            "minItems": least,
        }
    found: Json = {
        "type": "object",
        "properties": {str(name): each for name, (each, _) in entries.items()},
    }
    required = [str(name) for name, (_, needed) in entries.items() if needed]
    return {**found, **({"required": required} if required else {}), "additionalProperties": False}


def _is_from_pydantic(function: Any) -> bool:
    function = function.func if isinstance(function, partial) else function
    return function in (Counter, OrderedDict) or str(
        getattr(function, "__module__", "")
    ).startswith("pydantic.")


def _function_name(function: Any) -> str:
    function = function.func if isinstance(function, partial) else function
    name: str = getattr(function, "__qualname__", None) or repr(function)
    return name.rpartition("<locals>.")[2]


def _is_member_name(value: Any, resolved: Json) -> bool:
    return isinstance(value, str) or ("const" not in resolved and resolved.get("type") == "integer")


def _close_object(found: Json) -> Json:
    if found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def _shortest_field_path(config: Any, field: Any, name: str) -> list[str | int]:
    """Returns the shortest path to the value of a field in the JSON."""
    by_name = getattr(config, "validate_by_name", None) or config.populate_by_name
    alias = field.get("validation_alias")
    if alias is None or getattr(config, "validate_by_alias", None) is False:
        return [name]
    if isinstance(alias, str):
        return [alias]
    paths: list[list[str | int]] = alias if isinstance(alias[0], list) else [alias]
    plain = next((path for path in paths if len(path) == 1), None)
    return plain or ([name] if by_name else paths[0])
