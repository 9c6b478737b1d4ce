"""Rows of compiled programs that are played as a whole, and their states, which are built only if more than texts of
nodes is read."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from sglang_lite.lang.argument_names import no_such_attribute
from sglang_lite.lang.backend.base_backend import BaseBackend, priority_keywords
from sglang_lite.lang.compilation.script import Script
from sglang_lite.lang.compilation.specialization import Specialization
from sglang_lite.lang.compilation.state_rebuild import RowResult, rebuilt_state, text_of
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.run import RunSettings, current_run, deadline_of, too_long
from sglang_lite.lang.results import usages_of
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.lang.unawaited import must_await
from sglang_lite.program.control_flow import node_at, outcomes, played_nodes
from sglang_lite.program.nodes import Fill, Node
from sglang_lite.protocol import ProgramEvent, RequestAbortedError, Selection, SglError, Usage
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.results import total_usage


class WholeRow:
    """Row of a compiled program that is played as a whole.

    Args:
        done: variable that is set at the end of the row; None if nobody waits for it.

    Attributes:
        specialized, settings: specialization of the program, and settings of the run.
        arguments: arguments of the run, by name.
        seed: seed of the draws, or None if none is needed.
        program: program with the arguments in its holes.
        result: results so far.
        began: `time.perf_counter()` at the creation of the row.
        on_end: called with the row at its end, on any thread, or None.
        flush: called after `on_end`, once for all rows that end together, or None.
    """

    __slots__ = (
        "__weakref__", "_abort", "_way_taken", "arguments", "began", "done", "flush", "on_end", "program", "result",
        "seed", "settings", "specialized",
    )  # fmt: skip

    def __init__(
        self,
        specialized: Specialization,
        arguments: Mapping[str, UserValue],
        settings: RunSettings,
        done: Variable | None = None,
    ) -> None:
        self.specialized, self.arguments, self.settings, self.done = specialized, arguments, settings, done
        self.seed = settings.seed
        if self.seed is None and specialized.draws:  # the same on both sides
            self.seed = secrets.randbits(63)
        self.program = specialized.filler(arguments, self.seed)
        self.result = RowResult()
        self.began = time.perf_counter()
        self.on_end: Callable[[WholeRow], object] | None = None
        self.flush: Callable[[], object] | None = None
        self._abort: Callable[[], object] | None = None
        self._way_taken: tuple[Sequence[Node], Script] | None = None

    def way_taken(self) -> tuple[Sequence[Node], Script]:
        """Nodes of the way that the row took, and the script of that way. Valid after the end of the row."""
        if self._way_taken is None:
            compiled, results = self.specialized.compiled, self.result.node_results
            nodes = played_nodes(self.program, lambda path, node: text_of(results[path], node))

            def value(fill: Fill) -> Any:
                if fill.node is None:
                    return self.arguments[fill.argument or ""]
                return text_of(results[fill.node], node_at(nodes, fill.node))

            outcomes_taken = outcomes(compiled.decision, compiled.parts, value)
            self._way_taken = nodes, self.specialized.scripts.script(outcomes_taken)
        return self._way_taken

    def start(self) -> None:
        """Hands the program to the backend, unless the row was stopped before."""
        if self.result.end is None:
            priority = priority_keywords(self.settings.priority)
            self._abort = self.specialized.backend.play_program(self.program, self.add_event, self.flush, **priority)

    def add_event(self, event: ProgramEvent) -> None:
        """Records an event. Called on any thread."""
        if self.result.end is None and self.result.add_event(event):
            self.result.seconds = time.perf_counter() - self.began
            if self.done is not None:
                self.done.set(None)
            if self.on_end is not None:
                self.on_end(self)

    def stop(self, error: SglError) -> None:
        """Ends the row with an error, unless it has ended."""
        if self.result.end is not None:
            return
        self.add_event(error)
        if self.flush is not None:
            self.flush()
        if self._abort is not None:
            self._abort()

    def wait(self) -> None:
        """Waits for the end of the row."""
        if self.done is not None and self.result.end is None:
            self.done.wait()

    async def finished(self) -> None:
        """Awaits the end of the row."""
        if self.done is not None:
            await self.done.get()

    def state(self) -> CompiledState:
        """State of the run. Removes the callbacks `on_end` and `flush`."""
        self.on_end = self.flush = None
        return CompiledState(self)

    def outcome(self) -> ProgramState | SglError:
        """State of the run, or the error that it ended with. Valid after the end of the row."""
        return self.state().outcome()


class CompiledState(ProgramState):
    """State of a run of a compiled program. Texts of nodes are read directly from the results; the rest of the state is
    built when it is first read.

    Attributes:
        row: row of the run.
        raised: error that the body raises, or None.
    """

    raised: SglError | None

    def __init__(self, row: WholeRow) -> None:
        self.row = row
        self._submitted = self.restored = None

    def __getattr__(self, name: str) -> UserValue:
        if name not in ("branch", "ret_value", "raised"):
            raise no_such_attribute(self, name)
        self._wait_for_end()
        self.build()
        return self.__dict__[name]

    def build(self) -> SglError | None:
        """Builds the state from the results. Returns the error that the body raises, or None."""
        if "branch" not in self.__dict__:
            row = self.row
            settings = replace(row.settings, seed=row.seed)
            nodes, script = row.way_taken()
            specialized, called = row.specialized, row.specialized.called(row.arguments)
            state, raised = rebuilt_state(
                script, nodes, row.arguments, row.result, specialized.backend, settings, called
            )
            self.branch, self.ret_value, self.raised = state.branch, state.ret_value, raised
        return self.raised

    def _wait_for_end(self) -> None:
        try:
            self.row.wait()
        except KeyboardInterrupt:  # as in every read that waits
            self.cancel()
            raise

    def outcome(self) -> ProgramState | SglError:
        """The state itself, or the error that the run ended with. Valid after the end of the row."""
        if self.row.result.failed or self.row.specialized.reads:
            raised = self.build() or self.branch.player.failure
            if raised is not None:
                self.branch.player.failure_reported = True  # the batch reports it
                return raised
        return self

    def __getitem__(self, name: str) -> UserValue:
        if "branch" not in self.__dict__:
            self._wait_for_end()
            if not self.row.result.failed:
                nodes, script = self.row.way_taken()
                if (spec := script.text_variables.get(name)) is not None:
                    return self._text_at(spec, nodes)
        return super().__getitem__(name)

    get_var = __getitem__

    def _text_at(self, spec: Any, nodes: Sequence[Node]) -> Any:
        """Text of the node with a path, or a list of texts for a list of paths."""
        if isinstance(spec, list):
            return [self._text_at(each, nodes) for each in spec]
        return text_of(self.row.result.node_results[spec], node_at(nodes, spec))

    @must_await
    async def get(self, name: str) -> UserValue:
        await self.row.finished()
        return await super().get(name)

    async def async_sync(self) -> None:
        await self.row.finished()
        await super().async_sync()

    def usage(self, name: str | None = None) -> Usage:
        self._wait_for_end()
        result = self.row.result
        alone = self.row.program.decision is None  # else some results may not count
        if name is None and "branch" not in self.__dict__ and alone and not result.failed:
            records = [(each, None) if isinstance(each, Selection) else each for each in result.node_results.values()]
            usages = usages_of(records)
            return msgspec.structs.replace(total_usage(usages), total_s=result.seconds)
        return super().usage(name)

    def cancel(self) -> None:
        self.row.stop(RequestAbortedError("the program was cancelled.", where=user_location()))


class CompiledCall:
    """Run of a compiled program that is played as a whole. Has the interface of a BodyRun.

    Attributes:
        state: state of the run.
    """

    def __init__(
        self, specialized: Specialization, row: Mapping[str, UserValue], backend: BaseBackend, settings: RunSettings
    ) -> None:
        self._row = WholeRow(specialized, row, settings, Variable())
        self.state: ProgramState = self._row.state()
        outer = current_run.get()
        self._deadline, self._timeout = deadline_of(settings.timeout, outer)
        if outer is not None:
            outer.register_inner(self._row)

    def run(self) -> ProgramState:
        """Plays the program, and returns when its body would have returned. Raises the body's error, if any."""
        self._start()
        if self._row.specialized.waits:
            self._wait()
        return self.state

    run_in_thread = run

    def _start(self) -> None:
        self._row.start()
        if self._deadline is not None:
            executor().post(self._limit, self._deadline)

    def _limit(self, deadline: float) -> None:
        remaining_s = max(deadline - time.monotonic(), 0)
        timer = executor().loop.call_later(remaining_s, self._row.stop, too_long(self._timeout))
        assert self._row.done is not None
        self._row.done.when_done(partial(executor().post, timer.cancel))

    def _wait(self) -> None:
        try:
            self._row.wait()
        except BaseException:
            self._row.stop(RequestAbortedError("the program was interrupted."))
            raise
        self._raise()

    def _raise(self) -> None:
        state = self.state
        assert isinstance(state, CompiledState)
        if isinstance(state.outcome(), SglError) and (raised := state.build()) is not None:
            raise raised

    async def arun(self) -> None:
        self._start()
        try:
            await self._row.finished()
        except asyncio.CancelledError:
            self._row.stop(RequestAbortedError("the program was cancelled."))
            raise
        self._raise()
