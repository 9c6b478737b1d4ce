"""Work of a branch that is under way elsewhere: what comes of it once the branch has given it up is nobody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from sglang_lite.protocol import EngineClosedError
from sglang_lite.runtime.core.generation_job import GenerationJob
from sglang_lite.runtime.core.selection_job import SelectionJob

if TYPE_CHECKING:
    from sglang_lite.runtime.core.program_branch import ProgramOfBranches

_P = ParamSpec("_P")


class WorkUnderWay:
    """
    Args:
        player: the program of the branch.

    Attributes:
        epoch: how often it was given up.
    """

    def __init__(self, player: ProgramOfBranches) -> None:
        self._player = player
        self.epoch = 0  # calls made for an earlier one do nothing
        self._jobs: set[GenerationJob | SelectionJob] = set()

    def begin(self, job: GenerationJob | SelectionJob) -> None:
        """Notes a job, which is aborted when the work is given up."""
        self._jobs.add(job)

    def end(self, job: GenerationJob | SelectionJob) -> None:
        """Forgets a job that has ended."""
        self._jobs.discard(job)

    def give_up(self) -> None:
        """Aborts all jobs, and voids all calls that are to come back."""
        self.epoch += 1
        jobs, self._jobs = self._jobs, set()
        for job in jobs:
            job.abort()

    def unless_over(self, call: Callable[_P, object]) -> Callable[_P, None]:
        """A call to be made on the loop's thread, which does nothing once the work is given up."""
        epoch = self.epoch

        def back(*args: _P.args, **kwargs: _P.kwargs) -> None:
            if self.epoch == epoch:
                call(*args, **kwargs)
                self._player.settle()

        return back

    def later(self, call: Callable[[], object]) -> Callable[[object], None]:
        """`unless_over` for a future's callback, which may come on any thread."""
        back = self.unless_over(call)

        def later(_: object) -> None:
            try:
                self._player.parts.loop.inbox.post(back)
            except EngineClosedError as error:
                self._player.fail(error)

        return later
