"""Looks up the calls of a tool loop in the log of its run: which results are known, which calls may
be made, and which have to wait for a decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sglang_lite.lang.approval import Approver
from sglang_lite.lang.execution.program_log import refuse_batch_in_journal
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.execution.run_log import CallPlace, RunLog, current_call
from sglang_lite.lang.suspension import Suspension
from sglang_lite.lang.tool_results import CallResult
from sglang_lite.lang.tools import (
    IDEMPOTENCY_KEY,
    InvalidCall,
    Toolbox,
    ToolCall,
    is_idempotent,
    takes_key,
)
from sglang_lite.protocol import ParameterError, ResumeError, ToolError
from sglang_lite.protocol.run_log import (
    CallDecision,
    LoggedCall,
    LoggedResult,
    LoggedTools,
    LoggedTurn,
    PendingCall,
)


@dataclass(slots=True)
class TurnCalls:
    """Calls of one turn.

    Attributes:
        calls: the calls, as the model wrote them.
        paths: path of each call in its run.
        results: known results, by the call's index.
        decisions: decisions, by the call's index.
        pending: calls that wait for a decision.
        undecided: calls about which an approver has to decide now, by index.
    """

    calls: Sequence[ToolCall]
    paths: Sequence[str]
    results: dict[int, CallResult] = field(default_factory=dict)
    decisions: dict[int, CallDecision] = field(default_factory=dict)
    pending: list[PendingCall] = field(default_factory=list)
    undecided: dict[int, PendingCall] = field(default_factory=dict)


class CallLog:
    """View of a run's log for one tool loop, which looks up and logs its turns and calls.

    Args:
        run: run that the loop is part of.
        approvers: approver of each tool, by the tool's name.

    Raises:
        ProgramError: the run is an item of a batch in a program that has a journal.
    """

    def __init__(self, run: Run, approvers: Mapping[str, Approver]) -> None:
        refuse_batch_in_journal(run)
        self._run = run
        self._log: RunLog = run.ensure_log()
        self._approvers = approvers

    # --------------------------------------------------------------------------------------- loops

    def check_tools(self, loop: str, toolbox: Toolbox) -> None:
        """Logs the tools of a loop. Raises ResumeError if the log has different tools for it."""
        tools = {
            each["function"]["name"]: json.dumps(each["function"], sort_keys=True)
            for each in toolbox.shown
        }
        logged = self._log.tools.get((self._run.path, loop))
        if logged is None:
            self._log.add(LoggedTools(self._run.path, loop, tuple(tools.items())))
            return
        earlier = dict(logged.tools)
        for name in {**earlier, **tools}:
            before, now = earlier.get(name), tools.get(name)
            if before != now:
                raise ResumeError(
                    f"the tools of the run have changed since its log was written. {name} was "
                    f"{before or 'not there'}, and is now {now or 'not there'}.",
                    hint="Resume it with the same tools, or begin a new run.",
                )

    def find_turn(self, turn: str) -> LoggedTurn | None:
        """Returns the logged turn with the results of a turn's calls, or None if there is none."""
        return self._log.turns.get((self._run.path, turn))

    def add_turn(self, turn: str, text: str, closing: str) -> None:
        self._log.add(LoggedTurn(self._run.path, turn, text, closing))

    async def run_beside_others(self, loop: Awaitable[str]) -> str:
        """Awaits a loop in a coroutine and returns its answer. If the loop is suspended, first
        waits for the loops that run concurrently, so that they make no call after the body has
        ended.

        Raises:
            Suspension: the loop was suspended. The exception has the pending calls of all suspended
                loops of the run.
        """
        place = current_call.get()
        others = self._log.open_loops
        ended = asyncio.get_running_loop().create_future()
        others[ended] = place
        try:
            return await loop
        except Suspension:
            del others[ended]
            ended.set_result(None)
            await asyncio.sleep(0)  # lets tasks that were created earlier begin their loops
            while beside := [each for each, its in others.items() if its is place]:
                await asyncio.wait(beside)
            raise Suspension(self._run.pending) from None
        finally:
            if not ended.done():
                del others[ended]
                ended.set_result(None)

    # --------------------------------------------------------------------------------------- calls

    def open_turn(self, turn: str, calls: Sequence[ToolCall]) -> TurnCalls:
        """Looks up the results and decisions of a turn's calls, and finds the calls that still need
        a decision.

        Args:
            turn: path of the node that wrote the calls.

        Raises:
            ToolError: according to the log, a call has already raised this error.
        """
        found = TurnCalls(calls, [f"{turn}:{i}" for i in range(len(calls))])
        self._reach_calls(found)
        for i, (call, path) in enumerate(zip(calls, found.paths)):
            place = self._run.path, path
            approver = self._approvers.get(call.name)
            if isinstance(call.function, InvalidCall):
                found.decisions[i] = CallDecision(*place, "approve")
            elif (logged := self._log.results.get(place)) is not None:
                found.results[i] = _restore_result(call, logged)
            elif (decision := self._log.decisions.get(place)) is not None:
                found.decisions[i] = decision
            elif place in self._log.calls:  # begun, and nobody knows whether it ended
                if is_idempotent(call.function):
                    found.decisions[i] = CallDecision(*place, "approve")
                else:
                    inside = self._log.calls_in_doubt(f"{self._run.path}{path}>")
                    found.pending += [self._describe(call, path, in_doubt=True), *inside]
            elif approver is None:
                found.decisions[i] = CallDecision(*place, "approve")
            elif approver == "ask":
                found.pending.append(self._describe(call, path))
            else:
                found.undecided[i] = self._describe(call, path)
        return found

    def _reach_calls(self, turn: TurnCalls) -> None:
        """Records that the run has reached a turn's calls. If the log has calls that raised an
        error, raises the error that was logged first.
        """
        raised = dict[tuple[str, str], ToolError]()
        for call, path in zip(turn.calls, turn.paths):
            place = self._run.path, path
            self._log.reach(*place)
            logged = self._log.results.get(place)
            if logged is not None and logged.raised and logged.error is not None:
                raised[place] = ToolError(logged.error, tool=call.name)
        if raised:  # the log lists results in the order in which calls ended
            raise next(raised[place] for place in self._log.results if place in raised)

    def decide(self, turn: TurnCalls, index: int, decision: CallDecision | None) -> None:
        """Records an approver's decision about a call; None if the call has to wait."""
        if decision is None:
            turn.pending.append(turn.undecided[index])
        else:
            self._log.add(decision)
            turn.decisions[index] = decision

    def suspend_if_pending(self, turn: TurnCalls) -> None:
        """Suspends the run if calls of a turn wait for a decision, or if another loop of the run
        was suspended. Called before any call of the turn is made.

        Raises:
            Suspension: calls wait for a decision.
        """
        if turn.pending:
            raise Suspension(turn.pending)
        run: Run | None = self._run
        while run is not None:
            if run.pending:
                raise Suspension(run.pending)
            run = run.outer

    def settle(self, turn: TurnCalls, toolbox: Toolbox) -> dict[int, ToolCall]:
        """Applies the decisions: stores and logs results that they supply, and returns the calls
        to make now, by index.

        Raises:
            ParameterError: changed arguments do not fit the tool.
        """
        made = dict[int, ToolCall]()
        for i, decision in sorted(turn.decisions.items()):
            call = turn.calls[i]
            if decision.verdict in ("deny", "result"):
                text = decision.text if decision.verdict == "result" else f"Denied: {decision.text}"
                turn.results[i] = CallResult(text)
                self.add_result(turn.paths[i], turn.results[i])
                continue
            if decision.arguments:
                call = self._change_arguments(call, decision, toolbox)
            if takes_key(call.function):
                key = self._log.key_of(self._run.path, turn.paths[i])
                call = replace(call, arguments={**call.arguments, IDEMPOTENCY_KEY: key})
            made[i] = call
        return made

    def _change_arguments(
        self, call: ToolCall, decision: CallDecision, toolbox: Toolbox
    ) -> ToolCall:
        try:
            return toolbox.make_call(call.name, decision.arguments)
        except (TypeError, ValueError) as error:
            self._log.add(CallDecision(decision.run, decision.call, "withdraw"), durable=True)
            raise ParameterError(
                "arguments",
                f"the changed arguments of {call.name} are not valid: {error}",
                hint="Decide again: state.pending() lists the call.",
            ) from error

    @contextlib.contextmanager
    def begin(self, call: ToolCall, path: str) -> Iterator[None]:
        """Logs that the call made in the `with` block begins. Waits until the record is on the disk
        before the block is entered.
        """
        if isinstance(call.function, InvalidCall):
            yield
            return
        record = LoggedCall(self._run.path, path, call.name, call.written)
        self._log.add(record, durable=True)
        token = current_call.set(CallPlace(self._run, path))
        try:
            yield
        finally:
            current_call.reset(token)

    def add_result(self, path: str, result: CallResult) -> None:
        """Logs the result of a call, and waits until the record is on the disk."""
        error = None if result.error is None else result.error.message
        self._log.add(LoggedResult(self._run.path, path, result.text, error), durable=True)

    def add_raised(self, path: str, error: ToolError) -> None:
        """Logs that a call failed with an error that is raised in the program."""
        record = LoggedResult(self._run.path, path, "", error.message, raised=True)
        self._log.add(record, durable=True)

    def add_suspension(self, path: str) -> None:
        """Logs that a program inside a call was suspended. A resumed run makes the call again."""
        self._log.add(CallDecision(self._run.path, path, "enter"), durable=True)

    def _describe(self, call: ToolCall, path: str, *, in_doubt: bool = False) -> PendingCall:
        return PendingCall(call.name, call.written, in_doubt, path, self._run.path)


def describe_change(written: ToolCall, made: ToolCall) -> str:
    """Returns a sentence that tells the model with which other arguments its call was made. Returns
    "" if the arguments were not changed.
    """
    same = written.written == made.written
    return "" if same else f"The arguments were changed to {made.written}."


def _restore_result(call: ToolCall, logged: LoggedResult) -> CallResult:
    error = None if logged.error is None else ToolError(logged.error, tool=call.name)
    return CallResult(logged.text, error)
