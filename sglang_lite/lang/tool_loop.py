"""The loop of `use_tools`: turns in which the model calls tools, and turns with their results, until
the model answers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import msgspec

from sglang_lite.errors import short_repr
from sglang_lite.lang.api import gen
from sglang_lite.lang.approval import Approver, Verdict, read_verdict
from sglang_lite.lang.backend.token_counts import count_text_tokens, estimate_tokens
from sglang_lite.lang.call_log import CallLog, TurnCalls, describe_change
from sglang_lite.lang.expressions import SglGen
from sglang_lite.lang.state import ProgramState
from sglang_lite.lang.suspension import Suspension
from sglang_lite.lang.tool_events import ToolEvent
from sglang_lite.lang.tool_results import CallResult, OnToolError, cut_middle, finish_call
from sglang_lite.lang.tool_runner import ToolRunner
from sglang_lite.lang.tools import Toolbox, ToolCall
from sglang_lite.protocol import Location, ToolError, Unset, Usage
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.run_log import PendingCall
from sglang_lite.text.tool_use import result_text


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str


# Name of a variable or calls of a turn that the loop waits for, or the answer that ends the loop.
_Wanted: TypeAlias = str | TurnCalls | _Answer

_ANSWER_NOW: Final = "Answer now, with what you know."
_TURN_MARKS: Final = 32  # tokens of markup around two turns
_ANSWER_MARGIN: Final = 2  # an answer may have more tokens as part of the next prompt
_LONGEST_RESULT: Final = 1 << 16  # tokens of a result, where only a budget limits it
_NEARLY: Final = 0.9  # share of a run's time or budget after which the model has to answer
_MIN_RESULT: Final = 64  # tokens of a result, however little room there is


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of `use_tools`, named like its parameters; None for no limit."""

    max_steps: int
    max_failures: int | None
    max_calls: int | None
    max_calls_per_turn: int | None
    max_result: int | None
    tool_timeout: float | None


