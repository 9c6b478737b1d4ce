"""Host memory for pages of the KV cache, and copies between it and the device. All planes of a
page, such as its keys and its values, are copied together.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.executor.staging import make_event
from sglang_lite.runtime.kernels.pinned_memory import pin_memory, unpin_memory
from sglang_lite.runtime.kernels.reference.blocks import BlockCopy
from sglang_lite.runtime.kv_cache.pages import Ints

_ALIGNED = 4  # rows are padded to this many numbers, so that each begins at a multiple of 16 bytes
_MEASURED = 8  # the newest measurement of a page's time has the weight 1 / 8


def page_bytes(planes: Sequence[torch.Tensor], page_size: int) -> int:
    """Returns the bytes of a page in all planes [heads, slots, size]. A page of a model without
    attention has one byte, which is not used, as every page is stored somewhere.
    """
    size = sum(plane.shape[0] * plane.shape[2] * plane.itemsize for plane in planes)
    return max(size * page_size, 1)


class CpuPageMemory:
    """Memory for the pages of a model on the CPU; a `PageMemory`. Copies are finished when their
    method returns.

    Args:
        planes: the model's keys and values, each [heads, slots, size].
        page_size: tokens in a page.
        slots: number of pages that fit.
    """

    def __init__(self, planes: Sequence[torch.Tensor], page_size: int, slots: int) -> None:
        shape = slots, page_bytes(planes, page_size)
        # mmap maps memory when it is first touched.
        memory = np.frombuffer(mmap(-1, math.prod(shape)), np.uint8)
        self.rows: NDArray[np.uint8] = memory.reshape(shape)
        self.launched = 0
        self.page_s = 0.0
        self._copy = BlockCopy(planes, torch.from_numpy(memory), page_size)

    def count_completed(self) -> int:
        """Returns the number of completed copies, which is all of them."""
        return self.launched

    def copy_to_host(self, pages: Ints, slots: Ints) -> None:
        """Copies pages, int32 [N], to slots of this memory."""
        self.launched += 1
        self._copy(torch.from_numpy(pages), torch.from_numpy(slots), to_host=True)

    def close(self) -> None:
        """Does nothing: the memory is freed with this object."""

    def copy_to_device(self, slots: Ints, pages: Ints) -> None:
        """Copies slots of this memory, int32 [N], to pages."""
        began = time.perf_counter()
        self.launched += 1
        self._copy(torch.from_numpy(pages), torch.from_numpy(slots), to_host=False)
        self.page_s = _moving_average(self.page_s, (time.perf_counter() - began) / len(pages))


class PinnedMemory:
    """Pinned memory for copies of what a GPU holds; a `PageMemory`. Copies run on a separate stream,
    after everything launched before them on the current one. A subclass launches the copies.

    A copy to the host is requested at the end of each prompt and each answer. Requests are
    gathered until `count_completed` is called, as every plan of a step does, and are then launched
    as one copy.

    Args:
        device: the GPU, or the CPU if kernels are interpreted.
        size: bytes of a page.
        slots: number of pages that fit.

    Raises:
        ModelError: this much memory can't be pinned.
    """

    def __init__(self, device: torch.device, size: int, slots: int) -> None:
        try:
            pinned = device.type == "cuda"  # else kernels are interpreted
            self._memory = (
                pin_memory(slots * size) if pinned else torch.empty(slots * size, dtype=torch.uint8)
            )
            if pinned:
                self._unpin = weakref.finalize(self, unpin_memory, self._memory.data_ptr())
                self._unpin.atexit = False
        except (RuntimeError, OSError) as error:
            raise ModelError(
                f"{slots * size / 2**30:.1f} GiB of the host's memory can't be pinned: {error}",
                hint="Lower hicache_size or hicache_ratio.",
            ) from error
        self.rows: NDArray[np.uint8] = self._memory.numpy().reshape(slots, size)
        self.launched = 0
        self.page_s = 0.0
        cuda: Any = torch.cuda  # which is untyped
        self._device = device
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        # running copies: number, event after the copy, event before it, number of pages
        self._running: deque[tuple[int, Any, Any, int]] = deque()
        self._gathered: dict[int, int] = {}  # by slot, the last page that is to be copied there
        self._completed = 0

    def _prepare_copy(self, pages: Ints, slots: Ints) -> Callable[[bool], None]:
        """Returns a function that launches a copy of pages to slots, or in the opposite direction,
        on the current stream. It is called with whether to copy to the host.
        """
        raise NotImplementedError

    def count_completed(self) -> int:
        """Launches the gathered copies, and returns the number of copies that have completed."""
        self._launch_gathered_copies()
        while self._running and self._running[0][1].query():
            self._completed, ended, began, pages = self._running.popleft()
            if pages:
                self.page_s = _moving_average(self.page_s, began.elapsed_time(ended) / 1000 / pages)
        return self.launched if self._stream is None else self._completed

    def copy_to_host(self, pages: Ints, slots: Ints) -> None:
        """Requests copies of pages, int32 [N], to slots of this memory; `count_completed` launches
        them.
        """
        self.launched += 1
        self._gathered.update(zip(slots.tolist(), pages.tolist()))

    def copy_to_device(self, slots: Ints, pages: Ints) -> None:
        """Starts copying slots of this memory, int32 [N], to pages."""
        self._launch_gathered_copies()
        self.launched += 1
        self._launch_copy(pages, slots, to_host=False)

    def close(self) -> None:
        """Unpins the memory once all copies have finished. No copy may be requested afterwards."""
        if self._stream is not None:
            self._unpin()

    def _launch_gathered_copies(self) -> None:
        if self._gathered:
            slots, pages = np.array(list(self._gathered.items()), dtype=np.int32).T
            self._gathered.clear()
            self._launch_copy(pages, slots, to_host=True)

    def _launch_copy(self, pages: Ints, slots: Ints, *, to_host: bool) -> None:
        """Launches a copy between pages and slots. The copy has the number of the most recent
        request.
        """
        if self._stream is None:  # interpreted
            self._prepare_copy(pages, slots)(to_host)
            return
        began = make_event(timed=True)
        ended = make_event(timed=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy = self._prepare_copy(pages, slots)
            began.record()
            copy(to_host)
            ended.record()
        self._running.append((self.launched, ended, began, 0 if to_host else len(pages)))


class GpuPageMemory(PinnedMemory):
    """Pinned memory for the pages of a model on a GPU. One kernel copies pages of all layers.

    Args:
        planes, page_size, slots: same as for `CpuPageMemory`.

    Raises:
        ModelError: this much memory can't be pinned.
    """

    def __init__(self, planes: Sequence[torch.Tensor], page_size: int, slots: int) -> None:
        from sglang_lite.runtime.kernels.blocks import BlockCopy  # imports Triton

        device = planes[0].device
        super().__init__(device, page_bytes(planes, page_size), slots)
        self._copy = BlockCopy(planes, self._memory, page_size)
        if device.type == "cuda":
            # Compiles both kernels now, to keep this out of measured times. One page is copied out
            # and back.
            place = torch.zeros(1, dtype=torch.int32, device=device)
            for to_host in (True, False):
                self._copy(place, place, to_host=to_host)
            torch.cuda.synchronize(device)

    def _prepare_copy(self, pages: Ints, slots: Ints) -> Callable[[bool], None]:
        count = len(pages)
        both = np.zeros((2, -(-count // _ALIGNED) * _ALIGNED), dtype=np.int32)
        both[:, :count] = pages, slots
        places = torch.from_numpy(both)
        if self._stream is not None:
            places = places.pin_memory().to(self._device, non_blocking=True)
        return lambda to_host: self._copy(places[0, :count], places[1, :count], to_host=to_host)


class GpuStateMemory(PinnedMemory):
    """Pinned memory for states of a model on a GPU. A state has one long piece for each layer, so
    the GPU's copy engines copy it while the multiprocessors keep computing.

    Args:
        planes: the states of all layers as bytes, uint8 [1, places, bytes] each.
        slots: number of states that fit.

    Raises:
        ModelError: this much memory can't be pinned.
    """

    def __init__(self, planes: Sequence[torch.Tensor], slots: int) -> None:
        size = page_bytes(planes, 1)
        super().__init__(planes[0].device, size, slots)
        rows = self._memory.view(slots, size)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # a plane's states, their parts
        first = 0
        for plane in planes:
            self._pairs.append((plane[0], rows[:, first : first + plane.shape[2]]))
            first += plane.shape[2]

    def _prepare_copy(self, pages: Ints, slots: Ints) -> Callable[[bool], None]:
        def copy(to_host: bool) -> None:
            for page, slot in zip(pages.tolist(), slots.tolist()):
                for plane, part in self._pairs:
                    source, target = (plane[page], part[slot])[:: 1 if to_host else -1]
                    target.copy_(source, non_blocking=True)

        return copy


def _moving_average(average: float, new: float) -> float:
    return average + (new - average) / _MEASURED if average else new
