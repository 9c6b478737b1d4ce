"""Files of pages that wait to be written from the host tier to the disk tier, or are being written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from sglang_lite.runtime.kv_cache.disk_tier import DiskTier
from sglang_lite.runtime.kv_cache.host_tier import HostTier
from sglang_lite.runtime.kv_cache.pages import Ints

_MAX_WRITING: Final = 64  # maximum number of files waiting to be written; more are skipped
WRITTEN_S = 10.0  # if no waiting file is written within this time, the store is disabled


@dataclass(eq=False, slots=True)
class _Write:
    """File to write once its pages have been copied to the host. The slots of the pages stay pinned
    until the file is written.
    """

    name: bytes
    slots: Ints
    copy: int
    written: Future[None] | None = None


class FileWrites:
    """Queue of files to be written.

    Args:
        host: tier that holds their pages.
    """

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._files: list[_Write] = []
        self._last = 0.0  # when a file was last written, or none was being written

    def __len__(self) -> int:
        return len(self._files)

    def queue_file(self, names: Sequence[bytes]) -> None:
        """Queues a file of these pages for writing. Does nothing if the file is queued already, or
        if a page is neither in the host tier nor being copied there.
        """
        if all(name in self._host for name in names) and all(
            names[-1] != other.name for other in self._files
        ):
            slots = self._host.touch_pages(names)
            self._host.pin_slots(slots)
            self._files.append(_Write(names[-1], slots, self._host.memory.launched))

    @property
    def full(self) -> bool:
        """Whether the queue is full, so that further files are skipped."""
        return len(self._files) >= _MAX_WRITING

    def advance_writes(self, disk: DiskTier, completed: int) -> None:
        """Starts writing files whose copies are among the first `completed`, and forgets files that
        are written. Stops the disk tier if no file was written for a long time.
        """
        now = time.perf_counter()
        left = []
        for file in self._files:
            if file.written is None and file.copy <= completed:
                file.written = disk.start_write(file.name, self._host.memory.rows, file.slots)
            if file.written is not None and file.written.done():
                file.written.result()
                self._host.unpin_slots(file.slots)
                self._last = now
            else:
                left.append(file)
        self._files = left
        if all(file.written is None for file in left):
            self._last = now
        elif now - self._last > WRITTEN_S:
            # a thread may still read its slots
            disk.stop(f"no file was written in {WRITTEN_S:g} seconds.")
