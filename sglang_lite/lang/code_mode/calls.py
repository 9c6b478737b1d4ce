"""Makes a program's calls of the caller's functions: checks the arguments, runs the calls within
their limits, and records them.
"""

from __future__ import annotations

import inspect
import json
import time
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from sglang_lite.lang.code_mode.limits import Meter, ProgramFault
from sglang_lite.lang.code_mode.tool_signatures import ToolSignature
from sglang_lite.lang.code_mode.values import (
    ResultReader,
    has_objects,
    is_plain,
    original_value,
)
from sglang_lite.lang.failure_text import describe_failure
from sglang_lite.lang.suspension import Suspension
from sglang_lite.lang.tool_results import ENDS_PROGRAM, OnToolError, text_for_model
from sglang_lite.lang.tool_runner import ToolRunner
from sglang_lite.lang.tools import (
    IDEMPOTENCY_KEY,
    ReportedFailure,
    SchemaTool,
    ToolCall,
    replace_half_pairs,
    takes_key,
    tool_failure,
)
from sglang_lite.protocol import ParameterError, ToolError
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.protocol.run_log import CallDecision, LoggedResult

_CURE: Final = "Give other arguments, or use another function."
_MAX_ERRORS: Final = 3  # errors about a call's arguments that the model is told
_MAX_SHOWN: Final = 100  # characters of an error's location, and of its message