class ToolLoop:
    """Conversation in which the model uses tools.

    Args:
        s: state to add to.
        tools: the functions.
        name: variable that holds the answer.
        options: parameters of each `gen`.
        policy: how failures of tools are handled, like `on_tool_error` in `use_tools`.
        approvers: approver of each tool, by the tool's name.
        parallel: whether plain functions may run concurrently.
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
        approvers: Mapping[str, Approver],
        *,
        parallel: bool,
        where: Location | None,
    ) -> None:
        self._s = s
        self._tools = tools
        self._name = name
        self._options = options
        self._limits = limits
        self._policy = policy
        self._approvers = approvers
        self._parallel = parallel
        self._where = where
        self._failures: dict[str, int] = {}  # consecutive failures, by the tool's name
        self._calls = 0  # number of calls made so far
        self._turn = ""  # variable of the current turn
        self._toolbox: Toolbox | None = None  # toolbox of the last generation
        self._generations: dict[bool, SglGen] = {}  # generations without variables, by `closing`
        self._call_log = CallLog(s.branch.run, approvers)
        # path of each call that is being made, and the call as the model wrote it, by the call's id
        self._made: dict[int, tuple[str, ToolCall]] = {}
        self._begun: set[str] = set()  # paths of the calls of this turn that were begun

    def run(self) -> str:
        """Runs the loop and returns the answer. Raises ToolError if there is none."""
        turns = self._play_turns()
        with self._carry_state(), contextlib.closing(turns), self._make_runner() as runner:
            wanted = next(turns)
            while not isinstance(wanted, _Answer):
                if isinstance(wanted, str):
                    wanted = turns.send(self._s[wanted])
                else:
                    for i, call in wanted.undecided.items():
                        verdict = self._ask_approver(call)
                        self._call_log.decide(wanted, i, read_verdict(verdict, call))
                    made = self._open_calls(wanted)
                    results = runner.run_turn(made, self._seconds_for_calls())
                    wanted = turns.send(_merge_results(wanted, results))
            return wanted.text

    async def arun(self) -> str:
        """Runs the loop in a coroutine, like `run`."""
        return await self._call_log.run_beside_others(self._arun())

    async def _arun(self) -> str:
        turns = self._play_turns()
        with self._carry_state(), contextlib.closing(turns), self._make_runner() as runner:
            wanted = next(turns)
            while not isinstance(wanted, _Answer):
                if isinstance(wanted, str):
                    wanted = turns.send(await self._s.get(wanted))
                else:
                    for i, call in wanted.undecided.items():
                        verdict = self._ask_approver(call)
                        if inspect.isawaitable(verdict):
                            verdict = await verdict
                        self._call_log.decide(wanted, i, read_verdict(verdict, call))
                    made = self._open_calls(wanted)
                    results = await runner.arun_turn(made, self._seconds_for_calls())
                    wanted = turns.send(_merge_results(wanted, results))
            return wanted.text

    @contextlib.contextmanager
    def _carry_state(self) -> Iterator[None]:
        """Adds the location and the state to the loop's errors."""
        try:
            yield
        except ToolError as error:
            error.where = error.where or self._where
            error.state = error.state or self._s
            raise
        except Suspension as suspension:
            run = self._s.branch.run
            run.pending = tuple(dict.fromkeys((*run.pending, *suspension.calls)))
            raise

    def _ask_approver(self, call: PendingCall) -> Verdict | Awaitable[Verdict]:
        approver = self._approvers[call.tool]
        assert approver != "ask", "such calls are pending"
        return approver(call)

    def _open_calls(self, turn: TurnCalls) -> list[ToolCall]:
        """Returns the calls of a turn to make now. Suspends the run if any call has to wait."""
        self._call_log.suspend_if_pending(turn)
        assert self._toolbox is not None
        made = self._call_log.settle(turn, self._toolbox)
        self._begun.clear()
        self._made = {id(call): (turn.paths[i], turn.calls[i]) for i, call in made.items()}
        for i in made:
            self._record("call", self._turn, call=turn.calls[i])
        return list(made.values())

    def _begin_call(self, call: ToolCall) -> AbstractContextManager[None]:
        path, _ = self._made[id(call)]
        self._begun.add(path)
        return self._call_log.begin(call, path)

    def _make_runner(self) -> ToolRunner[CallResult]:
        return ToolRunner(
            self._begin_call,
            self._finish_call,
            parallel=self._parallel,
            limits_functions=self._limits.tool_timeout is not None,
        )

    def _finish_call(self, call: ToolCall, run: Callable[[], UserValue]) -> CallResult:
        path, written = self._made[id(call)]
        try:
            result = finish_call(written, run, self._policy)
        except Suspension as suspension:
            if path in self._begun:  # else an earlier call of the turn was suspended
                self._call_log.add_suspension(path)
            return CallResult("", pending=suspension.calls)
        except ToolError as error:
            self._call_log.add_raised(path, error)
            raise
        if (change := describe_change(written, call)) and result.error is None:
            result = replace(result, text=f"{change}\n{result.text}")
        self._call_log.add_result(path, result)
        self._record("result", self._turn, call=written, text=result.text, error=result.error)
        return result

    def _record(
        self,
        kind: Literal["turn", "call", "result", "answer"],
        name: str,
        *,
        call: ToolCall | None = None,
        text: str = "",
        error: ToolError | None = None,
        usage: Usage | None = None,
    ) -> None:
        event = ToolEvent(kind, name, call, text, error, usage)
        self._s.branch.run.record_event(event)

    def _play_turns(self) -> Generator[_Wanted, UserValue, None]:
        """Adds the turns. A generator that yields what it has to wait for and receives the value or
        the results. Yields the answer last.
        """
        s = self._s
        loop = f"{s.branch.path}/{s.branch.node_count}"
        begun = self._call_log.find_turn(loop)
        closing = self._why_finish() if begun is None else begun.closing
        if closing and begun is None:
            self._call_log.add_turn(loop, "", closing)
        for step in range(self._limits.max_steps + 1):
            variable = self._turn = f"{self._name}_call_{step}"
            generation = self._make_generation(variable, closing=bool(closing))
            if not step and self._toolbox is not None:
                self._call_log.check_tools(loop, self._toolbox)
            with s.assistant():
                s += generation
            value = yield variable
            calls = _list_tool_calls(value)
            if not isinstance(value, str | ToolCall | list):  # a symbol: the body is traced
                s[self._name] = value
                yield _Answer(str(value))
                return
            self._record("turn", variable, text=str(s.raw(variable)), usage=s.usage(variable))
            if not calls:
                s[self._name] = value
                self._record("answer", self._name, text=str(value))
                yield _Answer(str(value))
                return
            if step == self._limits.max_steps:
                break
            allowed = self._count_allowed(len(calls))
            self._calls += allowed
            node = s.branch.names.variables[variable].node
            results: list[CallResult] = yield self._call_log.open_turn(node, calls[:allowed])
            refused = CallResult(f"Error: not called, as {self._explain_refusal(allowed)}.")
            results += [refused] * (len(calls) - allowed)
            text, closing = self._show_results(node, calls, results)
            with s.user():
                s += text
            self._count_failures(calls[:allowed], results)
        raise self._no_answer_error()

    def _show_results(
        self, node: str, calls: Sequence[ToolCall], results: Sequence[CallResult]
    ) -> tuple[str, str]:
        """Returns the text of the turn that shows the results, and the reason why the model has to
        answer now, or "". A resumed run takes both from the log, because they depend on time and
        budgets.

        Args:
            node: path of the node that wrote the calls.
        """
        logged = self._call_log.find_turn(node)
        if logged is not None:
            return logged.text, logged.closing
        prompt = self._estimate_prompt()
        texts = self._cut_results(results, prompt)
        shown = "\n".join(result_text(call.name, text) for call, text in zip(calls, texts))
        if prompt:
            prompt += count_text_tokens(shown, self._s.branch.backend.tokenizer)
        closing = self._why_finish(prompt)
        text = f"{shown}\n{closing}" if closing else shown
        self._call_log.add_turn(node, text, closing)
        return text, closing

    # -------------------------------------------------------------------------------------- limits

    def _count_allowed(self, wanted: int) -> int:
        """Returns how many of a turn's calls may be made."""
        limits = self._limits
        left = wanted if limits.max_calls is None else limits.max_calls - self._calls
        turn = wanted if limits.max_calls_per_turn is None else limits.max_calls_per_turn
        return max(0, min(wanted, left, turn))

    def _explain_refusal(self, allowed: int) -> str:
        if allowed == self._limits.max_calls_per_turn:
            return f"only {allowed} {'call is' if allowed == 1 else 'calls are'} made in a turn"
        return f"all {self._limits.max_calls} calls are used up"

    def _seconds_for_calls(self) -> float | None:
        """Returns the time limit of the calls of a turn: the tools' own limit, or the rest of the
        run's time if that is less. Returns None if neither is limited.
        """
        left = self._s.branch.run.seconds_until(_NEARLY)
        own = self._limits.tool_timeout
        if left is None or (own is not None and own < left):
            return own
        return max(left, 0.0)

    def _why_finish(self, prompt: int = 0) -> str:
        """Returns a text that tells the model why it has to answer now, or "" if it may go on.

        Args:
            prompt: tokens of the next prompt; 0 before the first turn.
        """
        run = self._s.branch.run
        limits = self._limits
        if limits.max_calls is not None and self._calls >= limits.max_calls:
            return f"All {limits.max_calls} calls are used up. {_ANSWER_NOW}"
        if run.is_nearly_spent(_NEARLY):
            return f"Nearly all time or tokens for this task are used up. {_ANSWER_NOW}"
        if prompt and run.budgets:
            most = self._max_answer()
            longer = prompt + most * _ANSWER_MARGIN + _MIN_RESULT
            if not run.has_room_for(Usage(prompt + longer, 0, 2 * most)):
                return f"Nearly all tokens for this task are used up. {_ANSWER_NOW}"
        return ""

    def _max_answer(self) -> int:
        """Returns the maximum number of tokens of an answer."""
        most = self._options.get("max_tokens")
        if isinstance(most, int):
            return most
        run = self._s.branch.run
        inherited = run.settings.params.max_tokens
        return (run.backend.unset_max_tokens if isinstance(inherited, Unset) else inherited) or 0

    def _estimate_prompt(self) -> int:
        """Estimates the tokens of the prompt so far, the same way as budgets. Returns 0 if the run
        has no budget.
        """
        branch = self._s.branch
        if not branch.run.budgets:
            return 0
        prompt = branch.player.transcript.prompt()
        if self._toolbox is not None:
            shown = self._toolbox.to_prompt_tools(branch.backend.tool_family())
            prompt = msgspec.structs.replace(prompt, tools=shown)
        return estimate_tokens(prompt, branch.backend.tokenizer) + _TURN_MARKS

    def _cut_results(self, results: Sequence[CallResult], prompt: int) -> list[str]:
        """Returns the texts of results, cut to `max_result` tokens. Cuts them further if otherwise
        the budgets would not suffice for an answer.

        Args:
            prompt: tokens of the prompt so far; 0 without budgets.
        """
        limit = self._limits.max_result
        run = self._s.branch.run
        if prompt:
            limit = _LONGEST_RESULT if limit is None else limit
            most = self._max_answer()
            while limit > _MIN_RESULT and not run.has_room_for(
                Usage(prompt + limit * len(results), 0, most)
            ):
                limit = max(limit // 2, _MIN_RESULT)
        if limit is None:
            return [result.text for result in results]
        tokenizer = run.backend.tokenizer
        return [cut_middle(result.text, limit, tokenizer) for result in results]

    # ---------------------------------------------------------------------------------------- turns

    def _make_generation(self, variable: str, *, closing: bool) -> SglGen:
        """Returns the generation of a turn. Describes the tools only on the first call.

        Args:
            closing: whether the generation has to be the answer.
        """
        if closing not in self._generations:
            self._generations[closing] = self._describe_generation(closing=closing)
        described = self._generations[closing]
        self._toolbox = described.tools
        node = msgspec.structs.replace(described.node, name=variable)
        return msgspec.structs.replace(described, node=node)

    def _describe_generation(self, *, closing: bool) -> SglGen:
        """Returns the generation that all turns use, without a variable. Unless failures are
        raised, its value may be a call that can't be made, so that the model can be told why.
        """
        options = {**self._options, **({"tool_choice": "none"} if closing else {})}
        generation = gen(tools=self._tools, **options)
        assert isinstance(generation, SglGen)
        if self._policy == "raise":
            return generation
        assert generation.tools is not None
        tools = replace(generation.tools, keeps_invalid=True)
        return msgspec.structs.replace(generation, tools=tools, value_type=tools.value_type(None))

    def _count_failures(self, calls: Sequence[ToolCall], results: Sequence[CallResult]) -> None:
        """Counts consecutive failures of each tool. `calls` are the calls that were made. Raises
        ToolError if a tool failed too often.
        """
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


def _merge_results(turn: TurnCalls, made: Sequence[CallResult]) -> list[CallResult]:
    """Returns the results of all calls of a turn in the model's order.

    Args:
        made: results of the calls that were made.

    Raises:
        Suspension: a program in one of these calls was suspended.
    """
    pending = list(dict.fromkeys(call for each in made for call in each.pending))
    if pending:
        raise Suspension(pending)
    others = iter(made)
    return [turn.results[i] if i in turn.results else next(others) for i in range(len(turn.calls))]


def _list_tool_calls(value: object) -> list[ToolCall]:
    return [value] if isinstance(value, ToolCall) else value if isinstance(value, list) else []
