"""Calls of the caller's functions by a program: their arguments are checked, they run within their
limits, and each is recorded.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_lite.lang.code_mode.limits import Meter, ProgramFault
from sglang_lite.lang.code_mode.tool_signatures import ToolSignature
from sglang_lite.lang.code_mode.values import ResultReader, has_objects, original_value
from sglang_lite.lang.failure_text import describe_failure
from sglang_lite.lang.tool_results import ENDS_PROGRAM, OnToolError, text_for_model
from sglang_lite.lang.tool_runner import ToolRunner
from sglang_lite.lang.tools import ReportedFailure, SchemaTool, ToolCall, tool_failure
from sglang_lite.protocol import ParameterError, ToolError
from sglang_lite.protocol.anything import Json, UserValue

_CURE: Final = "Give other arguments, or use another function."


@dataclass(frozen=True, slots=True)
class CodeCall:
    """Call that a program made.

    Attributes:
        tool: name of the function in the program.
        line: line of the program.
        arguments: arguments by name, with defaults, as JSON.
        result: the result as JSON; None if it failed or has none.
        replayable: whether `result` is the whole result.
        error: what the model reads of a failure, or None.
        started, ended: `time.perf_counter()` at its beginning and end.
    """

    tool: str
    line: int
    arguments: Json
    result: Json
    replayable: bool
    error: str | None
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a function returned or raised."""

    result: UserValue
    error: Exception | None = None

    @staticmethod
    def of(call: ToolCall, run: Callable[[], UserValue]) -> CallOutcome:
        """Runs a call."""
        try:
            result = run()
            if isinstance(result, ReportedFailure):
                raise ToolError(result.removeprefix("Error: "))
        except Exception as error:  # a tool may raise anything
            return CallOutcome(None, error)
        return CallOutcome(result)


class CallMaker:
    """Makes the calls of one program.

    Args:
        tools: the functions.
        runner: runs them.
        meter: counts the calls.
        policy: what happens to failures, as in `use_tools`.
        recorded: results of the calls of an earlier run of the program, which are not made again.
        note: is told of each call before it is made, and after it with its record.
        made: list to which the calls are added.
    """

    def __init__(
        self,
        tools: Mapping[str, ToolSignature],
        runner: ToolRunner[CallOutcome],
        meter: Meter,
        policy: OnToolError,
        recorded: Sequence[Mapping[str, UserValue]],
        note: Callable[[ToolCall, CodeCall | None], None],
        made: list[CodeCall],
    ) -> None:
        self._tools = tools
        self._runner = runner
        self._meter = meter
        self._policy = policy
        self._recorded = list(recorded)
        self._note = note
        self._made = made

    def call(
        self, name: str, arguments: Sequence[UserValue], named: Mapping[str, UserValue], line: int
    ) -> UserValue:
        """Makes a call, and returns its result as a value of the program. Raises ProgramFault if the
        arguments are not valid, the function fails or a limit is reached.
        """
        self._meter.count_call()
        tool = self._tools[name]
        call = self._read_arguments(tool, arguments, named)
        started = time.perf_counter()
        given = _as_json(call.arguments)
        kept = self._recorded.pop(0) if self._recorded else None
        if kept is not None and (kept["tool"], kept["arguments"]) == (name, given):
            result, error = kept["result"], kept["error"]
        else:
            self._recorded.clear()
            self._note(call, None)
            result, error = self._run(call)
        reader = ResultReader(self._meter, name)
        fault = None
        value: UserValue = None
        if error is None:
            try:
                value = reader.read(result)
            except ProgramFault as raised:
                fault, error = raised, raised.problem
        plain = error is None and not has_objects(value)
        record = CodeCall(
            name,
            line,
            given,
            result if plain else None,
            plain or error is not None,
            error,
            started,
            time.perf_counter(),
        )
        self._made.append(record)
        if kept is None:
            self._note(call, record)
        if error is not None:
            raise fault or ProgramFault("tool", f"{name}() failed: {error}", _CURE)
        return value

    def _run(self, call: ToolCall) -> tuple[UserValue, str | None]:
        """Runs a call. Returns its result, and what the model reads if it fails."""
        (outcome,) = self._runner.run_turn([call], self._meter.limits.tool_timeout)
        if outcome.error is None:
            return outcome.result, None
        if isinstance(outcome.error, ENDS_PROGRAM):
            raise outcome.error
        return None, self._show_failure(call, outcome.error)

    def _show_failure(self, call: ToolCall, error: Exception) -> str:
        if self._policy == "show":
            return text_for_model(error)
        if self._policy == "raise":
            failure = tool_failure(call.name, error)
            raise failure from error
        text = self._policy(call, error)
        if not isinstance(text, str):
            raise ParameterError(
                "on_tool_error",
                f"the function returned {type(text).__name__}, not the text for the model.",
            ) from error
        return text

    def _read_arguments(
        self, tool: ToolSignature, arguments: Sequence[UserValue], named: Mapping[str, UserValue]
    ) -> ToolCall:
        """Returns the call with arguments as the function takes them."""
        names = [each.name for each in tool.parameters]
        if (
            len(arguments) > (len(names) if tool.positional else 0)
            or named.keys() & names[: len(arguments)]
        ):
            raise ProgramFault(
                "argument", f"{tool.name}() gets too many arguments.", f"It is {tool}."
            )
        given = {**dict(zip(names, arguments)), **named}
        plain = {key: original_value(each, self._meter) for key, each in given.items()}
        try:
            values = self._validate(tool, plain, objects=any(map(has_objects, given.values())))
        except (ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
            problem = f"the arguments of {tool.name}() are not valid: {_explain_invalid(error)}"
            raise ProgramFault("argument", problem, f"It is {tool}.") from error
        if isinstance(tool.function, SchemaTool):
            return ToolCall(tool.name, values, tool.function)
        bound = inspect.signature(tool.function).bind(**values)
        bound.apply_defaults()
        return ToolCall(tool.name, dict(bound.arguments), tool.function)

    def _validate(
        self, tool: ToolSignature, plain: dict[str, UserValue], *, objects: bool
    ) -> dict[str, UserValue]:
        """Returns arguments as values of the annotated types. Nothing is converted but what JSON
        can't write: texts of dates, dicts of models.
        """
        if objects:
            from pydantic import ValidationError
            from pydantic_core import to_json

            try:
                found: dict[str, Any] = tool.reader.validate_python(plain, strict=True)
            except ValidationError:
                found = tool.reader.validate_json(to_json(plain), strict=True)
            return found
        text = json.dumps(plain)
        if isinstance(tool.reader, SchemaTool):
            return tool.reader.validate_json(text)
        values: dict[str, Any] = tool.reader.validate_json(text, strict=True)
        return values


def _explain_invalid(error: Exception) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return describe_failure(error)
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}"
        for each in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _as_json(value: UserValue) -> Json:
    """Returns a value as JSON; what can't be written becomes text."""
    try:
        return json.loads(json.dumps(value, default=repr))
    except (ValueError, TypeError, RecursionError):
        return repr(value)[:1000]
