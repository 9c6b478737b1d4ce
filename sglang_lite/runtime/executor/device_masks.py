"""Token masks of a step's draws: pinned memory that the step loop writes, and its copy on the device."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from sglang_lite.runtime.executor.sampler import Masks
from sglang_lite.runtime.kv_cache.pages import Ints

_MAX_ROWS_READ_FROM_HOST = 4  # most rows whose draws read masks from host memory, as starting a copy takes longer


class DeviceMasks:
    """Token masks, sent on a separate stream while the forward before the draws runs. For few rows they stay on the
    host, where kernels read them.

    Only one step's masks exist at a time: new ones may be written only after the tokens of the step have been read.

    Args:
        device: device to send masks to.
        rows: maximum number of masks, and of rows of a step.
        words: int32 words of a mask.

    Attributes:
        words: int32 [rows, words], memory for the caller to write masks to.
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
        """Returns all masks in memory that kernels can read, and the index of each row's mask, for a step of `rows`
        rows."""
        if rows <= _MAX_ROWS_READ_FROM_HOST:
            return self._host, self._host_rows[:rows]
        return self._masks, self._rows[:rows]

    def send(self, masks: Masks, rows: int) -> None:
        """Starts sending masks, the first ones of `words`; kernels launched afterwards see them.

        Args:
            masks: number of masks, and the mask of each row.
            rows: number of rows that draw; those beyond `masks.rows` have no mask.
        """
        count, real = len(masks.words), len(masks.rows)
        self._which[:real], self._which[real:rows] = masks.rows, -1
        if rows <= _MAX_ROWS_READ_FROM_HOST:
            return
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._masks[:count].copy_(self._host[:count], non_blocking=True)
            self._rows[:rows].copy_(self._host_rows[:rows], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._masks.device).wait_stream(self._stream)
