"""JSON schemas of Python types that express all that pydantic requires of a value's JSON, as far as a schema can.

They are generated from pydantic's core schema, because pydantic's own JSON schema omits much of it. Requirements that
no schema expresses, such as a validator function, are listed with their reason; they are checked when a text is read.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from pydantic import PydanticUserError, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from sglang_lite.constraints.json_schema.document import subschemas
from sglang_lite.constraints.python_types import patterns as patterns
from sglang_lite.protocol import ConstraintError
from sglang_lite.protocol.anything import UserValue

Json = dict[str, Any]
CoreNode: TypeAlias = Any  # one of about fifty TypedDicts of pydantic, distinguished by "type"

# Marks inside generated schemas, removed again by _without_marks, which collects their pointers.
_NOT_EXPRESSED = "x-checked-when-read"
_SET = "x-set"
_ASCII_ONLY = r"^[\u0000-\u007F]*$"
_STRIPPED = r"^(?:[^\s\u0085]|[^\s\u0085][\s\S]*[^\s\u0085])?$"
_HANDFUL = 8  # maximum number of enum values for which a grammar enforces distinct items
_NO_VALUE: Json = {"not": {}}
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


@dataclass(frozen=True, slots=True)
class SchemaOfType:
    """JSON schema of a type.

    Attributes:
        schema: JSON schema as a dict.
        not_expressed: requirements that the schema does not express, as (JSON Pointer into it, reason).
        sets: JSON Pointers of arrays that spell sets, whose items a grammar need not keep distinct.
    """

    schema: Json
    not_expressed: tuple[tuple[str, str], ...]
    sets: tuple[str, ...]


def schema_of(adapter: TypeAdapter[UserValue], name: str) -> SchemaOfType:
    """JSON schema of a type.

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
    return _without_marks(schema)


def schemas_of(adapters: Sequence[tuple[str, TypeAdapter[UserValue]]]) -> tuple[dict[str, Json], Json]:
    """JSON schemas of several types by name, and the definitions (`$defs`) that they share.

    Raises:
        ConstraintError: values of one of the types can't be read from JSON.
    """
    inputs = [(name, "validation", adapter) for name, adapter in adapters]
    try:
        found, shared = TypeAdapter.json_schemas(inputs, schema_generator=TypeSchema)  # type: ignore[arg-type] # a list's type is invariant
    except PydanticUserError as error:
        raise ConstraintError(f"type: no JSON schema: {error.message}.") from error
    by_name = {name: _without_marks(schema).schema for (name, _), schema in found.items()}
    return {str(name): schema for name, schema in by_name.items()}, _without_marks(shared).schema


def _without_marks(schema: Json) -> SchemaOfType:
    """Schema without the internal marks, and the pointers of the marks."""
    not_expressed: list[tuple[str, str]] = []
    sets: list[str] = []
    queue = [("", schema)]
    for pointer, each in queue:
        if isinstance(each, dict):
            if _NOT_EXPRESSED in each:
                not_expressed.append((pointer, each.pop(_NOT_EXPRESSED)))
                if len(each.get("allOf", ())) == 1 and not each["allOf"][0].keys() & each.keys():
                    each.update(each.pop("allOf")[0])  # undo the wrapper that _marked puts around alternatives
            if each.pop(_SET, False):
                sets.append(pointer)
            queue += [(pointer + steps, below) for steps, below in subschemas(each)]
    reference = schema.get("$ref", "")
    if (
        not_expressed and not_expressed[0][0] == "" and schema.keys() == {"$ref", "$defs"}
    ):  # a $ref to the marked definition
        name = reference.removeprefix("#/$defs/")
        schema = {**schema["$defs"][name], "$defs": schema["$defs"]}
        sets += [each.removeprefix(f"/$defs/{name}") for each in sets if each.startswith(f"/$defs/{name}/")]
    return SchemaOfType(schema, tuple(not_expressed), tuple(sets))


