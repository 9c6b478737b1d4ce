"""Calls of programs, which can be added to a state, read from, or run separately."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeAlias

from sglang_lite.lang.argument_names import unknown_argument_error
from sglang_lite.lang.body_run import BodyRun, check_return_value, nesting_error
from sglang_lite.lang.execution.control_text import collect_argument_control_tokens
from sglang_lite.lang.expressions import BaseProgram, R, SglCall
from sglang_lite.lang.run_options import RUN_OPTIONS, run_options, with_signature_of
from sglang_lite.lang.state import ProgramState, user_location
from sglang_lite.protocol import Location, ParameterError, ProgramError
from sglang_lite.protocol.anything import UserValue

logger = logging.getLogger("sglang_lite")


class _Unused:
    """Logs a warning if a call is garbage-collected without ever being added to a state or read
    from.

    A RecursionError may interrupt both the construction and the destruction of a call. Nothing is
    logged then, and the destructor needs no deeper stack than the constructor.

    Attributes:
        name: name of the program, or "" once the call has been used.
    """

    name = ""

    def __init__(self, name: str, where: Location | None) -> None:
        self._where = where
        self.name = name

    def __del__(self) -> None:
        if self.name:
            with contextlib.suppress(RecursionError):
                logger.warning(
                    "%s(…) was neither added (s += …) nor read from, so it has not run. [%s]",
                    self.name,
                    self._where,
                )


if TYPE_CHECKING:
    _Readable: TypeAlias = ProgramState[R]
else:
    _Readable = Generic  # `__getattr__` finds everything else in the call's state


class ProgramCall(SglCall, _Readable[R]):  # type: ignore[misc] # both have `+`
    """Call of a program. If it is added to a state, the body continues that state's text and
    variables.

    Reading from a call that was added reads from that state. Reading from any other call runs the
    program separately. `run` and `arun` also run it separately, with their own options.
    """

    __slots__ = ("_added", "_args", "_kwargs", "_options", "_program", "_state", "_unused")

    def __init__(
        self,
        program: BaseProgram[R],
        args: Sequence[UserValue],
        kwargs: Mapping[str, UserValue],
        options: Mapping[str, UserValue],
    ) -> None:
        self._program = program
        self._args = args
        self._kwargs = kwargs
        self._options = options
        self._state: ProgramState[R] | None = None
        self._added = False
        self._unused = _Unused(program.name, user_location())

    def play_on(self, state: ProgramState) -> None:
        from sglang_lite.lang.tracer import TracingScope

        program = self._program
        self._unused.name = ""
        if self._state is not None and not self._added:
            raise ProgramError(
                f"{program.name}(…) was read from before, so it has already run on its own.",
                where=user_location(),
            )
        if program.is_async:
            raise ProgramError(
                f"{program.name} is async, and `+=` can't await it.",
                hint="Use await s.call(…).",
                where=user_location(),
            )
        if self._options:
            raise ParameterError(
                min(self._options),
                f"an added {program.name}(…) runs with the settings of the run it is added to.",
                hint="Give it to the generation, or use s.call(…).",
                where=user_location(),
            )
        kwargs = program.bind_call(self._args, dict(self._kwargs), program.name)
        self._added = True
        self._state = state
        run = state.branch.run
        run.spelled = collect_argument_control_tokens(
            run.spelled, run.backend.control_texts, program, self._args, kwargs
        )
        try:
            returned = program.func(state, *self._args, **kwargs)
        except RecursionError as error:
            # a trace reports it at the call's line
            if TracingScope.get_current_scope() is not None:
                raise
            raise nesting_error(program.name) from error
        state.ret_value = check_return_value(program, returned)

    @property
    def state(self) -> ProgramState[R]:
        """State of the called program. If the call was not added, the first access runs the program
        separately.
        """
        from sglang_lite.lang.tracer import TracingScope, trace_call

        self._unused.name = ""
        if self._state is None:
            if TracingScope.get_current_scope() is not None:
                self._state = trace_call(self._program, self._args, dict(self._kwargs))
            else:
                self._state = self.run()
        return self._state

    @with_signature_of(run_options)
    def run(self, **options: UserValue) -> ProgramState[R]:
        """Runs the program separately. `help(program.run)` describes the options.

        Raises:
            ParameterError: `run` has no such option, or it has an invalid value.
        """
        return self._prepare_run(options).start()

    @with_signature_of(run_options)
    async def arun(self, **options: UserValue) -> ProgramState[R]:
        """Runs the program like `run`, for coroutines."""
        return await self._prepare_run(options).astart()

    def _prepare_run(self, options: Mapping[str, UserValue]) -> BodyRun:
        self._unused.name = ""
        for name in options:
            if name not in RUN_OPTIONS:
                raise unknown_argument_error("run", name, RUN_OPTIONS)
        run: BodyRun = self._program.prepare_run(
            self._args, dict(self._kwargs), {**self._options, **options}
        )
        return run

    if not TYPE_CHECKING:  # for type checkers, they are those of a state

        def __getitem__(self, name):
            return self.state[name]

        def __contains__(self, name):
            return name in self.state

        def __getattr__(self, name):
            if name in ProgramCall.__slots__:  # unset: a RecursionError interrupted the constructor
                raise AttributeError(name)
            return getattr(self.state, name)

    def __repr__(self) -> str:
        return f"Call({self._program.name})"
