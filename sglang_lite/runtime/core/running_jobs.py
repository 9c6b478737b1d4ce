"""Running work of a branch. Its results are ignored once the branch has given it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from sglang_lite.protocol import EngineClosedError
from sglang_lite.runtime.core.generation_job import GenerationJob
from sglang_lite.runtime.core.selection_job import SelectionJob

if TYPE_CHECKING:
    from sglang_lite.runtime.core.program_branch import ProgramOfBranches

_P = ParamSpec("_P")


class RunningJobs:
    """Running jobs of a branch, and callbacks that are void once the branch gives them up.

    Args:
        player: program of the branch.

    Attributes:
        epoch: number of times that the work was given up.
    """

    def __init__(self, player: ProgramOfBranches) -> None:
        self._player = player
        self.epoch = 0  # callbacks made in an earlier epoch do nothing
        self._jobs: set[GenerationJob | SelectionJob] = set()

    def begin(self, job: GenerationJob | SelectionJob) -> None:
        """Registers a job, to be aborted if the work is given up."""
        self._jobs.add(job)

    def end(self, job: GenerationJob | SelectionJob) -> None:
        """Removes a job that has ended."""
        self._jobs.discard(job)

    def cancel_all(self) -> None:
        """Aborts all jobs, and voids all outstanding callbacks."""
        self.epoch += 1
        jobs, self._jobs = self._jobs, set()
        for job in jobs:
            job.abort()

    def guarded(self, call: Callable[_P, object]) -> Callable[_P, None]:
        """Wraps a function for the loop's thread, so that it does nothing once the work is given up."""
        epoch = self.epoch

        def guarded_call(*args: _P.args, **kwargs: _P.kwargs) -> None:
            if self.epoch == epoch:
                call(*args, **kwargs)
                self._player.settle()

        return guarded_call

    def future_callback(self, call: Callable[[], object]) -> Callable[[object], None]:
        """Wraps a function as a future's callback for any thread: posts `guarded(call)` to the loop's thread."""
        guarded_call = self.guarded(call)

        def callback(_: object) -> None:
            try:
                self._player.parts.loop.inbox.post(guarded_call)
            except EngineClosedError as error:
                self._player.fail(error)

        return callback