class TypeSchema(GenerateJsonSchema):
    """Pydantic's generator of JSON schemas, made exact. Objects are closed unless their type has `extra="allow"`."""

    def generate_inner(self, schema: CoreNode) -> Json:
        found: Json = super().generate_inner(schema)
        pattern = patterns.FORMATS.get(found.get("format", "")) if found.get("type") == "string" else None
        if pattern is not None:
            found = {"type": "string", "pattern": f"^{pattern}$"}
        kind = schema["type"]
        if kind.startswith("function-"):
            function = schema["function"]["function"]
            name = _name_of(function)
            if _is_pydantic(function) and name in _SOUND:
                found = _SOUND[name] or found
            else:
                found = _marked(found, f"by the function {name}")
        elif kind == "chain" and len(schema["steps"]) > 1:
            found = _marked(found, "by the later steps of its validation")
        elif kind in ("is-instance", "is-subclass", "callable"):  # with a JSON schema supplied by the user
            found = _marked(found, f"by its {kind} schema, which takes no JSON")
        return found

    def is_subclass_schema(self, schema: CoreNode) -> Json:
        return self.handle_invalid_for_json_schema(schema, f"classes below {schema['cls'].__name__}")

    # --------------------------------------------------------------------------------------------- numbers

    def decimal_schema(self, schema: CoreNode) -> Json:
        low, low_open = _tighter(schema.get("ge"), schema.get("gt"), max)
        high, high_open = _tighter(schema.get("le"), schema.get("lt"), min)
        options = []
        for before, after in _decimals(schema.get("max_digits"), schema.get("decimal_places")):
            most = 10**before
            option: Json = {"type": "number", "multipleOf": float(Decimal(1).scaleb(-after)) if after else 1}
            least_open, most_open = low is None or low < -most or low_open, high is None or high > most or high_open
            option["exclusiveMinimum" if least_open else "minimum"] = _number(-most if low is None else max(low, -most))
            option["exclusiveMaximum" if most_open else "maximum"] = _number(most if high is None else min(high, most))
            if before == 0:  # the digit before the point of 0 counts
                option["not"] = {"const": 0}
            options.append(option)
        found = options[0] if len(options) == 1 else {"anyOf": options}
        step = schema.get("multiple_of")
        return found if step is None else {"allOf": [found, {"multipleOf": _number(step)}]}

    def fraction_schema(self, schema: CoreNode) -> Json:
        bounds = {name: float(schema[name]) for name in ("ge", "gt", "le", "lt") if schema.get(name) is not None}
        if bounds:
            return self.float_schema({"type": "float", **bounds})  # type: ignore[typeddict-item] # only known names
        return {"type": "string", "format": "fraction"}

    def complex_schema(self, schema: CoreNode) -> Json:
        return {"type": "string", "pattern": f"^{patterns.COMPLEX}$"}

    # --------------------------------------------------------------------------------------------- strings

    def str_schema(self, schema: CoreNode) -> Json:
        found: Json = super().str_schema(schema)
        config = self._config
        for keyword, limit in (("minLength", config.str_min_length), ("maxLength", config.str_max_length)):
            if limit:
                found.setdefault(keyword, limit)
        more = [_STRIPPED] if schema.get("strip_whitespace", config.str_strip_whitespace) else []
        more += [_ASCII_ONLY] if schema.get("ascii_only") else []
        return _all_patterns(found, more)

    def bytes_schema(self, schema: CoreNode) -> Json:
        limits = {"minLength": schema.get("min_length"), "maxLength": schema.get("max_length")}
        given_limits = {keyword: value for keyword, value in limits.items() if value is not None}
        coded = getattr(self._config, "val_json_bytes", "utf8")
        if coded == "utf8":  # lengths count bytes: each ASCII character is one byte
            return {"type": "string", **given_limits, **({"pattern": _ASCII_ONLY} if given_limits else {})}
        pattern = patterns.FORMATS["base64url"] if coded == "base64" else "(?:[0-9a-f]{2})*"
        found: Json = {"type": "string", "pattern": f"^{pattern}$"}
        return _marked(found, "the length of the decoded bytes") if given_limits else found

    def uuid_schema(self, schema: CoreNode) -> Json:
        version = schema.get("version")
        return {"type": "string", "format": f"uuid{version}" if version else "uuid"}

    def url_schema(self, schema: CoreNode) -> Json:
        return self._url(schema, hosts=False)

    def multi_host_url_schema(self, schema: CoreNode) -> Json:
        return self._url(schema, hosts=True)

    def _url(self, schema: CoreNode, *, hosts: bool) -> Json:
        found = [
            {"type": "string", "pattern": pattern} if longest is None else
            {"type": "string", "pattern": pattern, "maxLength": longest}
            for pattern, longest in patterns.urls(schema.get("allowed_schemes"), schema.get("max_length"), hosts=hosts)
        ]  # fmt: skip
        return found[0] if len(found) == 1 else {"anyOf": found}

    def json_schema(self, schema: CoreNode) -> Json:
        return _marked({"type": "string"}, "that the string is JSON")

    # -------------------------------------------------------------------------------------- dates and times

    def date_schema(self, schema: CoreNode) -> Json:
        low, high, today = schema.get("ge"), schema.get("le"), datetime.date.today()
        day = datetime.timedelta(days=1)
        now = schema.get("now_op")
        lows = [low, schema["gt"] + day if schema.get("gt") else None, today + day if now == "future" else None]
        highs = [high, schema["lt"] - day if schema.get("lt") else None, today - day if now == "past" else None]
        low = max((each for each in lows if each is not None), default=None)
        high = min((each for each in highs if each is not None), default=None)
        found: Json = {"type": "string", "format": "date"}
        if low is not None or high is not None:
            pattern = patterns.dates(low, high)
            found = {**found, "pattern": pattern} if pattern else _NO_VALUE
        return _marked(found, "that it is before or after the day of the check") if now else found

    def datetime_schema(self, schema: CoreNode) -> Json:
        zone = schema.get("tz_constraint")
        aware_only = zone == "aware" or isinstance(zone, int)
        found: Json = {"type": "string", "pattern": patterns.moments(day=True, naive=True, aware=zone != "naive")}
        if aware_only:  # the format allows leap seconds, Python does not
            found = {"type": "string", "format": "date-time", "pattern": "^.{17}[0-5]"}
        if isinstance(zone, int):
            found = _marked(found, f"that the offset is {zone} seconds")
        return self._bounded(found, schema, naive=zone == "naive")

    def time_schema(self, schema: CoreNode) -> Json:
        zone = schema.get("tz_constraint")
        found: Json = {
            "type": "string",
            "pattern": patterns.moments(day=False, naive=zone != "aware", aware=zone != "naive"),
        }
        return self._bounded(found, schema, naive=zone == "naive")

    def _bounded(self, found: Json, schema: CoreNode, *, naive: bool) -> Json:
        """Schema of moments within their limits. Limits in other time zones are enforced to the day only."""
        now = datetime.datetime.now()
        limits = [(schema.get(name), name[0] == "g", name[1] == "t") for name in ("ge", "gt", "le", "lt")]
        if schema.get("now_op"):
            limits.append((now, schema["now_op"] == "future", False))
        more: list[str] = []
        for bound, up, is_open in limits:
            if bound is None:
                continue
            if bound is now or (bound.tzinfo is not None and not naive):
                found = _marked(found, "that it is before or after now" if bound is now else "limits in other zones")
                if isinstance(bound, datetime.time) or bound.year in (datetime.MINYEAR, datetime.MAXYEAR):
                    continue
                bound += datetime.timedelta(days=-1 if up else 1)
            pattern = patterns.moments_beyond(bound, up=up, is_open=is_open)
            if pattern is None:
                return _NO_VALUE
            more.append(pattern)
        return _all_patterns(found, more)

    def timedelta_schema(self, schema: CoreNode) -> Json:
        found: Json = {"type": "string", "pattern": f"^{patterns.DURATION}$"}
        bounded = any(schema.get(name) is not None for name in ("ge", "gt", "le", "lt"))
        return _marked(found, "the limits of durations") if bounded else found

    # ------------------------------------------------------------------------------------ arrays and objects

    def set_schema(self, schema: CoreNode) -> Json:
        """Schema of a set. An item may be written twice if neither the grammar nor the masks can prevent it."""
        items = self.generate_inner(schema["items_schema"]) if "items_schema" in schema else {}
        least, most = schema.get("min_length", 0), schema.get("max_length")
        found: Json = {"type": "array", "items": items}
        found |= {"minItems": least} if least else {}
        found |= {"maxItems": most} if most is not None else {}
        item_schema = self.resolve_ref_schema(items)
        if not item_schema:
            found["items"] = {"type": _SCALARS}
        elif item_schema.get("type") in ("array", "object"):
            found = _marked(found, "that items are hashable")
        if item_schema.get("type") == "boolean" or len(item_schema.get("enum", range(_HANDFUL + 1))) <= _HANDFUL:
            found["uniqueItems"] = True
            return found
        if least > 1:
            found = _marked(found, "the number of different items")
        return {**found, _SET: True}

    frozenset_schema = set_schema

    def dict_schema(self, schema: CoreNode) -> Json:
        return self._common_dict_schema(schema)

    def _common_dict_schema(self, schema: CoreNode) -> Json:
        keys = schema.get("keys_schema", {"type": "any"})
        if keys["type"] == "decimal" and keys.keys() <= {"type", "metadata"}:
            keys = {"type": "float"}  # as member names, both look the same
        if keys["type"] == "literal":  # no text of a name is read as a number
            texts = [each for each in keys["expected"] if not isinstance(each, int) or isinstance(each, bool)]
            if not texts:
                self.handle_invalid_for_json_schema(
                    schema, f"keys of Literal{keys['expected']}, which no name is read as"
                )
            keys = {**keys, "expected": texts}
        names = self._names(self.generate_inner(keys))
        values = self.generate_inner(schema["values_schema"]).copy() if "values_schema" in schema else {}
        if schema["type"] == "counter":
            values = self.generate_inner({"type": "int"})
        values.pop("title", None)
        found: Json = {"type": "object", "additionalProperties": values or True}
        if names.keys() - {"type", "title"}:
            found["propertyNames"] = names
        least, most = schema.get("min_length", 0), schema.get("max_length")
        found |= {"maxProperties": most} if most is not None else {}
        found |= {"minProperties": least} if least else {}
        if least > 1 and "enum" not in self.resolve_ref_schema(names):
            found["minProperties"] = 1
            found = _marked(found, "the number of different names")
        return found

    def _names(self, keys: Json) -> Json:
        """Schema of the member names that are read as keys."""
        resolved = self.resolve_ref_schema(keys)
        if resolved.keys() & {"anyOf", "allOf"}:
            word = "anyOf" if "anyOf" in resolved else "allOf"
            options = [self._names(each) for each in resolved[word] if each.get("type") != "null"]
            return {**resolved, word: options}
        if "enum" in resolved or "const" in resolved:
            values = resolved.get("enum", [resolved.get("const")])
            texts = [each if isinstance(each, str) else json.dumps(each) for each in values if _is_name(each, resolved)]
            if texts == values and "enum" in resolved:
                return keys
            return {"enum": texts} if texts else self.handle_invalid_for_json_schema({"type": "any"}, "such keys")
        match resolved.get("type"):
            case "string" | None:
                return keys
            case "integer":
                found: Json = {"type": "string", "pattern": "^(?:0|-?[1-9][0-9]{0,18})$"}
                usual = resolved == {"type": "integer"}
                return found if usual else _marked(found, "the limits of names that are numbers")
            case "number":
                found = {"type": "string", "pattern": f"^{patterns.FLOAT}$"}
                usual = resolved == {"type": "number"}
                return found if usual else _marked(found, "the limits of names that are numbers")
            case "boolean":
                return {"enum": ["true", "false"]}
        return self.handle_invalid_for_json_schema({"type": "any"}, f"keys that are no scalars: {resolved}")

    def tagged_union_schema(self, schema: CoreNode) -> Json:
        found: Json = super().tagged_union_schema(schema)
        options = {"anyOf": found["oneOf"]}  # the tag distinguishes them
        chosen = schema["discriminator"]
        return _marked(options, f"by the function {_name_of(chosen)}") if callable(chosen) else options

    def literal_schema(self, schema: CoreNode) -> Json:
        values = [getattr(each, "value", each) if isinstance(each, Enum) else each for each in schema["expected"]]
        if not all(isinstance(value, str | int | None) for value in values):
            self.handle_invalid_for_json_schema(schema, f"Literal{schema['expected']}, not all of which JSON has")
        # A member of a plain Enum is read from Python alone.
        read = [each for each in schema["expected"] if not isinstance(each, Enum) or isinstance(each, str | int)]
        if not read:
            self.handle_invalid_for_json_schema(
                schema, f"Literal{schema['expected']}, whose members pydantic can't read"
            )
        return super().literal_schema({"type": "literal", "expected": read})

    def enum_schema(self, schema: CoreNode) -> Json:
        if not all(isinstance(member.value, str | int | float | bool | None) for member in schema["members"]):
            self.handle_invalid_for_json_schema(schema, f"{schema['cls'].__name__}, whose values are no scalars")
        return super().enum_schema(schema)

    def model_schema(self, schema: CoreNode) -> Json:
        found = self._closed(super().model_schema(schema))
        post_init = getattr(schema["cls"], schema.get("post_init") or "", None)
        if schema.get("custom_init"):
            return _marked(found, f"by {schema['cls'].__name__}.__init__")
        own = post_init is not None and not post_init.__module__.startswith("pydantic.")
        return _marked(found, f"by {_name_of(post_init)}") if own else found

    def dataclass_schema(self, schema: CoreNode) -> Json:
        found = self._closed(super().dataclass_schema(schema))
        if not schema.get("post_init"):
            return found
        return _marked(found, f"by {schema['cls'].__name__}.__post_init__")

    def typed_dict_schema(self, schema: CoreNode) -> Json:
        return self._closed(super().typed_dict_schema(schema))

    def _closed(self, found: Json) -> Json:
        if found.get("type") == "object":
            found.setdefault("additionalProperties", False)
        return found

    def _named_required_fields_schema(self, named_required_fields: Any) -> Json:
        """Schema of an object with each field's value at the place where pydantic looks for it: under its name, its
        alias, or nested at an alias path.
        """
        members: dict[Any, Any] = {}
        for name, required, field in named_required_fields:
            if field.get("init") is False:
                continue
            found = self.generate_inner(field).copy()
            path = self._path(field, name)
            inside = members
            for step in path[:-1]:
                inside = inside.setdefault(step, {})
                if not isinstance(inside, dict):
                    self.handle_invalid_for_json_schema(field, f"the field {name}: its alias path leads into a value")
            if path[-1] in inside or any(isinstance(step, int) and step < 0 for step in path):
                self.handle_invalid_for_json_schema(field, f"the field {name}: its alias can't be written")
            inside[path[-1]] = (self.handle_ref_overrides(found), required)
        found = _nested(members)
        found.pop("additionalProperties")  # set by the schema of the class
        return found

    def _path(self, field: Any, name: str) -> list[str | int]:
        """Shortest path to the value of a field in the JSON."""
        config = self._config
        by_name = getattr(config, "validate_by_name", None) or config.populate_by_name
        alias = field.get("validation_alias")
        if alias is None or getattr(config, "validate_by_alias", None) is False:
            return [name]
        if isinstance(alias, str):
            return [alias]
        paths: list[list[str | int]] = alias if isinstance(alias[0], list) else [alias]
        plain = next((path for path in paths if len(path) == 1), None)
        return plain or ([name] if by_name else paths[0])


