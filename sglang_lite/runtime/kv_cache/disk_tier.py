"""Disk tier of the KV cache: files of consecutive pages in a store that other engines may share.

A file is named after its last page, so only an engine with the same tokens can find it. All work is
done on threads of an executor.

Each saved state has its own file, whose name is derived from the name of the last page that the
state covers (`name_state_file`). The first part of the file has the pages between the last whole
run and the state; the second part is the state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from sglang_lite.runtime.kv_cache.page_file import PageFile, pack_pages
from sglang_lite.runtime.kv_cache.page_names import name_state_file
from sglang_lite.runtime.kv_cache.page_store import PageStore
from sglang_lite.runtime.kv_cache.page_sums import DamagedFileError, Rows
from sglang_lite.runtime.kv_cache.pages import Ints

logger = logging.getLogger("sglang_lite")

RUN_TOKENS: Final = 256  # minimum tokens of a file
_KNOWN: Final = 1 << 16  # remembered names


@dataclass(frozen=True, slots=True)
class StateRow:
    """Row of host memory that has a state, or that a state is read into.

    Attributes:
        rows: uint8 [slots, bytes of a state].
        slots: int32 [1], the row.
    """

    rows: Rows
    slots: Ints


class DiskTier:
    """Reads and writes files of pages in a store.

    Args:
        store: store of the files.
        executor: runs file lookups and reads.
        writer: runs writes, so no request waits for one; None for `executor`.

    Attributes:
        executor, writer: the arguments.
        off: True after an error of the store; nothing is read or written any more.
        known: names of files that existed when last checked; the newest 65,536.
    """

    def __init__(
        self, store: PageStore, executor: Executor, writer: Executor | None = None
    ) -> None:
        self._store = store
        self.executor = executor
        self.writer = writer or executor
        self.off = False
        self.known: dict[bytes, None] = {}
        self._lock = threading.Lock()  # guards `known`

    def count_existing(self, names: Sequence[bytes]) -> Future[int]:
        """Starts counting how many of these files exist, up to the first that doesn't."""
        return self.executor.submit(self._count_existing_now, names)

    def find_last_state(
        self, runs: Sequence[bytes], names: Sequence[bytes], whole: int, run: int, least: int
    ) -> Future[int]:
        """Starts looking for the last state of a sequence that has a file. Searches the last two
        runs whose files of pages exist, and the run after them.

        Args:
            runs: names of the files of the sequence's runs from page `whole` on.
            names: names of the sequence's pages.
            whole: number of leading pages that need no file; a multiple of `run`.
            run: number of pages in a run.
            least: minimum number of pages up to the state.

        Returns:
            Number of pages up to the state; 0 if there is none.
        """
        return self.executor.submit(self._find_last_state_now, runs, names, whole, run, least)

    def start_read(
        self, name: bytes, rows: Rows, slots: Ints, skip: int, state: StateRow | None = None
    ) -> Future[bool]:
        """Starts reading a file into host memory.

        Args:
            name: name of the file.
            rows, slots: the memory, and its rows for the pages after the first `skip`.
            state: row for the state, if the file is a state's.

        Returns:
            Whether the slots, and the state's row, have been filled.
        """
        return self.executor.submit(self._read_file, name, rows, slots, skip, state)

    def start_write(
        self, name: bytes, rows: Rows, slots: Ints, state: StateRow | None = None
    ) -> Future[None]:
        """Starts writing a file of pages, followed by `state` if given, unless the file exists."""
        return self.writer.submit(self._write_file, name, rows, slots, state)

    def close(self) -> None:
        """Shuts down the threads after their current work, without waiting. Queued work is
        cancelled.
        """
        for executor in (self.executor, self.writer):
            executor.shutdown(wait=False, cancel_futures=True)

    def stop(self, reason: object) -> None:
        """Stops using the store, and logs the reason once."""
        if not self.off:
            self.off = True
            logger.warning("the cache's folder is not used any more: %s", reason)

    # -------------------------------------------------------------------- on the executor's threads

    def _count_existing_now(self, names: Sequence[bytes]) -> int:
        found = 0
        try:
            while not self.off and found < len(names) and self._exists_in_store(names[found]):
                found += 1
        except Exception as error:  # a third-party store can raise anything
            self.stop(error)
            return 0
        # forgets these names, so that they are checked again before they count as written
        for name in names[found:]:
            self._remember_existence(name, there=False)
        return found

    def _find_last_state_now(
        self, runs: Sequence[bytes], names: Sequence[bytes], whole: int, run: int, least: int
    ) -> int:
        whole += run * self._count_existing_now(runs)
        last = min(len(names), whole + run - 1)
        try:
            for end in range(last, max(least, whole - 2 * run + 1) - 1, -1):
                if self.off:
                    return 0
                if self._exists_in_store(name_state_file(names[end - 1])):
                    return end
        except Exception as error:  # a third-party store can raise anything
            self.stop(error)
        return 0

    def _exists_in_store(self, name: bytes) -> bool:
        return self._remember_existence(name, there=self._store.has_file(name))

    def _remember_existence(self, name: bytes, *, there: bool) -> bool:
        with self._lock:
            self.known.pop(name, None)
            if there:
                self.known[name] = None
            if len(self.known) > _KNOWN:
                del self.known[next(iter(self.known))]
        return there

    def _read_file(
        self, name: bytes, rows: Rows, slots: Ints, skip: int, state: StateRow | None
    ) -> bool:
        try:
            with self._store.open(name) as file:
                _check_part(file, name, rows, skip + len(slots))
                if state is not None:
                    if file.following is None:
                        raise DamagedFileError("it has no state")
                    _check_part(file.following, name, state.rows, 1)
                    file.following.read_into(state.rows, state.slots)
                file.read_into(rows, slots, skip)
            return True
        except DamagedFileError as error:
            what = "removed" if self._store.remove(name) else "not read any more"
            logger.warning(
                "the cache's file %s.kv is damaged, and is %s: %s.", name.hex(), what, error
            )
        except FileNotFoundError:  # another engine has removed it
            pass
        except Exception as error:  # a third-party store can raise anything
            self.stop(error)
        return self._remember_existence(name, there=False)

    def _write_file(self, name: bytes, rows: Rows, slots: Ints, state: StateRow | None) -> None:
        try:
            if not self.off and not self._exists_in_store(name):
                following = () if state is None else pack_pages(name, state.rows, state.slots)
                self._store.store_pages(name, rows, slots, following)
                self._remember_existence(name, there=True)
        except Exception as error:  # a third-party store can raise anything
            self.stop(error)


def _check_part(part: PageFile, name: bytes, rows: Rows, pages: int) -> None:
    """Raises DamagedFileError unless a part of a file has the expected name and pages."""
    if part.header != name or part.page_bytes != rows.shape[1] or part.pages < pages:
        raise DamagedFileError("it has other pages than its name says")
