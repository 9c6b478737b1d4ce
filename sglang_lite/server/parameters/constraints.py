"""Constraints as requests express them: OpenAI's `response_format`, and fields of SGLang and vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sglang_lite.constraints import structural_tag
from sglang_lite.constraints.json_schema.style import read_json_style
from sglang_lite.constraints.schema import client_schema, json_schema
from sglang_lite.protocol import Choices, Constraint, Ebnf, Lark, ParameterError, Regex
from sglang_lite.protocol.anything import Json

_JSON_OBJECT = {"type": "object"}
# Members of a `response_format` besides its type. llama.cpp and Together write a schema without a
# name.
_MEMBERS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}


def require_single_constraint(**given: Constraint | None) -> Constraint | None:
    """Returns the only constraint of a request, or None if it has none. Raises ParameterError if
    the request has two.
    """
    found = {name: constraint for name, constraint in given.items() if constraint is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise ParameterError(second, f"and {first} are both given. Give one of them.")
    return next(iter(found.values()), None)


def response_format(
    format: Mapping[str, Json] | None, name: str = "response_format"
) -> Constraint | None:
    """Returns the constraint of a chat request's `response_format`.

    Raises:
        ParameterError: the format has an unknown type, or is incomplete.
        ConstraintError: the schema can't be enforced.
    """
    if format is None:
        return None
    kind = format.get("type")
    if isinstance(kind, str) and kind in _MEMBERS:
        _check_members(format, ("type", *_MEMBERS[kind]), name)
    if kind == "text":
        return None
    if kind == "json_object":
        found = format.get("schema")
        return json_schema(_JSON_OBJECT) if found is None else schema({"schema": found}, name)
    if kind == "json_schema":
        inner = format.get("json_schema")
        if not isinstance(inner, Mapping):
            hint = 'Write {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}.'
            raise ParameterError(f"{name}.json_schema", "is missing or not an object.", hint=hint)
        return schema(inner, f"{name}.json_schema")
    if kind == "structural_tag":
        return structural_tag.parse(json.dumps(format))
    raise ParameterError(
        f"{name}.type", f"{kind!r:.60} is not text, json_object, json_schema or structural_tag."
    )


def schema(inner: Mapping[str, Json], name: str) -> Constraint:
    """Returns the constraint of a schema in OpenAI's wrapper object: `name`, `description`,
    `schema`, `strict`.
    """
    _check_members(inner, ("type", "name", "description", "schema", "strict"), name)
    found = inner.get("schema")
    strict = inner.get("strict")
    if not isinstance(found, Mapping | bool):
        raise ParameterError(f"{name}.schema", "is missing or not a JSON Schema.")
    if strict is not None and not isinstance(strict, bool):
        raise ParameterError(f"{name}.strict", f"{strict!r:.60} is neither true nor false.")
    return client_schema(found, enforce="best_effort" if strict is False else "strict")


def _check_members(given: Mapping[str, Json], known: Sequence[str], name: str) -> None:
    """Raises ParameterError if a format has an unknown member."""
    for member, value in given.items():
        if member not in known and value is not None:
            listed = ", ".join(each for each in known if each != "type") or "type"
            hint = f"It has: {listed}."
            if member == "schema":
                hint = 'A schema is enforced by {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}.'
            raise ParameterError(
                f"{name}.{member[:60]}", "is not a field of the format.", hint=hint
            )


def structured_outputs(given: Mapping[str, Json] | None) -> Constraint | None:
    """Returns the constraint of vLLM's `structured_outputs`. Raises the errors of
    `response_format`.
    """
    if given is None:
        return None
    found = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    if len(found) != 1:
        raise ParameterError("structured_outputs", f"Give exactly one of {', '.join(_STRUCTURED)}.")
    ((name, value),) = found.items()
    if name not in _STRUCTURED:
        raise ParameterError(
            f"structured_outputs.{name[:60]}", f"is unknown. Use one of {', '.join(_STRUCTURED)}."
        )
    kinds, read = _STRUCTURED[name]
    if not isinstance(value, kinds):
        raise ParameterError(f"structured_outputs.{name}", f"{value!r:.60} has the wrong type.")
    return read(value)


def guided_schema(
    source: str | Mapping[str, Json] | None, whitespace: str | None
) -> Constraint | None:
    """Returns the constraint of vLLM's `guided_json`, or None if it is not given.

    Args:
        source: schema, or its JSON text.
        whitespace: `guided_whitespace_pattern`, a regex for the whitespace of the JSON.

    Raises:
        ParameterError: there is a pattern and no schema.
        ConstraintError: the schema can't be enforced, or the pattern is invalid.
    """
    if source is None:
        if whitespace is not None:
            raise ParameterError("guided_whitespace_pattern", "needs guided_json.")
        return None
    found = client_schema(source)
    if whitespace is None:
        return found
    found = msgspec.structs.replace(found, whitespace=whitespace)
    read_json_style(found)  # rejects an invalid pattern
    return found


def grammar(text: str) -> Constraint:
    """Returns the constraint of a grammar: in GBNF if the text has `::=`, otherwise in Lark's
    syntax.
    """
    return Ebnf(text) if "::=" in text else Lark(text)


_STRUCTURED: Mapping[str, tuple[Any, Callable[[Any], Constraint]]] = {
    "json": ((str, Mapping), client_schema),
    "regex": (str, Regex),
    "choice": (list, lambda options: Choices(tuple(options))),
    "grammar": (str, grammar),
    "structural_tag": (str, structural_tag.parse),
    "json_object": (bool, lambda _: json_schema(_JSON_OBJECT)),
}