def _nested(members: dict[Any, Any]) -> Json:
    """Schema of an object with members by name, or of an array with items by index.

    Args:
        members: for each name or index, a (schema, required) pair or nested members.
    """
    entries = {step: each if isinstance(each, tuple) else (_nested(each), True) for step, each in members.items()}
    if members and all(isinstance(step, int) for step in members):
        items = [entries.get(i, ({"type": "null"}, False)) for i in range(max(entries) + 1)]
        least = max((i + 1 for i, (_, required) in enumerate(items) if required), default=0)
        return {"type": "array", "prefixItems": [each for each, _ in items], "items": False, "minItems": least}
    found: Json = {"type": "object", "properties": {str(name): each for name, (each, _) in entries.items()}}
    required = [str(name) for name, (_, needed) in entries.items() if needed]
    return {**found, **({"required": required} if required else {}), "additionalProperties": False}


def _marked(found: Json, why: str) -> Json:
    if _NOT_EXPRESSED in found:
        return {**found, _NOT_EXPRESSED: f"{found[_NOT_EXPRESSED]}; {why}"}
    return {"allOf": [found], _NOT_EXPRESSED: why} if "anyOf" in found else {**found, _NOT_EXPRESSED: why}


def _all_patterns(found: Json, more: list[str]) -> Json:
    if not more:
        return found
    if "pattern" not in found and len(more) == 1:
        return {**found, "pattern": more[0]}
    return {**found, "allOf": [{"pattern": pattern} for pattern in more]}


