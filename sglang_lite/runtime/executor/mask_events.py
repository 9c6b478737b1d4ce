"""GPU events that measure how long draws wait for masks."""

from __future__ import annotations

from itertools import cycle

import torch

from sglang_lite.runtime.executor.staging import make_event
from sglang_lite.runtime.executor.step_record import StepRecord

_RING_SIZE = 8  # events in the ring: a measured step uses two until its tokens are read
# One in this many steps with masks is measured: recording events takes the host as long as a
# launch.
_MEASURE_EVERY = 8


class MaskEvents:
    """Timed events that measure how long a runner's draws wait for masks. Records none if the
    device is not a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._ring = cycle(
            [make_event(timed=True) for _ in range(_RING_SIZE * (device.type == "cuda"))]
        )
        self._on_gpu = device.type == "cuda"
        # number of steps whose draws may wait for masks
        self._masked_steps = 0

    def record_after_forward(self, record: StepRecord) -> torch.cuda.Event | None:
        """Records an event after a step's forward if the step's draws may have to wait for masks.
        Measures only every `_MEASURE_EVERY`-th such step. Returns None for all others.
        """
        if not self._on_gpu or not record.watched:
            return None
        self._masked_steps += 1
        return self.record_mask_event() if self._masked_steps % _MEASURE_EVERY == 1 else None

    def record_mask_event(self) -> torch.cuda.Event:
        """Records an event after everything launched so far."""
        mark = next(self._ring)
        mark.record()
        return mark
