"""Compiled programs: a specialization for each backend and settings, and runs and batches that need no body."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.compilation.held_row import HeldRow
from sglang_lite.lang.compilation.row_pool import RemoteRowPool, RowPool
from sglang_lite.lang.compilation.specialization import Specialization
from sglang_lite.lang.compilation.whole_row import CompiledCall, WholeRow
from sglang_lite.lang.execution.run import RunSettings, current_run
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.state import user_location
from sglang_lite.program.compiled import CompiledProgram
from sglang_lite.program.control_flow import all_nodes
from sglang_lite.protocol import ParameterError, ProgramError, SglError
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.batches.batch import BatchPlan
    from sglang_lite.lang.batches.body_pool import Pool, Report

_MOST_SPECIALIZATIONS = 8  # maximum number that is kept for a program


class Compiled:
    """Program that is compiled for each backend and settings with which it is run.

    Args:
        program: user's program.

    Attributes:
        specializations: specializations that are kept, the newest last.
    """

    def __init__(self, program: BaseProgram) -> None:
        self._program = program
        self.specializations: list[Specialization] = []

    @property
    def program(self) -> CompiledProgram:
        """Program as data, of the newest specialization."""
        return self.specializations[-1].compiled

    def specialized(self, backend: BaseBackend, settings: RunSettings) -> Specialization:
        """Specialization for a backend and settings, which is made if it does not exist yet.

        Raises:
            CompileError: the program can't be compiled; the error names the line.
        """
        for specialized in self.specializations:
            if specialized.fits(backend, settings):
                return specialized
        specialized = Specialization(self._program, backend, settings)
        self.specializations = [*self.specializations[1 - _MOST_SPECIALIZATIONS :], specialized]
        return specialized

    def check_saved(self, saved: CompiledProgram, specialized: Specialization) -> None:
        """Checks that a saved compiled program equals a specialization of this one.

        Raises:
            ProgramError: the two differ; the error names the first difference.
        """
        now = specialized.compiled
        if saved == now:
            return
        if saved.template != now.template:
            told = "its turns were written with a chat template other than this backend's."
        else:
            told = _difference(saved, now)
        raise ProgramError(
            f"{now.name}: the saved compiled program differs from this one: {told}",
            hint="Compile it again, or use the code and the backend that it was made with.", where=user_location(),
        )  # fmt: skip

    def playable(self, backend: BaseBackend, settings: RunSettings) -> Specialization | None:
        """Specialization for a run that is played as a whole or from hold to hold; None if the body has to be run."""
        outer = current_run.get()
        push_down = settings.push_down and (outer is None or outer.push_down)
        if settings.stream or settings.retries or not push_down or not backend.plays_programs:
            return None
        if settings.budget is not None:
            return None
        settings.check_priority(backend)
        specialized = self.specialized(backend, settings)
        if (
            specialized.compiled.held is None
            and specialized.compiled.decision is not None
            and not backend.plays_decisions
        ):
            return None
        return specialized

    def call(
        self, args: Sequence[UserValue], kwargs: Mapping[str, UserValue], backend: BaseBackend, settings: RunSettings
    ) -> CompiledCall | HeldRow | None:
        """Run of the compiled program; None if the body has to be run."""
        specialized = self.playable(backend, settings)
        if specialized is None:
            return None
        row = self.row(args, kwargs, specialized)
        specialized.check(row)
        if specialized.compiled.held is not None:
            return HeldRow(specialized, row, settings)
        return CompiledCall(specialized, row, backend, settings)

    def pool(self, plan: BatchPlan, backend: BaseBackend, report: Report, *, until_released: bool) -> Pool | None:
        """Pool for the rows of a batch whose outcomes are not known yet; None if their bodies have to be run.

        Raises:
            ParameterError: an argument does not fit the program or is not data.
        """
        specialized = self.playable(backend, plan.settings)
        if specialized is None:
            return None
        rows = {i: self.row(args, kwargs, specialized, f"batch_kwargs[{i}]") for i, (args, kwargs) in plan.pending}
        settings, timeout = plan.settings, plan.settings.timeout
        if rows:
            with contextlib.suppress(ParameterError):  # becomes the outcome of that row
                specialized.check(next(iter(rows.values())))
        held_row = specialized.compiled.held is not None  # one request can't play rows with holds
        if held_row or not backend.plays_rows:
            make = HeldRow if held_row else WholeRow
            jobs = [(index, partial(make, specialized, row, settings)) for index, row in rows.items()]
            return RowPool(jobs, plan.window, report, until_released=until_released, timeout=timeout)
        whole: dict[int, WholeRow] = {}
        failed: dict[int, SglError] = {}
        for index, row in rows.items():
            try:
                whole[index] = WholeRow(specialized, row, settings)
            except SglError as error:  # the outcome of that row
                failed[index] = error
        return RemoteRowPool(
            backend, whole, failed, plan.window, report, until_released=until_released, timeout=timeout
        )

    def row(
        self,
        args: Sequence[UserValue],
        kwargs: Mapping[str, UserValue],
        specialized: Specialization,
        what: str = "arguments",
    ) -> dict[str, UserValue]:
        """Checked arguments of a run by name, including defaults.

        Args:
            what: name of the arguments, for errors.

        Raises:
            ParameterError: an argument does not fit the program or is not data.
        """
        given = dict(kwargs)
        if args:
            given = dict(self._program.signature.bind_partial(*args, **kwargs).arguments)
        for name, value in self._program.bind_arguments.items():
            if name in given and given[name] is value:
                del given[name]
        return specialized.filler.checked(given, what)


def _difference(saved: CompiledProgram, now: CompiledProgram) -> str:
    """Description of the first node that differs, with its line, or else of the other difference."""
    before, after = list(all_nodes(saved.nodes, saved.parts)), list(all_nodes(now.nodes, now.parts))
    for (path, old), (_, new) in zip(before, after):
        same = old == new  # `!=` is the struct's own, which also compares lines
        if not same:
            return f"node {list(path)} was {old!r:.80} and is {new!r:.80} [{new.where or old.where}]."
    if len(before) != len(after):
        path, node = max(before, after, key=len)[min(len(before), len(after))]
        return f"node {list(path)}, {node!r:.80}, is only in {'it' if len(before) > len(after) else 'the body'}."
    if saved.fingerprint != now.fingerprint:
        return "the body, or a value that it reads, has changed."
    return "its parameters, holes or decisions differ."