def _is_pydantic(function: Any) -> bool:
    function = function.func if isinstance(function, partial) else function
    return function in (Counter, OrderedDict) or str(getattr(function, "__module__", "")).startswith("pydantic.")


def _name_of(function: Any) -> str:
    function = function.func if isinstance(function, partial) else function
    name: str = getattr(function, "__qualname__", None) or repr(function)
    return name.rpartition("<locals>.")[2]


def _is_name(value: Any, resolved: Json) -> bool:
    return isinstance(value, str) or ("const" not in resolved and resolved.get("type") == "integer")


def _tighter(closed: Any, open_: Any, tighter: Callable[[Any, Any], Any]) -> tuple[Any, bool]:
    """Tighter of two bounds, and whether the bound is open."""
    if closed is None or open_ is None:
        return (open_, True) if closed is None else (closed, False)
    return tighter(closed, open_), tighter(closed, open_) == open_


def _decimals(digits: int | None, places: int | None) -> Iterator[tuple[int, int]]:
    """Yields pairs of the maximum number of digits before and after the point."""
    most = min(digits or patterns.NUMBER_DIGITS, patterns.NUMBER_DIGITS)
    before_all = max(0, digits - places) if digits is not None and places is not None else most
    last = min(most, patterns.NUMBER_DIGITS if places is None else places)
    for after in range(last + 1):
        before = min(before_all, most - after)
        if after == last or before != min(before_all, most - after - 1):
            yield before, after


def _number(value: Any) -> int | float:
    return int(value) if value == int(value) else float(value)