@dataclass(frozen=True, slots=True)
class CodeCall:
    """Call that a program made.

    Attributes:
        tool: name of the function in the program.
        line: line of the program.
        arguments: arguments by name, with defaults, as JSON.
        result: the result as the program sees it; None if it is not plain data, or the call failed.
        replayable: whether `result` is the whole result.
        error: error message for the model, or None if the call succeeded.
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


class CallStore(Protocol):
    """Stores the calls of a program, one at a time, so that none is made twice."""

    def reach_call(self, tool: str, arguments: Json) -> LoggedResult | CallDecision | None:
        """Advances to the next call. Returns the call's known result, or else the decision about
        it, or None if neither is known.
        """

    def begin(self, tool: str, arguments: Json) -> AbstractContextManager[None]:
        """Stores that the call made in the `with` block begins."""

    def add_result(self, result: Json, error: str | None, *, raised: bool = False) -> None:
        """Stores the result of the call, or its failure."""

    def make_key(self) -> str:
        """Returns the idempotency key of the call."""


class CallMaker:
    """Makes the calls of one program.

    Args:
        tools: the functions.
        runner: runs them.
        meter: counts the calls.
        policy: how failures are handled, like `on_tool_error` in `use_tools`.
        recorded: calls of an earlier run of the program, which are not made again.
        note: function called with each call before it is made, and again with the call's record
            afterwards.
        made: list to which the calls are added.
        log: log of the calls, or None.
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
        log: CallStore | None = None,
    ) -> None:
        self._tools = tools
        self._runner = runner
        self._meter = meter
        self._policy = policy
        self._recorded = list(recorded)
        self._note = note
        self._made = made
        self._log = log

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
        kept = self._find_result(tool, given)
        if kept is None:
            self._note(call, None)
            result, error = self._run(call, given)
        else:
            result, error = kept
        reader = ResultReader(self._meter, name)
        fault = None
        value: UserValue = None
        if error is None:
            try:
                value = reader.read(result)
            except ProgramFault as raised:
                fault, error = raised, raised.problem
            except Exception as raised:  # a field may be a property that raises anything
                error = f"its result can't be read: {describe_failure(raised)}"
        plain = error is None and is_plain(value)
        record = CodeCall(
            name,
            line,
            given,
            deepcopy(value) if plain else None,  # the program may change its value
            plain or error is not None,
            error,
            started,
            time.perf_counter(),
        )
        self._made.append(record)
        if kept is None:
            if self._log is not None and record.replayable:
                self._log.add_result(record.result, error)
            self._note(call, record)
        if error is not None:
            raise fault or ProgramFault("tool", f"{name}() failed: {error}", _CURE)
        return value

    def _find_result(self, tool: ToolSignature, given: Json) -> tuple[UserValue, str | None] | None:
        """Returns the known result and error message of a call, which is then not made. Returns
        None if the call has to be made.

        Args:
            given: arguments of the call.

        Raises:
            ResumeError: the log has a different call at this position.
            ToolError: according to the log, the call has already failed with a ToolError.
        """
        if self._log is None:
            kept = self._recorded.pop(0) if self._recorded else None
            if kept is not None and (kept["tool"], kept["arguments"]) == (tool.name, given):
                return kept["result"], kept["error"]
            self._recorded.clear()
            return None
        logged = self._log.reach_call(tool.name, given)
        if isinstance(logged, LoggedResult):
            if logged.raised and logged.error is not None:
                raise ToolError(logged.error, tool=tool.name)
            return json.loads(logged.text), logged.error
        if logged is None or logged.verdict not in ("deny", "result"):
            return None
        if logged.verdict == "deny":
            return None, f"Denied: {logged.text}"
        return read_given_result(tool.function, logged.text), None

    def _run(self, call: ToolCall, given: Json) -> tuple[UserValue, str | None]:
        """Runs a call. Returns its result, and the error message for the model if it failed.

        Args:
            given: arguments of the call as JSON.
        """
        if takes_key(call.function):
            key = uuid.uuid4().hex if self._log is None else self._log.make_key()
            call = replace(call, arguments={**call.arguments, IDEMPOTENCY_KEY: key})
        begun = nullcontext() if self._log is None else self._log.begin(call.name, given)
        try:
            with begun:
                (outcome,) = self._runner.run_turn([call], self._meter.limits.tool_timeout)
        except Suspension as suspension:
            raise ToolError(
                f"{call.name} has run a program that waits for a decision about a call, which a "
                "function of gen(code=) can't do.",
                tool=call.name,
                hint="Let the model call it with use_tools, or let its calls need no approval.",
            ) from suspension
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
            if self._log is not None:
                self._log.add_result(None, failure.message, raised=True)
            raise failure from error
        text = self._policy(call, error)
        if not isinstance(text, str):
            raise ParameterError(
                "on_tool_error",
                f"the function returned {type(text).__name__}, not the text for the model.",
            ) from error
        return replace_half_pairs(text)

    def _read_arguments(
        self, tool: ToolSignature, arguments: Sequence[UserValue], named: Mapping[str, UserValue]
    ) -> ToolCall:
        """Checks the arguments of a call, and returns the call with the values that the function
        takes. Raises ProgramFault if an argument is not valid.
        """
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
        if takes_key(tool.function):
            values[IDEMPOTENCY_KEY] = ""
        bound = inspect.signature(tool.function).bind(**values)
        bound.apply_defaults()
        bound.arguments.pop(IDEMPOTENCY_KEY, None)
        return ToolCall(tool.name, dict(bound.arguments), tool.function)

    def _validate(
        self, tool: ToolSignature, plain: dict[str, UserValue], *, objects: bool
    ) -> dict[str, UserValue]:
        """Converts arguments to values of the annotated types. Converts only to types that JSON
        lacks: texts to dates, dicts to models.
        """
        if objects:
            from pydantic import ValidationError
            from pydantic_core import to_json

            if isinstance(tool.reader, SchemaTool):
                return tool.reader.validate_json(to_json(plain).decode())
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


def read_given_result(function: Callable[..., UserValue], text: str) -> UserValue:
    """Reads a call's result that the user has supplied as text. The text is parsed as JSON, or else
    taken as the result itself. Raises ValueError if the result does not fit the function's
    annotation.
    """
    from pydantic import TypeAdapter, ValidationError

    if isinstance(function, SchemaTool):
        return function.read_result(text)
    adapter = TypeAdapter[Any](typing.get_type_hints(function).get("return", Any))
    try:
        return adapter.validate_json(text)
    except ValidationError:
        return adapter.validate_python(text)


def _explain_invalid(error: Exception) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return describe_failure(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'arguments':.{_MAX_SHOWN}}: {each['msg']:.{_MAX_SHOWN}}"
        for each in found[:_MAX_ERRORS]
    )


def _as_json(value: UserValue) -> Json:
    """Converts a value to JSON data. Replaces objects that JSON lacks with their `repr`."""
    try:
        return json.loads(json.dumps(value, default=repr))
    except (ValueError, TypeError, RecursionError):
        return repr(value)[:1000]
