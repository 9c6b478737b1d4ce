"""Calls of tools as one JSON object: `{"tool": name, "arguments": {…}}`, several as `{"calls": [{…}, {…}]}`, or
`{"answer": text}`. The schema of such texts carries a mark, so that a provider with tools of its own can be asked for
calls instead. And results of calls as text of a turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Constraint, JsonSchema
from sglang_lite.protocol.anything import Json

_MARK = "calls of tools"
_RESULT = "Result of {}: "


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call.

    Attributes:
        parameters: JSON Schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a generation.

    Attributes:
        required: one of them is called, else there may be an answer instead.
        parallel: several calls may come at once.
    """

    functions: tuple[Function, ...]
    required: bool
    parallel: bool = False


def tool_use_schema(
    functions: Sequence[Function], shared: Mapping[str, Json], *, required: bool, parallel: bool = False
) -> JsonSchema:
    """The schema of a call or an answer.

    Args:
        shared: definitions that the parameters refer to.
        parallel: of several calls, in a list.
    """
    options = [
        {"description": each.description, **_exactly(tool={"const": each.name}, arguments=each.parameters)}
        for each in functions
    ]
    if parallel:
        options = [_exactly(calls={"type": "array", "items": {"anyOf": options}, "minItems": 1})]
    if not required:
        options.append(_exactly(answer={"type": "string"}))
    return json_schema({"$comment": _MARK, "anyOf": options, **shared})


@lru_cache(maxsize=256)
def tool_use_of(constraint: Constraint | None) -> ToolUse | None:
    """The tools that a constraint was made of by `tool_use_schema`; None: it was not."""
    if not isinstance(constraint, JsonSchema) or _MARK not in constraint.schema:
        return None
    schema = json.loads(constraint.schema)
    if not isinstance(schema, dict) or schema.get("$comment") != _MARK:
        return None
    shared = {key: value for key, value in schema.items() if key not in ("$comment", "anyOf")}
    first = schema["anyOf"][0]["properties"]
    parallel, required = "calls" in first, all("answer" not in option["properties"] for option in schema["anyOf"])
    options = first["calls"]["items"]["anyOf"] if parallel else schema["anyOf"]
    calls = [option for option in options if "tool" in option["properties"]]
    functions = tuple(
        Function(
            option["properties"]["tool"]["const"],
            option["description"],
            _object(option["properties"]["arguments"], shared),
        )
        for option in calls
    )
    return ToolUse(functions, required, parallel)


def _object(parameters: dict[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as the schema of an object, which a provider wants to see at the root; with what it refers to."""
    definitions = shared.get("$defs", {})
    name = str(parameters.get("$ref", "")).removeprefix("#/$defs/")
    if name not in definitions:
        return {**parameters, **shared}
    used = json.dumps(definitions)
    others = {other: schema for other, schema in definitions.items() if other != name or f'"#/$defs/{name}"' in used}
    return {**definitions[name], **({"$defs": others} if others else {})}


def call_object(name: str, arguments: str) -> str:
    """The text of a call. `arguments`: JSON text, kept as it is where it is none, so that its reader says so."""
    return f'{{"tool": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments.strip() or "{}"}}}'


def calls_object(calls: Sequence[tuple[str, str]]) -> str:
    """The text of several calls, of each its name and arguments as `call_object` takes them."""
    return f'{{"calls": [{", ".join(call_object(name, arguments) for name, arguments in calls)}]}}'


def result_text(name: str, result: str) -> str:
    """The text that tells a model the result of a call."""
    return _RESULT.format(name) + result


def results_of(names: Sequence[str], text: str | Json) -> list[str | Json]:
    """The results of calls in a user's turn, in the order of the calls. Of content that is no text, or does not tell
    them one after another, as `result_text` does, each call has all.

    Args:
        names: of the tools that were called.
    """
    if not isinstance(text, str):
        return [text] * len(names)
    starts = list[int]()
    for name in names:
        mark = _RESULT.format(name)
        at = text.find("\n" + mark, starts[-1]) + 1 if starts else text.find(mark)
        if at < 0 or (starts and not at) or (not starts and text[:at].strip()):
            return [text] * len(names)
        starts.append(at)
    return [text[start:end].rstrip("\n") for start, end in zip(starts, [*starts[1:], len(text)])]


def answer_object(text: str) -> str:
    """The text of an answer without a call."""
    return json.dumps({"answer": text}, ensure_ascii=False)


def _exactly(**properties: Any) -> dict[str, Any]:
    """The schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
