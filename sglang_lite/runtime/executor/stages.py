"""Steps on their way through a model's stages, as one rank on a GPU sees them.

Each stage computes another step at the same time. When the next one begins, every stage hands the rows of its step on
to the stage behind it. All ranks have the same calls in the same order, so that their exchanges meet:

    calls     begin(0)   begin(1)   ended(0)   begin(2)   ended(1)   begin(3)   ended(2)
    stage 0   0          1                     2                     3
    stage 1              0                     1                     2
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from sglang_lite.runtime.executor.gpu_runner import GpuForward, GpuRunner, empty_rows
from sglang_lite.runtime.executor.step_record import StepRecord
from sglang_lite.runtime.models.gpu_ranks import GpuRanks


@dataclass(slots=True)
class _Step:
    """A step that has begun, with its forward through this rank's stage, which may not have been launched yet."""

    record: StepRecord
    forward: GpuForward | None = None


class Stages:
    """Steps that have begun, each at another stage.

    Args:
        runner: runner of this rank's stage.
        ranks: all ranks.
    """

    def __init__(self, runner: GpuRunner, ranks: GpuRanks) -> None:
        self._runner, self._ranks, self._own = runner, ranks, ranks.parallel.stage
        count = ranks.parallel.pp
        self._steps = deque[_Step | None]([None] * count, count)  # by stage

    def begin(self, record: StepRecord) -> GpuForward | None:
        """Begins a step, for which the others go on by a stage. Returns its forward on ranks of the first stage."""
        step = _Step(record)
        self._go_on(step)
        return step.forward

    def ended(self, number: int) -> GpuForward:
        """Lets a step go on to the last stage, if it is not there. Returns its forward."""
        while (step := self._steps[-1]) is None or step.record.step != number:
            assert any(self._steps), "only a step that has begun, and is not behind the last stage, can end"
            self._go_on(None)
        assert step.forward is not None, "it has passed this rank's stage"
        return step.forward

    def _go_on(self, first: _Step | None) -> None:
        received: torch.Tensor | None = None
        for stage in reversed(range(len(self._steps) - 1)):
            step = self._steps[stage]
            if step is not None:
                rows = self._ranks.hand_on(self._rows(step, stage), stage)
                received = rows if stage == self._own - 1 else received
        self._steps.appendleft(first)
        here, last = self._steps[self._own], self._steps[-1]
        if here is not None:
            here.forward = self._runner.forward(here.record, received)
        if last is not None and len(self._steps) > 1:
            assert last.forward is not None
            if last.record.scores or last.forward.token_slots is not None:
                self._runner.end(last.forward, self._rows(last, len(self._steps) - 1))

    def _rows(self, step: _Step, stage: int) -> torch.Tensor:
        """Rows [T, hidden_size] of a step behind a stage if that is this rank's, else memory for them."""
        count = len(step.record.ids)
        if stage != self._own:
            return empty_rows(self._runner.model, count)
        assert step.forward is not None
        return step.forward.hidden[:count]
