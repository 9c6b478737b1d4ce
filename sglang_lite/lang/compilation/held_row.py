"""Rows of compiled programs with holds. The script of a row is performed without a thread of its own: nodes are handed
over up to the next hold, and the result of the caller's Python there is handed over together with the next nodes."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from sglang_lite.lang.batches.body_pool import Outcome, outcome_of
from sglang_lite.lang.compilation.compile_symbols import resolved
from sglang_lite.lang.compilation.script import Script, Submitted
from sglang_lite.lang.compilation.script_run import ScriptRun
from sglang_lite.lang.compilation.specialization import Specialization
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import finished, when_finished
from sglang_lite.lang.execution.run import Run, RunSettings, current_run
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.lang.state import ProgramState
from sglang_lite.program.control_flow import holds
from sglang_lite.program.nodes import Fill
from sglang_lite.protocol import Generation, RequestAbortedError, SglError
from sglang_lite.protocol.anything import UserValue


class HeldRow:
    """Row of a compiled program that is played from hold to hold. Has the interface of a BodyRun, for a single run.

    Attributes:
        specialized: specialization of the program.
        arguments: arguments of the run, by name.
        state: state of the run.
        told: called with the row at its end, on any thread, or None.
        flush: called after `told`, or None.
    """

    def __init__(self, specialized: Specialization, arguments: Mapping[str, UserValue], settings: RunSettings) -> None:
        self.specialized, self.arguments = specialized, arguments
        specialized.filler(arguments)  # raises ParameterError if a value does not fit its hole
        outer = current_run.get()
        run = Run(specialized.backend, settings, outer=outer, new_state=ProgramState)
        run.called, run.context = specialized.called(arguments), copy_context()
        self.state = ProgramState(Branch(Player(run, run.pushed())))
        run.state = weakref.ref(self.state)
        if outer is not None:
            outer.register_inner(self.state.branch)
        self._script_run = ScriptRun(arguments, {0: self.state}, self._asks)
        self._part = -1
        self._steps = self._perform()
        self._ended = Variable()  # set at the end of the script
        self._raised: BaseException | None = None
        self.told: Callable[[HeldRow], object] | None = None
        self.flush: Callable[[], object] | None = None

    def run(self) -> ProgramState:
        """Performs the script. Exceptions of the script are raised."""
        self.start()
        self._wait()
        return self.state

    run_in_thread = run

    async def arun(self) -> None:
        """Awaits the end of the script and of everything that it has added."""
        self.start()
        try:
            await self._finished()
        except asyncio.CancelledError:
            self.stop(RequestAbortedError("the program was cancelled."))
            raise

    def start(self) -> None:
        """Performs the script as far as possible without waiting; the executor loop continues it."""
        run = self.state.branch.run
        token = current_run.set(run)
        try:
            waits = next((each for each in self._steps if not each.done), None)
        except BaseException as error:  # may come from the user's Python
            self._end(error)
        else:
            if waits is None:
                self._end(None)
            else:
                waits.when_done(partial(executor().post, self.start))
        finally:
            current_run.reset(token)

    def _end(self, error: BaseException | None) -> None:
        branch, self._raised = self.state.branch, error
        try:
            if error is not None:
                branch.abandon(error)
        finally:
            branch.end()
            self._ended.set(None)
            when_finished(branch.player, self._tell)

    def _tell(self) -> None:
        told, flush = self.told, self.flush
        if told is not None:
            told(self)
        if flush is not None:
            flush()

    def stop(self, error: SglError) -> None:
        """Ends the run with an error, unless it has ended."""
        self.state.branch.stop(error)

    def outcome(self) -> Outcome:
        """State of the run, or the error that it ended with. Valid after the end of the run."""
        if isinstance(self._raised, Exception):
            return self._raised
        return outcome_of(self.state)

    def _wait(self) -> None:
        """Waits for the end of the script. Raises the script's exception, if any."""
        try:
            self._ended.wait()
        except BaseException:
            self.stop(RequestAbortedError("the program was interrupted."))
            raise
        if self._raised is not None:
            raise self._raised

    async def _finished(self) -> None:
        """Waits for the end of the script and of everything that it has added. Raises the script's exception, if
        any."""
        await self._ended.get()
        if self._raised is not None:
            raise self._raised
        await finished(self.state.branch.player).get()

    def _perform(self) -> Iterator[Variable]:
        """Performs the script and makes its decisions. Yields variables that have to be set before the next step."""
        compiled, scripts = self.specialized.compiled, self.specialized.scripts
        decided, decision, at = tuple[int, ...](), compiled.decision, 0
        while True:
            script = scripts.script(decided)
            stop = script.cuts[len(decided)]
            yield from self._script_run.do(script, at, stop)
            if decision is None:
                break
            condition = decision.condition
            outcome = 0 if condition is None or holds(condition, partial(self._value, script)) else 1
            self._part = decision.parts[outcome]
            decided, at, decision = (*decided, outcome), stop, compiled.parts[self._part].decision
        self.state.ret_value = resolved(script.result, self._script_run.of)

    def _value(self, script: Script, fill: Fill) -> Any:
        """Value of one side of a decision's condition."""
        if fill.argument is not None:
            return self.arguments[fill.argument]
        if fill.node is None:
            return script.holds[fill.hold or 0].value(self._script_run.of)
        variable = self._script_run.values[fill.node]
        value, record = variable.result(), variable.record
        if isinstance(record, list) and isinstance(record[0], Generation):
            return [each.text for each in record]
        return record.text if isinstance(record, Generation) else value

    def _asks(self, action: Submitted) -> Any:
        expression = action.expression
        if not action.holes:
            return expression
        node, path = getattr(expression, "node", expression), action.path or ()
        filled = self.specialized.filler.node(node, self._part, path, self.arguments)
        return replace(expression, node=filled) if isinstance(expression, SglGen | SglSelect) else filled
