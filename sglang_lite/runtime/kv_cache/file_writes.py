"""Files of pages that wait to be written from the host tier to the disk tier, or are being written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from sglang_lite.runtime.kv_cache.disk_tier import DiskTier, StateRow
from sglang_lite.runtime.kv_cache.host_tier import HostTier
from sglang_lite.runtime.kv_cache.page_names import name_state_file
from sglang_lite.runtime.kv_cache.pages import Ints

_MAX_WRITING: Final = 64  # maximum number of files waiting to be written; more are skipped
WRITTEN_S = 10.0  # if no waiting file is written within this time, the store is disabled


@dataclass(eq=False, slots=True)
class _Write:
    """File to write once its pages and its state have been copied to the host. Their slots stay
    pinned until the file is written.
    """

    name: bytes
    slots: Ints
    copy: int
    state: StateRow | None = None
    state_copy: int = 0
    written: Future[None] | None = None


class FileWrites:
    """Queue of files to be written.

    Args:
        host: tier that holds their pages.
        states: tier that holds their states; None for models without states.
    """

    def __init__(self, host: HostTier, states: HostTier | None = None) -> None:
        self._host = host
        self._states = states
        self._files: list[_Write] = []
        self._last = 0.0  # last time at which a write had just ended, or no write was running

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

    def queue_state_file(self, names: Sequence[bytes], page: bytes) -> None:
        """Queues a state's file for writing, under the same conditions as `queue_file`.

        Args:
            names: names of the file's pages; may be empty.
            page: name of the page at whose end the state is.
        """
        assert self._states is not None
        name = name_state_file(page)
        if (
            page in self._states
            and all(each in self._host for each in names)
            and all(name != other.name for other in self._files)
        ):
            slots = self._host.touch_pages(names)
            self._host.pin_slots(slots)
            state = StateRow(self._states.memory.rows, self._states.touch_pages([page]))
            self._states.pin_slots(state.slots)
            copies = self._host.memory.launched, self._states.memory.launched
            self._files.append(_Write(name, slots, copies[0], state, copies[1]))

    @property
    def is_full(self) -> bool:
        """Whether the queue is full, so that further files are skipped."""
        return len(self._files) >= _MAX_WRITING

    def advance_writes(self, disk: DiskTier, completed: int, completed_states: int) -> None:
        """Starts writing each file whose copies to the host have completed: the first `completed`
        copies of pages, and the first `completed_states` copies of states. Removes written files
        from the queue. Stops the disk tier if no file was written for a long time.
        """
        now = time.perf_counter()
        left = []
        for file in self._files:
            copied = file.copy <= completed and file.state_copy <= completed_states
            if file.written is None and copied:
                rows = self._host.memory.rows
                file.written = disk.start_write(file.name, rows, file.slots, file.state)
            if file.written is not None and file.written.done():
                file.written.result()
                self._host.unpin_slots(file.slots)
                if self._states is not None and file.state is not None:
                    self._states.unpin_slots(file.state.slots)
                self._last = now
            else:
                left.append(file)
        self._files = left
        if all(file.written is None for file in left):
            self._last = now
        elif now - self._last > WRITTEN_S:
            # slots stay pinned: a thread may still read them
            disk.stop(f"no file was written in {WRITTEN_S:g} seconds.")
