"""Copies between host and device through pinned memory, without making the host wait."""

from __future__ import annotations

import numpy as np
import torch

from sglang_lite.runtime.kv_cache.pages import Ints

_RING = 4  # buffers in the ring


class Staging:
    """Ring of pinned host buffers for copies of small arrays. A buffer is not overwritten while a
    copy from it is running.

    Args:
        device: device to copy to and from.
        size: int32 numbers in a buffer; a larger array enlarges its buffer.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._buffers = [
                torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(_RING)
            ]
            self._arrays = [b.numpy() for b in self._buffers]
            self._events = [make_event() for _ in range(_RING)]
            self._now = 0
            self._at = 0
            # memory for `host_buffer`
            self._host_buffers = [torch.empty(0, dtype=torch.int32) for _ in range(_RING)]
            self._host_buffer = 0

    def send(self, array: Ints, target: torch.Tensor | None = None) -> torch.Tensor:
        """Starts copying an int32 array to the device, into `target` if given. Returns the copy."""
        if not self._cuda:
            tensor = torch.from_numpy(array.copy()).to(self._device)
            return tensor if target is None else target.copy_(tensor)
        count = array.size
        if self._at + count > len(self._buffers[self._now]):
            self._next_buffer(count)
        place = slice(self._at, self._at + count)
        self._at += count
        self._arrays[self._now][place] = array.reshape(-1)
        source = self._buffers[self._now][place]
        if target is None:
            target = torch.empty(array.shape, dtype=torch.int32, device=self._device)
        target.view(-1).copy_(source, non_blocking=True)
        return target

    def send_all(self, *arrays: Ints) -> list[torch.Tensor]:
        """Sends several arrays [N_i] in one copy. Each is aligned to 16 bytes, so that Triton
        compiles only one version of the kernels that read them.
        """
        starts = np.cumsum([0, *(round_up_to_16_bytes(len(array)) for array in arrays)])
        whole = np.zeros(int(starts[-1]), dtype=np.int32)
        for start, array in zip(starts.tolist(), arrays):
            whole[start : start + len(array)] = array
        sent = self.send(whole)
        return [sent[start : start + len(array)] for start, array in zip(starts.tolist(), arrays)]

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Starts copying a tensor to the host. Returns the copy and the event after which its data
        is valid, or no event if the device is not a GPU.
        """
        if not self._cuda:
            return tensor, None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = make_event()
        done.record()
        return host, done

    def host_buffer(self, count: int) -> torch.Tensor:
        """Returns pinned int32 [count] that a kernel may write and the host may read. The data is
        valid after the next event that `record_event` returns. The memory is reused by the
        `_RING`-th call after this one.
        """
        if not self._cuda:
            return torch.empty(count, dtype=torch.int32, device=self._device)
        self._host_buffer = (self._host_buffer + 1) % _RING
        if count > len(self._host_buffers[self._host_buffer]):
            self._host_buffers[self._host_buffer] = torch.empty(
                2 * count, dtype=torch.int32, pin_memory=True
            )
        return self._host_buffers[self._host_buffer][:count]

    def record_event(self) -> torch.cuda.Event | None:
        """Records and returns an event after everything launched so far. Returns None if the device
        is not a GPU.
        """
        if not self._cuda:
            return None
        done = make_event()
        done.record()
        return done

    def _next_buffer(self, count: int) -> None:
        """Switches to the next buffer, waiting until all copies from it have finished."""
        self._events[self._now].record()
        self._now = (self._now + 1) % _RING
        self._at = 0
        self._events[self._now].synchronize()
        if count > len(self._buffers[self._now]):
            self._buffers[self._now] = torch.empty(2 * count, dtype=torch.int32, pin_memory=True)
            self._arrays[self._now] = self._buffers[self._now].numpy()


def round_up_to_16_bytes(count: int) -> int:
    """Rounds a number of int32 values up to a multiple of 16 bytes."""
    return -(-count // 4) * 4


def make_event(*, timed: bool = False) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call] # torch leaves it untyped
    return event
