"""The loop of `use_tools`: turns in which the model calls tools, and turns with their results, until
the model answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from sglang_lite.errors import short_repr
from sglang_lite.lang.api import gen
from sglang_lite.lang.expressions import SglGen
from sglang_lite.lang.state import ProgramState
from sglang_lite.lang.tool_results import CallResult, OnToolError, finish_call
from sglang_lite.lang.tools import ToolCall
from sglang_lite.protocol import Location, ToolError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.text.tool_use import result_text


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of `use_tools`, named like its parameters; None for no limit."""

    max_steps: int = 8
    max_failures: int | None = 3


# What the loop waits for: a variable, by name, or the results of calls.
_Wanted: TypeAlias = str | Sequence[ToolCall]


class ToolLoop:
    """A conversation in which the model uses tools.

    Args:
        s: state to add to.
        tools: the functions.
        name: variable that holds the answer.
        options: parameters of each `gen`.
        policy: what happens to failures of tools, as in `use_tools`.
        where: line of the call of `use_tools`, for errors.
    """

    def __init__(
        self,
        s: ProgramState,
        tools: Sequence[Callable[..., UserValue]],
        name: str,
        options: Mapping[str, UserValue],
        limits: ToolLimits,
        policy: OnToolError,
        where: Location | None,
    ) -> None:
        self._s = s
        self._tools = tools
        self._name = name
        self._options = options
        self._limits = limits
        self._policy = policy
        self._where = where
        self._failures: dict[str, int] = {}  # in a row, by the tool's name

    def run(self) -> str:
        """Runs the loop and returns the answer. Raises ToolError if there is none."""
        turns = self._play_turns()
        try:
            wanted = next(turns)
            while True:
                if isinstance(wanted, str):
                    wanted = turns.send(self._s[wanted])
                else:
                    wanted = turns.send([self._run_call(call) for call in wanted])
        except StopIteration as end:
            answer: str = end.value
            return answer
        except ToolError as error:
            error.where = error.where or self._where
            error.state = error.state or self._s
            raise
        finally:
            turns.close()

    def _play_turns(self) -> Generator[_Wanted, UserValue, str]:
        """Adds the turns. Yields what it waits for, and is sent its value. Returns the answer."""
        s = self._s
        for step in range(self._limits.max_steps + 1):
            variable = f"{self._name}_call_{step}"
            with s.assistant():
                s += self._make_generation(variable)
            value = yield variable
            calls = _list_tool_calls(value)
            if not calls:
                s[self._name] = value
                return str(value)
            if step == self._limits.max_steps:
                break
            results: Sequence[CallResult] = yield calls
            with s.user():
                s += "\n".join(
                    result_text(call.name, result.text) for call, result in zip(calls, results)
                )
            self._count_failures(calls, results)
        raise self._no_answer_error()

    def _make_generation(self, variable: str) -> SglGen:
        """Returns the generation of a turn. If failures are shown, its value may be a call that
        can't be made, of which the model is told.
        """
        generation = gen(variable, tools=self._tools, **self._options)
        if self._policy == "raise" or not isinstance(generation, SglGen):
            return generation
        assert generation.tools is not None
        tools = replace(generation.tools, keeps_invalid=True)
        return msgspec.structs.replace(generation, tools=tools, value_type=tools.value_type(None))

    def _run_call(self, call: ToolCall) -> CallResult:
        return finish_call(call, lambda: call.function(**call.arguments), self._policy)

    def _count_failures(self, calls: Sequence[ToolCall], results: Sequence[CallResult]) -> None:
        """Counts the failures of each tool in a row. Raises ToolError if there are too many."""
        for call, result in zip(calls, results):
            if result.error is None:
                self._failures.pop(call.name, None)
                continue
            count = self._failures[call.name] = self._failures.get(call.name, 0) + 1
            if count == self._limits.max_failures:
                times = "once" if count == 1 else f"{count} times in a row"
                raise ToolError(
                    f"the tool {call.name} failed {times}; at last: {result.error.message}",
                    tool=call.name,
                    limit="max_failures",
                    hint="Raise max_failures, or leave this tool out.",
                ) from result.error.__cause__

    def _no_answer_error(self) -> ToolError:
        problem = f"the model gave no answer within {self._limits.max_steps} tool calls."
        hint = "Raise max_steps, or improve the prompt."
        choice = self._options.get("tool_choice")
        if choice not in (None, "auto"):
            problem += f" tool_choice={short_repr(choice)} forces a call in each turn."
            hint = (
                'Leave it out, or force only the first call: gen(tools=…, tool_choice="required").'
            )
        return ToolError(problem, limit="max_steps", hint=hint)


def _list_tool_calls(value: object) -> list[ToolCall]:
    return [value] if isinstance(value, ToolCall) else value if isinstance(value, list) else []
