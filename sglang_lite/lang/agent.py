"""Tools in a program: their description for a prompt, and a loop in which the model calls them
until it answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from sglang_lite.lang.api import gen
from sglang_lite.lang.approval import Approve, read_approvers
from sglang_lite.lang.argument_names import unknown_argument_error
from sglang_lite.lang.checks import check_booleans, check_positive, check_whole_number
from sglang_lite.lang.execution.reading import check_name
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.lang.tool_loop import ToolLimits, ToolLoop
from sglang_lite.lang.tool_results import OnToolError
from sglang_lite.lang.tools import IDEMPOTENCY_KEY, SchemaTool, check_tools
from sglang_lite.protocol import Location, ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.text.tool_calls import call_text


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
        parallel_tool_calls: whether one turn may contain several calls, as in `gen`; only used for
            the JSON format.
    """
    lines = [
        f"- {t.__name__}{t.parameters if isinstance(t, SchemaTool) else _signature(t)}: "
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
    on_tool_error: OnToolError = "show",
    max_failures: int | None = 3,
    max_calls: int | None = None,
    max_calls_per_turn: int | None = None,
    max_result: int | None = 8192,
    tool_timeout: float | None = None,
    parallel: bool = False,
    approve: Approve | None = None,
    **options: UserValue,
) -> UserValue:
    """Lets the model use tools until it answers: adds assistant turns with calls, and user turns
    with their results. In a coroutine body, write `await use_tools(s, tools)`.

    When 90 % of the run's `timeout`, `max_cost` or `max_total_tokens` are used up, or only enough
    is left for an answer, the model is told to answer without another call.

    Args:
        s: state to add to; its last turn should be the question.
            `sglang_lite.lang.agent.describe(tools, s)` returns a text for the prompt that lists the
            tools.
        tools: functions with annotated parameters; their docstrings describe them to the model.
        name: variable that holds the answer; the calls are in the variables `<name>_call_0`,
            `<name>_call_1` …
        max_steps: maximum number of assistant turns with calls; at least 0.
        on_tool_error: what happens if a tool raises an exception, or the model calls a tool that
            does not exist or with invalid arguments. "show" makes it the call's result, so that the
            model can do something else: the class and the message, without paths, addresses and
            keys. (The message of a ToolError is shown as it is.) "raise" raises it. A function
            gets the ToolCall and the exception, and returns the text to show.
        max_failures: number of consecutive failures of one tool that ends the loop; None for no
            limit.
        max_calls: number of calls after which the model has to answer; None for no limit.
        max_calls_per_turn: maximum number of calls of one turn that are made; the model is told
            that the others were not. None for no limit.
        max_result: maximum number of tokens of a result that the model reads. A note replaces the
            middle of a longer result. None for no limit.
        tool_timeout: seconds that a call may take; None for no limit. A coroutine or a call of an
            MCP server that takes longer is cancelled. With a limit, functions run in threads: a
            function that takes longer keeps running in its thread, and the log has a warning.
        parallel: whether the functions of one turn may run at the same time, each in a thread.
            Async tools and tools of MCP servers always do.
        approve: who approves calls before they are made; None to make all calls. "ask" suspends the
            run at a call: `s.pending()` lists it, the state can be saved, and `resume` goes on. A
            function gets a PendingCall and returns True, False, "ask", `call.approve(…)` with other
            arguments, or `call.deny(reason)`, which the model reads; in a coroutine it may be a
            coroutine function. A mapping from tools (or their names) to "ask" or a function applies
            to those tools only.
        **options: parameters of each `gen`, such as max_tokens and temperature. With
            parallel_tool_calls=True a turn may have several calls; the next turn contains all
            results, in the order of the calls.

    Returns:
        The answer, a string.

    Raises:
        ParameterError: an option is not a parameter of `gen`, or a tool is a generator.
        ResumeError: the run was resumed, and its calls or tools differ from those in its log.
        ToolError: the model did not answer within `max_steps` turns with calls, or a tool failed
            `max_failures` times in a row, or once with on_tool_error="raise". The error's `state`
            is `s`.
        BudgetError, RequestAbortedError: a tool raised it; a model never sees these.
    """
    where: Location | None = user_location()
    if not isinstance(s, ProgramState):
        raise ParameterError("s", f"{s!r:.60} is not the state of a program.", where=where)
    check_whole_number("max_steps", max_steps, 0, where)
    counts = {
        "max_failures": max_failures,
        "max_calls": max_calls,
        "max_calls_per_turn": max_calls_per_turn,
        "max_result": max_result,
    }
    for limit, value in counts.items():
        if value is not None:
            check_whole_number(limit, value, 1, where)
    if tool_timeout is not None:
        check_positive("tool_timeout", tool_timeout)
    check_booleans(parallel=parallel)
    if on_tool_error not in ("show", "raise") and not callable(on_tool_error):
        raise ParameterError(
            "on_tool_error",
            f"{on_tool_error!r:.60} is not 'show', 'raise' or a function.",
            hint="A function gets the call and the exception, and returns the text to show.",
            where=where,
        )
    check_name(name, where)
    check_tools(tools, where)
    for option in options:
        if option not in _OPTIONS:
            raise unknown_argument_error("use_tools", option, [*_OWN_OPTIONS, *_OPTIONS])
    for tool in tools:
        _check_returns(tool, where)
    is_async = s.branch.run.is_async
    approvers = read_approvers(approve, tools, where, is_async=is_async)
    limits = ToolLimits(max_steps=max_steps, tool_timeout=tool_timeout, **counts)
    loop = ToolLoop(
        s, tools, name, options, limits, on_tool_error, approvers, parallel=parallel, where=where
    )
    return loop.arun() if is_async else loop.run()


_OPTIONS = [name for name in inspect.signature(gen).parameters if name not in ("name", "tools")]
_OWN_OPTIONS = [
    name
    for name, parameter in inspect.signature(use_tools).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def _signature(tool: Callable[..., UserValue]) -> inspect.Signature:
    """Returns the signature of a function as models see it."""
    signature = inspect.signature(tool)
    shown = [each for each in signature.parameters.values() if each.name != IDEMPOTENCY_KEY]
    return signature.replace(parameters=shown)


def _check_returns(tool: Callable[..., UserValue], where: Location | None) -> None:
    """Raises ParameterError if a tool is a generator function."""
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise ParameterError(
            "tools",
            f"{getattr(tool, '__name__', 'a tool')} is a generator, so a call has no result.",
            hint="Return a list instead of yielding its items.",
            where=where,
        )
