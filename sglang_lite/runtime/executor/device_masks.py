"""Masks of a step's draws: pinned memory that the loop writes, and the device's copy of it."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from sglang_lite.runtime.executor.sampler import Masks
from sglang_lite.runtime.kv_cache.pages import Ints

_READ_THERE = 4  # rows whose draws read masks from the host's memory: to start a copy takes longer


class DeviceMasks:
    """Masks are sent by a stream of its own, while the forward runs that the draws come after; those of few rows stay
    on the host, where kernels read them.

    What was sent is free again, here and there, when the step's tokens have been read; no other masks come sooner.

    Args:
        device: to send to.
        rows: most masks, and most rows of a step.
        words: int32 numbers of a mask.

    Attributes:
        words: int32 [rows, words], to be written.
    """

    def __init__(self, device: torch.device, rows: int, words: int) -> None:
        cuda = device.type == "cuda"
        self._host = torch.empty((rows, words), dtype=torch.int32, pin_memory=cuda)
        self._host_rows = torch.full((rows,), -1, dtype=torch.int32, pin_memory=cuda)
        self._masks = torch.empty((rows, words), dtype=torch.int32, device=device)
        self._rows = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.words: Ints = self._host.numpy()
        self._which: Ints = self._host_rows.numpy()

    def of(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All masks, where kernels can read them, and which of them each of so many rows has."""
        if rows <= _READ_THERE:
            return self._host, self._host_rows[:rows]
        return self._masks, self._rows[:rows]

    def send(self, masks: Masks, rows: int) -> None:
        """Starts sending masks, which are the first of `words`, for what is launched next.

        Args:
            rows: that draw; those beyond `masks.rows` have none.
        """
        count, real = len(masks.words), len(masks.rows)
        self._which[:real], self._which[real:rows] = masks.rows, -1
        if rows <= _READ_THERE:
            return
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._masks[:count].copy_(self._host[:count], non_blocking=True)
            self._rows[:rows].copy_(self._host_rows[:rows], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._masks.device).wait_stream(self._stream)
