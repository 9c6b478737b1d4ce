"""Steps passing through a model's stages, as seen by one rank on a GPU.

Each stage computes a different step at the same time. When a step begins, the steps before it move
on, up to the first empty stage; when a step has to end, all steps move on. A step after the last
stage stays there until it is drawn from, since its rows are in the memory of the next step. All
ranks make the same calls in the same order, so that their exchanges match:

    calls     begin_step(0)  begin_step(1)  finish_step(0)  begin_step(2)  finish_step(1)
    stage 0   0              1                              2
    stage 1                  0                              1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_lite.runtime.executor.gpu_runner import GpuForward, GpuRunner, allocate_rows
from sglang_lite.runtime.executor.step_record import StepRecord
from sglang_lite.runtime.models.gpu_ranks import GpuRanks


@dataclass(slots=True)
class _Step:
    """Step that has begun. It has a forward once this rank's stage has been launched."""

    record: StepRecord
    forward: GpuForward | None = None


class Stages:
    """Steps that have begun, each at a different stage.

    Args:
        runner: runner of this rank's stage.
        ranks: all ranks.
    """

    def __init__(self, runner: GpuRunner, ranks: GpuRanks) -> None:
        self._runner = runner
        self._ranks = ranks
        self._own = ranks.parallel.stage
        self._steps: list[_Step | None] = [None] * ranks.parallel.pp  # by stage

    def begin_step(self, record: StepRecord) -> GpuForward | None:
        """Begins a step. Returns its forward on ranks of the first stage, and None on others."""
        step = _Step(record)
        self._advance_steps(
            step, self._steps.index(None) if None in self._steps else len(self._steps) - 1
        )
        return step.forward

    def finish_step(self, number: int) -> GpuForward:
        """Moves a step to the last stage if it is not there yet. Returns its forward, which must be
        drawn from before the next call.
        """
        while (step := self._steps[-1]) is None or step.record.step != number:
            assert any(self._steps), "only a step that has begun, and was not drawn from, can end"
            self._advance_steps(None, len(self._steps) - 1)
        assert step.forward is not None, "it has passed this rank's stage"
        self._steps[-1] = None
        return step.forward

    def _advance_steps(self, first: _Step | None, end: int) -> None:
        """Moves each step before stage `end` on to the next stage, and puts step `first`, if given,
        in the first one. The step at `end` is dropped, so it must no longer be needed.
        """
        received: torch.Tensor | None = None
        for stage in reversed(range(end)):
            step = self._steps[stage]
            if step is not None:
                rows = self._ranks.pass_to_next_stage(self._rows_after_stage(step, stage), stage)
                received = rows if stage == self._own - 1 else received
        del self._steps[end]
        self._steps.insert(0, first)
        here = self._steps[self._own]
        last = len(self._steps) - 1
        if here is not None and self._own <= end:
            here.forward = self._runner.forward(here.record, received)
        ending = self._steps[last]
        if ending is not None and end == last > 0:
            assert ending.forward is not None
            if ending.record.scores or ending.forward.token_slots is not None:
                self._runner.finish_forward(ending.forward, self._rows_after_stage(ending, last))

    def _rows_after_stage(self, step: _Step, stage: int) -> torch.Tensor:
        """Returns the output rows [T, hidden_size] of a stage for a step. On ranks of other stages,
        returns uninitialised memory of this shape.
        """
        count = len(step.record.ids)
        if stage != self._own:
            return allocate_rows(self._runner.model, count)
        assert step.forward is not None
        return step.forward.hidden[:count]
