"""Disk tier of the KV cache: files of runs of pages in a folder, which engines of one machine may share.

A file has the name of its last page, so it is found by whoever has the same tokens, and nobody else. Writers don't
lock: both write the same bytes, and the last one's rename counts. All work is done on threads of an executor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Final

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.kv_cache.page_file import TEMPORARY, DamagedFileError, Rows, open_pages, write_pages
from sglang_lite.runtime.kv_cache.pages import Ints

logger = logging.getLogger("sglang_lite")

RUN_TOKENS: Final = 256  # of a file, at least
_SUFFIX: Final = ".kv"
_KEPT: Final = 0.9  # share of the limit that is kept when it is reached
_KNOWN: Final = 1 << 16  # names that are remembered
_ABANDONED_S: Final = 3600  # a temporary file that is so old has no writer any more


class DiskTier:
    """Folder of files of pages.

    Args:
        folder: the folder; made if it doesn't exist.
        max_bytes: size of all files; the least recently used are removed beyond.
        executor: runs what reads and writes.

    Attributes:
        executor: the argument.
        off: True after an error of the folder; nothing is read or written any more.
        known: names of the files that were there when they were last looked at, of the newest 65,536.

    Raises:
        ParameterError: the folder can't be made or written.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int, executor: Executor) -> None:
        self.folder, self._max_bytes, self.executor = Path(folder).expanduser(), max_bytes, executor
        self.off = False
        self.known: dict[bytes, None] = {}
        self._lock = threading.Lock()  # of the size and `known`
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self.folder.glob(f".*{TEMPORARY}"):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink(missing_ok=True)
            probe = self.folder / f".{os.getpid()}{TEMPORARY}"
            probe.touch(mode=0o600)
            probe.unlink()
            self._size = sum(size for _, size, _ in self._files())
        except OSError as error:
            raise ParameterError(
                "hicache_storage_dir", f"the folder can't be used: {error}", hint="Name a folder that you may write to."
            ) from error

    def find(self, names: Sequence[bytes]) -> Future[int]:
        """Counts how many of these files exist, up to the first that doesn't."""
        return self.executor.submit(self._find, names)

    def read(self, name: bytes, rows: Rows, slots: Ints, skip: int) -> Future[bool]:
        """Reads a file.

        Args:
            name: name of the file.
            rows, slots: memory, and places in it for the pages behind the first `skip`.

        Returns:
            Whether the slots have been filled.
        """
        return self.executor.submit(self._read, name, rows, slots, skip)

    def write(self, name: bytes, rows: Rows, slots: Ints) -> Future[None]:
        """Writes a file, unless it exists."""
        return self.executor.submit(self._write, name, rows, slots)

    def close(self) -> None:
        """Waits for what is being written, unless the folder is not used any more."""
        self.executor.shutdown(wait=not self.off, cancel_futures=self.off)

    def stop(self, reason: object) -> None:
        """Uses the folder no more, and says why, once."""
        if not self.off:
            self.off = True
            logger.warning("the cache's folder is not used any more: %s", reason)

    # ------------------------------------------------------------------------------- on the executor's threads

    def _path(self, name: bytes) -> Path:
        return self.folder / (name.hex() + _SUFFIX)

    def _find(self, names: Sequence[bytes]) -> int:
        found = 0
        while not self.off and found < len(names) and self._exists(names[found]):
            found += 1
        for name in names[found:]:  # so that they are looked for again before they count as written
            self._note(name, there=False)
        return found

    def _exists(self, name: bytes) -> bool:
        return self._note(name, there=self._path(name).exists())

    def _note(self, name: bytes, *, there: bool) -> bool:
        with self._lock:
            self.known.pop(name, None)
            if there:
                self.known[name] = None
            if len(self.known) > _KNOWN:
                del self.known[next(iter(self.known))]
        return there

    def _read(self, name: bytes, rows: Rows, slots: Ints, skip: int) -> bool:
        path = self._path(name)
        try:
            with open_pages(path) as file:
                if file.header != name or file.page_bytes != rows.shape[1] or file.pages < skip + len(slots):
                    raise DamagedFileError("it has other pages than its name says")
                file.read(rows, slots, skip)
            os.utime(path)
        except DamagedFileError as error:
            logger.warning("%s is removed from the cache: %s.", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return self._note(name, there=False)
        except OSError:  # another engine has removed it
            return self._note(name, there=False)
        return True

    def _write(self, name: bytes, rows: Rows, slots: Ints) -> None:
        path = self._path(name)
        try:
            if self.off or self._exists(name):
                return
            size = write_pages(path, name, rows, slots)
            self._note(name, there=True)
            with self._lock:
                self._size += size
                if self._size > self._max_bytes:
                    self._shrink()
        except OSError as error:
            self.stop(error)

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of the last use, size and path of each file."""
        found = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return found

    def _shrink(self) -> None:
        """Removes the least recently used files."""
        files = sorted(self._files())
        self._size = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._size <= _KEPT * self._max_bytes:
                break
            path.unlink(missing_ok=True)
            self._size -= size
