"""Compiled programs as they are run: a row is filled and played as a whole, without the body, and without a thread.

The state of a row is made of what its nodes have brought, when somebody reads more of it than texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.compiling import compile_program
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.run import RunSettings
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.replay import RowResult, replay
from sglang_lite.lang.script import Read
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.program.choosing import METHODS, decide
from sglang_lite.program.compiled import CompiledProgram, Filler, walked
from sglang_lite.program.nodes import Program, Select
from sglang_lite.protocol import (
    Played,
    ProgramError,
    ProgramResult,
    RequestAbortedError,
    RequestTimeoutError,
    Selection,
    SglError,
    Usage,
)

if TYPE_CHECKING:
    from sglang_lite.text.chat_template import ChatTemplate

_MOST_FORMS = 8  # backends and settings that a program is compiled for at a time


class Form:
    """A program compiled for a backend and settings.

    Attributes:
        compiled: the program as data.
        script: of its body.
        filler: of its holes.
        draws: it has selections that are drawn, and so needs a seed.
        waits: the body reads values, so that a run is over when those are there.
    """

    def __init__(self, program: BaseProgram, backend: BaseBackend, settings: RunSettings) -> None:
        self.backend, self.settings = backend, settings
        self.template: ChatTemplate | None = backend.get_chat_template()
        self.compiled, self.script = compile_program(program, backend, settings)
        self.filler = Filler(self.compiled)
        selections = [node for _, node in walked(self.compiled.nodes) if isinstance(node, Select)]
        self.draws = any(node.temperature for node in selections)
        self.waits = any(isinstance(action, Read) for action in self.script.actions)

    def fits(self, backend: BaseBackend, settings: RunSettings) -> bool:
        same = self.backend is backend and self.settings.params == settings.params
        return same and self.template is backend.get_chat_template()


class Compiled:
    """A program that is compiled for each backend and settings that it is run with.

    Args:
        program: of the user.

    Attributes:
        forms: that were made, the last one last.
    """

    def __init__(self, program: BaseProgram) -> None:
        self._program = program
        self.forms: list[Form] = []

    @property
    def program(self) -> CompiledProgram:
        """The program as data, as it was compiled last."""
        return self.forms[-1].compiled

    def form(self, backend: BaseBackend, settings: RunSettings) -> Form:
        """The program for a backend and settings.

        Raises:
            CompileError: it can't be compiled; the error names the line.
        """
        for form in self.forms:
            if form.fits(backend, settings):
                return form
        form = Form(self._program, backend, settings)
        self.forms = [*self.forms[1 - _MOST_FORMS :], form]
        return form

    def check_saved(self, saved: CompiledProgram, form: Form) -> None:
        """Refuses a compiled program that was kept and is another one now.

        Raises:
            ProgramError: it names the first difference.
        """
        now = form.compiled
        if saved == now:
            return
        if saved.template != now.template:
            told = "its turns were written with another chat template than that of this backend."
        else:
            told = _difference(saved, now)
        raise ProgramError(
            f"{now.name}: the compiled program that was kept is another one: {told}",
            hint="Compile it again, or take the code and the backend that it was made with.", where=user_location(),
        )  # fmt: skip

    def playable(self, backend: BaseBackend, settings: RunSettings) -> Form | None:
        """The program for a run that is played as a whole; None: the caller's Python, or another one, has a say in it,
        and its body is run."""
        if settings.stream or settings.retries or not settings.push_down or not backend.plays_programs:
            return None
        form = self.form(backend, settings)
        return form if form.compiled.held is None else None

    def call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], backend: BaseBackend, settings: RunSettings
    ) -> CompiledCall | None:
        """A run; None: its body is to be run."""
        form = self.playable(backend, settings)
        if form is None:
            return None
        return CompiledCall(form, self.row(args, kwargs, form), backend, settings)

    def row(self, args: Sequence[Any], kwargs: Mapping[str, Any], form: Form) -> dict[str, Any]:
        """The arguments of a run by name, checked.

        Raises:
            ParameterError: one does not fit, or is no data.
        """
        given = dict(kwargs)
        if args:
            given = dict(self._program.signature.bind_partial(*args, **kwargs).arguments)
        bound = self._program.bind_arguments
        return form.filler.checked({n: v for n, v in given.items() if n not in bound or v is not bound[n]})


def _difference(saved: CompiledProgram, now: CompiledProgram) -> str:
    """The first node that differs, with its line; else what does."""
    before, after = list(walked(saved.nodes)), list(walked(now.nodes))
    for (path, old), (_, new) in zip(before, after):
        if old != new:
            return f"node {list(path)} was {old!r:.80} and is {new!r:.80} [{new.where or old.where}]."
    if len(before) != len(after):
        path, node = max(before, after, key=len)[min(len(before), len(after))]
        return f"node {list(path)}, {node!r:.80}, is only in {'it' if len(before) > len(after) else 'the body'}."
    if saved.fingerprint != now.fingerprint:
        return "the body, or something that it reads, has changed."
    return "its parameters or holes differ."


@dataclass(slots=True, eq=False)
class Playing:
    """A row that is played.

    Attributes:
        seed: that its draws are made of; None where nobody needs one.
        done: set at its end.
    """

    form: Form
    row: Mapping[str, Any]
    settings: RunSettings
    seed: int | None
    program: Program
    result: RowResult
    done: Variable
    began: float
    abort: Callable[[], object] | None = None
    told: Callable[[Playing], object] | None = None

    @classmethod
    def of(cls, form: Form, row: Mapping[str, Any], settings: RunSettings) -> Playing:
        seed = settings.seed
        if seed is None and form.draws:  # as both sides draw
            seed = secrets.randbits(63)
        program = form.filler(row, seed)
        return cls(form, row, settings, seed, program, RowResult({}), Variable(), time.perf_counter())

    def start(self) -> None:
        """Has the backend play it."""
        self.abort = self.form.backend.play_program(self.program, self.take)

    def take(self, event: Played | ProgramResult | SglError) -> None:
        """Takes an event, on any thread."""
        if not self.done.done and self.result.take(event):
            self.end()

    def end(self) -> None:
        self.result.seconds = time.perf_counter() - self.began
        self.done.set(None)
        if self.told is not None:
            self.told(self)

    def stop(self, error: SglError) -> None:
        """Ends it with an error, unless it has ended."""
        if not self.done.done:
            self.result.take(error)
            self.end()
            if self.abort is not None:
                self.abort()

    def state(self) -> CompiledState:
        return CompiledState(self)


class CompiledState(ProgramState):
    """The state of a compiled program's run. What it has beside texts of nodes is made when it is first read.

    Attributes:
        playing: the run.
    """

    raised: SglError | None

    def __init__(self, playing: Playing) -> None:
        self.playing = playing
        self._submitted = None

    def __getattr__(self, name: str) -> Any:
        if name not in ("branch", "ret_value", "raised"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._wait_for_end()
        self.build()
        return self.__dict__[name]

    def build(self) -> SglError | None:
        """Makes the state of what has come. Returns what the body raises."""
        if "branch" not in self.__dict__:
            playing = self.playing
            settings = replace(playing.settings, seed=playing.seed)
            state, raised = replay(
                playing.form.script, playing.program, playing.row, playing.result, playing.form.backend, settings
            )
            self.branch, self.ret_value, self.raised = state.branch, state.ret_value, raised
        return self.raised

    def _wait_for_end(self) -> None:
        try:
            self.playing.done.wait()
        except KeyboardInterrupt:  # as in any reading
            self.cancel()
            raise

    def outcome(self) -> ProgramState | SglError:
        """The state, or the error that it has ended with. After its end."""
        if self.playing.result.failed or self.playing.form.script.reads:
            raised = self.build() or self.branch.player.failure
            if raised is not None:
                return raised
        return self

    def __getitem__(self, name: str) -> Any:
        if "branch" not in self.__dict__:
            spec = self.playing.form.script.plain.get(name)
            if spec is not None:
                self._wait_for_end()
                if not self.playing.result.failed:
                    return self._plain(spec)
        return super().__getitem__(name)

    get_var = __getitem__

    def _plain(self, spec: Any) -> Any:
        """The text of a node, or the list of several nodes' texts."""
        if isinstance(spec, list):
            return [self._plain(each) for each in spec]
        found = self.playing.result.brought[spec]
        if isinstance(found, list):
            texts = [each.text for each in found]
            return texts[0] if len(texts) == 1 else [each.text for each in sorted(found, key=lambda g: g.index)]
        assert isinstance(found, Selection)
        node: Any = self.playing.program.nodes
        for i, step in enumerate(spec):
            node = node[step] if not i % 2 else node.branches[step]
        return decide(found, node.choices, METHODS[node.method], node.temperature, node.seed).decision

    async def get(self, name: str) -> Any:
        await self.playing.done.get()
        return await super().get(name)

    async def async_sync(self) -> None:
        await self.playing.done.get()
        await super().async_sync()

    def usage(self, name: str | None = None) -> Usage:
        self._wait_for_end()
        return super().usage(name)

    def cancel(self) -> None:
        self.playing.stop(RequestAbortedError("the program was cancelled.", where=user_location()))


