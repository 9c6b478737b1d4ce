"""Tools in a program: their description for a prompt, and a loop in which the model calls them
until it answers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from sglang_lite.errors import short_repr
from sglang_lite.lang.api import gen
from sglang_lite.lang.argument_names import unknown_argument_error
from sglang_lite.lang.checks import check_whole_number
from sglang_lite.lang.execution.reading import check_name
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.lang.tools import SchemaTool, ToolCall, check_tools
from sglang_lite.protocol import Location, ParameterError, ToolError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.text.tool_calls import call_text
from sglang_lite.text.tool_use import result_text


def describe(
    tools: Sequence[Callable[..., UserValue]],
    s: ProgramState | None = None,
    *,
    parallel_tool_calls: bool = False,
) -> str:
    """Describes tools for a prompt. The description has the name, signature and first docstring
    line of each tool, and the format of a call.

    Args:
        s: state whose prompt the text is for: the format depends on its model. None for the JSON
            format.
        parallel_tool_calls: whether several tools may be called at once, as in `gen`; for the JSON
            format.
    """
    lines = [
        f"- {t.__name__}{t.parameters if isinstance(t, SchemaTool) else inspect.signature(t)}: "
        f"{(inspect.getdoc(t) or 'no description').splitlines()[0]}"
        for t in tools
    ]
    family = None if s is None else s.branch.backend.tool_family()
    if family is None:
        call = '{"tool": name, "arguments": {…}}'
        if parallel_tool_calls:
            how = f'Write {{"calls": [{call}, …]}} to use some, or {{"answer": text}} to answer.'
        else:
            how = f'Write {call} to use one, or {{"answer": text}} to answer.'
    else:
        call = call_text(family, "…", {"…": "…"})
        how = f"To use one, write\n{call}\nwith its name and its arguments, those that are no strings as JSON."
    return "You can use these tools:\n" + "\n".join(lines) + f"\n{how}"


def use_tools(
    s: ProgramState,
    tools: Sequence[Callable[..., UserValue]],
    name: str = "answer",
    *,
    max_steps: int = 8,
    **options: UserValue,
) -> str:
    """Lets the model use tools until it answers: adds assistant turns with calls, and user turns
    with their results.

    Args:
        s: state to add to; its last turn should be the question.
            `sglang_lite.lang.agent.describe(tools, s)` returns a text for the prompt that lists the
            tools.
        tools: functions with annotated parameters; their docstrings describe them to the model.
        name: variable that holds the answer; the calls are in the variables `<name>_call_0`,
            `<name>_call_1` …
        max_steps: maximum number of assistant turns with calls; at least 0.
        **options: parameters of each `gen`, such as max_tokens and temperature. With
            parallel_tool_calls=True a turn may have several calls: all are run in their order, and
            the next turn contains all results.

    Returns:
        The answer.

    Raises:
        ParameterError: an option is not a parameter of `gen`, or a tool is async.
        ToolError: a tool raised, or the model did not answer within `max_steps` turns with calls.
    """
    where: Location | None = user_location()
    if not isinstance(s, ProgramState):
        raise ParameterError("s", f"{s!r:.60} is not the state of a program.", where=where)
    check_whole_number("max_steps", max_steps, 0, where)
    check_name(name, where)
    check_tools(tools, where)
    for option in options:
        if option not in _OPTIONS:
            raise unknown_argument_error("use_tools", option, ["max_steps", *_OPTIONS])
    for tool in tools:
        if inspect.iscoroutinefunction(tool):
            raise ParameterError(
                "tools",
                f"{tool.__name__} is async, and use_tools can't await it.",
                hint="Write the loop yourself: gen(tools=…), then await call.run().",
                where=where,
            )
    for step in range(max_steps + 1):
        variable = f"{name}_call_{step}"
        with s.assistant():
            s += gen(variable, tools=tools, **options)
        value = s[variable]
        if not _list_tool_calls(value):
            s[name] = value
            return str(value)
        if step == max_steps:
            break
        results = _run_calls(value, where)
        with s.user():
            s += results
    raise _no_answer_error(options.get("tool_choice"), max_steps, where)


_OPTIONS = [name for name in inspect.signature(gen).parameters if name not in ("name", "tools")]


def _list_tool_calls(value: object) -> list[ToolCall]:
    return [value] if isinstance(value, ToolCall) else value if isinstance(value, list) else []


def _run_calls(value: object, where: Location | None) -> str:
    """Runs all calls and returns a text with their results, for the model to read."""
    try:
        return "\n".join(
            [
                result_text(call.name, _result_as_text(call.run()))
                for call in _list_tool_calls(value)
            ]
        )
    except ToolError as error:
        error.where = where
        raise


def _no_answer_error(choice: object, max_steps: int, where: Location | None) -> ToolError:
    problem = f"the model gave no answer within {max_steps} tool calls."
    hint = "Raise max_steps, or improve the prompt."
    if choice not in (None, "auto"):
        problem += f" tool_choice={short_repr(choice)} forces a call in each turn."
        hint = 'Leave it out, or force only the first call: gen(tools=…, tool_choice="required").'
    return ToolError(problem, hint=hint, where=where)


def _result_as_text(result: Any) -> str:
    """Converts a tool's result to text: JSON if the result can be written as JSON, otherwise
    `str(result)`.
    """
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that aren't strings, or a cycle
        return str(result)
