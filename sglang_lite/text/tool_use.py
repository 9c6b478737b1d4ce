"""Tool calls written as one JSON object, and their results written as the text of a turn.

The object is `{"tool": name, "arguments": {…}}` for one call, `{"calls": [{…}, {…}]}` for several,
or `{"answer": text}`. Its schema carries a mark, so a provider with its own tool protocol can be
asked for calls instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Constraint, JsonSchema
from sglang_lite.protocol.anything import Json

_MARK = "calls of tools"
_UNCALLED = "tools that are not called"
_RESULT = "Result of {}: "
_DEFINITIONS = "#/$defs/"
_REFERENCE = re.compile(f'"{re.escape(_DEFINITIONS)}([^"/]+)')


ToolChoice: TypeAlias = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class Function:
    """Function that a model may call.

    Attributes:
        parameters: JSON Schema of the arguments object.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a generation.

    Attributes:
        choice: "auto"; "required" if a tool must be called; "none" if none may be called.
        parallel: True if several calls may be made in one turn.
    """

    functions: tuple[Function, ...]
    choice: ToolChoice
    parallel: bool = False


def tool_use_schema(
    functions: Sequence[Function],
    shared: Mapping[str, Json],
    *,
    choice: ToolChoice,
    parallel: bool = False,
    once: bool = False,
) -> JsonSchema:
    """Returns the schema of a call or an answer. If calls are not allowed, it also has the
    functions, among its definitions.

    Args:
        functions: functions that may be called.
        shared: definitions that the parameters refer to.
        choice: whether a function must or may be called, as in `ToolUse`.
        parallel: whether to allow several calls, as a list.
        once: whether a list has exactly one call.
    """
    options = [
        {
            "description": each.description,
            **_exact_object_schema(tool={"const": each.name}, arguments=each.parameters),
        }
        for each in functions
    ]
    if parallel:
        most = {"maxItems": 1} if once else {}
        options = [
            _exact_object_schema(
                calls={"type": "array", "items": {"anyOf": options}, "minItems": 1, **most}
            )
        ]
    answer = _exact_object_schema(answer={"type": "string"})
    if choice == "none":
        uncalled = {**shared.get("$defs", {}), _UNCALLED: {"anyOf": options}}
        return json_schema({"$comment": _MARK, "anyOf": [answer], **shared, "$defs": uncalled})
    if choice == "auto":
        options.append(answer)
    return json_schema({"$comment": _MARK, "anyOf": options, **shared})


@lru_cache(maxsize=256)
def tool_use_from_constraint(constraint: Constraint | None) -> ToolUse | None:
    """Returns the tools in a constraint made by `tool_use_schema`, or None for any other
    constraint.
    """
    if not isinstance(constraint, JsonSchema) or _MARK not in constraint.schema:
        return None
    schema = json.loads(constraint.schema)
    if not isinstance(schema, dict) or schema.get("$comment") != _MARK:
        return None
    shared = {key: value for key, value in schema.items() if key not in ("$comment", "anyOf")}
    written = schema["anyOf"]
    choice: ToolChoice = (
        "auto" if any("answer" in option["properties"] for option in written) else "required"
    )
    if _UNCALLED in shared.get("$defs", {}):
        choice = "none"
        definitions = dict(shared["$defs"])
        written = definitions.pop(_UNCALLED)["anyOf"]
        shared["$defs"] = definitions
    first = written[0]["properties"]
    parallel = "calls" in first
    options = first["calls"]["items"]["anyOf"] if parallel else written
    calls = [option for option in options if "tool" in option["properties"]]
    functions = tuple(
        Function(
            option["properties"]["tool"]["const"],
            option["description"],
            arguments_schema(option["properties"]["arguments"], shared),
        )
        for option in calls
    )
    return ToolUse(functions, choice, parallel)


def arguments_schema(parameters: Mapping[str, Json], shared: Mapping[str, Json]) -> dict[str, Json]:
    """Returns a function's parameters as a self-contained object schema, as providers require.
    Includes the definitions that it uses.
    """
    if "$id" in parameters:  # its references point into itself
        return {key: value for key, value in parameters.items() if key != "$id"}
    definitions = shared.get("$defs", {})
    name = str(parameters.get("$ref", "")).removeprefix(_DEFINITIONS)
    root = definitions.get(name, parameters)
    used: dict[str, Json] = {}
    referring = [root]
    while referring:
        for each in _REFERENCE.findall(json.dumps(referring.pop())):
            if each in definitions and each not in used:
                used[each] = definitions[each]
                referring.append(used[each])
    others = (
        {key: value for key, value in shared.items() if key != "$defs"}
        if root is parameters
        else {}
    )
    return {**root, **others, **({"$defs": used} if used else {})}


def call_as_json(name: str, arguments: str) -> str:
    """Returns the JSON text of a call. `arguments` is JSON text; invalid text is inserted
    unchanged, so that the reader reports it.
    """
    return f'{{"tool": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments.strip() or "{}"}}}'


def calls_as_json(calls: Sequence[tuple[str, str]]) -> str:
    """Returns the JSON text of several calls, given as (name, arguments) as in `call_as_json`."""
    return f'{{"calls": [{", ".join(call_as_json(name, arguments) for name, arguments in calls)}]}}'


def result_text(name: str, result: str) -> str:
    """Returns text that shows the model the result of a call."""
    return _RESULT.format(name) + result


def split_call_results(names: Sequence[str], text: str | Json) -> list[str | Json]:
    """Returns the results of calls in a user's turn, in the order of the calls.

    Splits text that lists the results one after another, each as written by `result_text`, and
    drops the labels. For any other content, each call's result is the whole content.

    Args:
        names: names of the tools that were called.
        text: content of the turn.
    """
    if not isinstance(text, str):
        return [text] * len(names)
    marks = [_RESULT.format(name) for name in names]
    starts = list[int]()
    for mark in marks:
        at = text.find("\n" + mark, starts[-1]) + 1 if starts else text.find(mark)
        if at < 0 or (starts and not at) or (not starts and text[:at].strip()):
            return [text] * len(names)
        starts.append(at)
    ends = [*(start - 1 for start in starts[1:]), len(text)]
    return [text[start + len(mark) : end] for mark, start, end in zip(marks, starts, ends)]


def answer_as_json(text: str) -> str:
    """Returns the JSON text of an answer without a call."""
    return json.dumps({"answer": text}, ensure_ascii=False)


def _exact_object_schema(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