class CompiledCall:
    """A run of a compiled program, as `Call` is of one whose body runs.

    Attributes:
        state: of the run.
    """

    def __init__(self, form: Form, row: Mapping[str, Any], backend: BaseBackend, settings: RunSettings) -> None:
        self._playing = Playing.of(form, row, settings)
        self.state: ProgramState = self._playing.state()
        self._timeout = settings.timeout

    def run(self) -> ProgramState:
        """Plays it; returns when its body would have returned. What that raises is raised."""
        self._start()
        if self._playing.form.waits:
            self._wait()
        return self.state

    run_in_thread = run

    def run_streaming(self) -> None:
        with contextlib.suppress(Exception):  # the state has it
            self.run()

    def _start(self) -> None:
        self._playing.start()
        if self._timeout is not None:
            executor().post(self._limit, self._timeout)

    def _limit(self, timeout: float) -> None:
        error = RequestTimeoutError(f"the run took longer than its timeout of {timeout:g} s.")
        left = self._playing.began + timeout - time.perf_counter()
        timer = executor().loop.call_later(max(left, 0), self._playing.stop, error)
        self._playing.done.when_done(partial(executor().post, timer.cancel))

    def _wait(self) -> None:
        try:
            self._playing.done.wait()
        except BaseException:
            self._playing.stop(RequestAbortedError("the program was interrupted."))
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
            await self._playing.done.get()
        except asyncio.CancelledError:
            self._playing.stop(RequestAbortedError("the program was cancelled."))
            raise
        self._raise()

    async def arun_streaming(self) -> None:
        with contextlib.suppress(Exception):  # the state has it
            await self.arun()
