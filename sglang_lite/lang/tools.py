"""Tools: Python functions that a program lets the model call.

`gen(tools=[…])` makes the model write either a call, with arguments that fit the function's signature, or an answer.
`use_tools` goes round until there is an answer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang_lite.constraints.schema import json_schema
from sglang_lite.constraints.types import ValueType
from sglang_lite.protocol import Location, ParameterError, ProgramError, ValueValidationError


class ToolError(ProgramError):
    """A tool raised (the `__cause__`), or no answer came within the steps allowed."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wants.

    Attributes:
        name: of the function.
        arguments: by name, of the types that its signature names.
    """

    name: str
    arguments: dict[str, Any]
    _function: Callable[..., Any] = field(repr=False, compare=False)

    def run(self) -> Any:
        """Calls the function.

        Raises:
            ToolError: it raised.
        """
        try:
            return self._function(**self.arguments)
        except Exception as error:  # a tool may raise anything
            raise ToolError(f"the tool {self.name} raised {type(error).__name__}: {error}") from error


def tools_type(tools: Sequence[Callable[..., Any]]) -> ValueType:
    """What text spells a call of one of the tools, or an answer; values are ToolCall or str.

    Raises:
        ParameterError: no tools, two of one name, or a parameter without a type.
    """
    if not tools:
        raise ParameterError("tools", "the list is empty.")
    by_name: dict[str, tuple[Callable[..., Any], Any]] = {}
    options: list[dict[str, Any]] = []
    for tool in tools:
        name = getattr(tool, "__name__", "")
        if not callable(tool) or not name:
            raise ParameterError("tools", f"{tool!r} is not a named function.")
        if name in by_name:
            raise ParameterError("tools", f"two tools are called {name!r}.")
        adapter, schema = _arguments(tool)
        by_name[name] = tool, adapter
        call = {"tool": {"const": name}, "arguments": schema}
        options.append({"type": "object", "properties": call, "required": list(call), "additionalProperties": False})
    answer = {"answer": {"type": "string"}}
    options.append({"type": "object", "properties": answer, "required": ["answer"], "additionalProperties": False})
    return ValueType(None, json_schema({"anyOf": options}), partial(_read, by_name))


def describe(tools: Sequence[Callable[..., Any]]) -> str:
    """The tools as text for a prompt: name, signature and docstring of each, and how to call them."""
    lines = [
        f"- {t.__name__}{inspect.signature(t)}: {(inspect.getdoc(t) or 'no description').splitlines()[0]}"
        for t in tools
    ]
    return (
        "You can use these tools:\n" + "\n".join(lines) + "\n"
        'Write {"tool": name, "arguments": {…}} to use one, or {"answer": text} to answer.'
    )


def _arguments(tool: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    """A reader and a schema for a function's arguments."""
    from pydantic import TypeAdapter, create_model

    fields: dict[str, Any] = {}
    hints = inspect.get_annotations(tool, eval_str=True)
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ParameterError("tools", f"{tool.__name__}: the parameter {parameter} can't be given by name.")
        if parameter.name not in hints:
            raise ParameterError("tools", f"{tool.__name__}: the parameter {parameter.name} has no type.")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    model = create_model(f"{tool.__name__}_arguments", __config__={"extra": "forbid"}, **fields)
    schema: dict[str, Any] = model.model_json_schema()
    return TypeAdapter(model), schema


def _read(by_name: dict[str, tuple[Callable[..., Any], Any]], text: str) -> ToolCall | str:
    from pydantic import ValidationError

    try:
        value = json.loads(text)
        if "answer" in value:
            return str(value["answer"])
        tool, adapter = by_name[value["tool"]]
        arguments = adapter.validate_python(value["arguments"])
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ValueValidationError(f"the text is no call of a tool and no answer: {error}", text=text) from error
    return ToolCall(value["tool"], {name: getattr(arguments, name) for name in type(arguments).model_fields}, tool)


def use_tools(
    s: Any,
    tools: Sequence[Callable[..., Any]],
    name: str = "answer",
    *,
    max_steps: int = 8,
    **options: Any,
) -> str:
    """Lets the model use tools until it answers: assistant turns with calls, user turns with their results.

    Args:
        s: the state; its last turn should be the question. `describe(tools)` tells the model what there is.
        tools: functions whose parameters have types; docstrings help the model.
        name: of the variable that gets the answer; the calls are `<name>_call_0` and so on.
        max_steps: most calls.
        **options: for each `gen`, as max_tokens and temperature.

    Returns:
        The answer.

    Raises:
        ToolError: a tool raised, or no answer came within max_steps calls.
    """
    from sglang_lite.lang.api import gen
    from sglang_lite.lang.state import user_location

    where: Location | None = user_location()
    for step in range(max_steps + 1):
        variable = f"{name}_call_{step}"
        with s.assistant():
            s += gen(variable, tools=tools, **options)
        value = s[variable]
        if not isinstance(value, ToolCall):
            s[name] = value
            return str(value)
        if step == max_steps:
            break
        try:
            result = value.run()
        except ToolError as error:
            error.where = where
            raise
        with s.user():
            s += f"Result of {value.name}: {json.dumps(result, ensure_ascii=False, default=str)}"
    raise ToolError(
        f"no answer within {max_steps} tool calls.", hint="Raise max_steps, or improve the prompt.", where=where
    )
