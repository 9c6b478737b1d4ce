"""Stores for files of pages: a folder of this machine, or any store of bytes by name, such as those
of fsspec.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.host.limited_folder import remove_oldest_files
from sglang_lite.runtime.kv_cache.page_file import (
    TEMPORARY,
    PageFile,
    open_pages,
    open_pages_in_memory,
    pack_pages,
    write_pages,
)
from sglang_lite.runtime.kv_cache.page_sums import Rows
from sglang_lite.runtime.kv_cache.pages import Ints

GROUP: Final = "sglang_lite.page_stores"  # group of the entry points that register a class
_SUFFIX: Final = ".kv"
_KEPT: Final = 0.9  # share of the size limit that is kept when files are removed
_FRESH_S: Final = 60  # a younger file is not marked as used, which would write to the disk
_ABANDONED_S: Final = 3600  # a temporary file this old has no writer any more


class ByteStore(Protocol):
    """Store of bytes by name, used by several threads concurrently.

    An entry point of the group "sglang_lite.page_stores" registers a class; an engine instantiates
    it with its `hicache_storage_dir`. Any error of a method, except for a missing name, counts as a
    failure of the whole store.
    """

    def has(self, name: str) -> bool:
        """Returns whether the store has bytes under a name."""
        ...

    def get(self, name: str) -> bytes:
        """Returns the bytes stored under a name.

        Raises:
            FileNotFoundError: the store has no such name.
        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Stores bytes atomically: readers see all of them or nothing."""
        ...


class PageStore(Protocol):
    """Store of files of pages. A file is named after its last page."""

    def has_file(self, name: bytes) -> bool:
        """Returns whether the file exists."""
        ...

    def open(self, name: bytes) -> contextlib.AbstractContextManager[PageFile]:
        """Opens a file.

        Raises:
            FileNotFoundError: there is none.
            DamagedFileError: it is not a file of pages.
        """
        ...

    def store_pages(
        self, name: bytes, rows: Rows, slots: Ints, following: Sequence[bytes | memoryview]
    ) -> None:
        """Writes the pages in some slots of host memory to a file, followed by the file's next
        part, which may be empty.
        """
        ...

    def remove(self, name: bytes) -> bool:
        """Removes a damaged file. Returns False if it remains and is only ignored from now on."""
        ...


class Folder:
    """Page store in a folder, which engines of one machine may share without locks.

    If two write the same file, both write the same bytes, and the later rename wins.

    Args:
        folder: the folder; created if it doesn't exist.
        max_bytes: maximum size of all files; beyond it, the least recently used are removed.

    Raises:
        ParameterError: the folder can't be created or written.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self._folder = Path(folder).expanduser()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the size
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in self._folder.glob(f".*{TEMPORARY}"):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink(missing_ok=True)
            probe = self._folder / f".{os.getpid()}{TEMPORARY}"
            probe.touch(mode=0o600)
            probe.unlink()
            self._size = remove_oldest_files(self._files(), math.inf)
        except OSError as error:
            raise ParameterError(
                "hicache_storage_dir",
                f"the folder can't be used: {error}",
                hint="Name a folder that you may write to.",
            ) from error

    def has_file(self, name: bytes) -> bool:
        return self._path(name).exists()

    @contextmanager
    def open(self, name: bytes) -> Iterator[PageFile]:
        path = self._path(name)
        with open_pages(path) as file:
            yield file
        if time.time() - path.stat().st_mtime > _FRESH_S:
            os.utime(path)

    def store_pages(
        self, name: bytes, rows: Rows, slots: Ints, following: Sequence[bytes | memoryview]
    ) -> None:
        size = write_pages(self._path(name), name, rows, slots, following=following)
        with self._lock:
            self._size += size
            if self._size > self._max_bytes:
                self._size = remove_oldest_files(self._files(), _KEPT * self._max_bytes)

    def remove(self, name: bytes) -> bool:
        with contextlib.suppress(OSError):
            self._path(name).unlink()
        return not self._path(name).exists()

    def _path(self, name: bytes) -> Path:
        return self._folder / (name.hex() + _SUFFIX)

    def _files(self) -> Iterator[Path]:
        return self._folder.glob(f"*{_SUFFIX}")


class Blobs:
    """Page store that keeps its files in a `ByteStore`. Damaged files stay there until overwritten."""

    def __init__(self, store: ByteStore) -> None:
        self._store = store
        self._damaged: set[bytes] = set()

    def has_file(self, name: bytes) -> bool:
        return name not in self._damaged and self._store.has(name.hex() + _SUFFIX)

    @contextmanager
    def open(self, name: bytes) -> Iterator[PageFile]:
        yield open_pages_in_memory(self._store.get(name.hex() + _SUFFIX))

    def store_pages(
        self, name: bytes, rows: Rows, slots: Ints, following: Sequence[bytes | memoryview]
    ) -> None:
        parts = [*pack_pages(name, rows, slots), *following]
        self._store.put(name.hex() + _SUFFIX, b"".join(parts))
        self._damaged.discard(name)

    def remove(self, name: bytes) -> bool:
        self._damaged.add(name)
        return False


class FsspecStore:
    """`ByteStore` at a URL that fsspec supports, such as "s3://bucket/prefixes". The user must
    install the package that fsspec needs for it.

    Args:
        url: URL of a folder.

    Raises:
        ValueError: `url` is not a URL, or points to files of this machine, where readers would see
            partial writes.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # takes 40 ms

        if not url.partition("://")[1] or url.startswith(("file:", "local:")):
            # the backend "file" writes files atomically
            raise ValueError('it is no URL of another store; "file" takes folders.')
        system, self._folder = fsspec.core.url_to_fs(url)
        self._system: Any = system
        system.makedirs(self._folder, exist_ok=True)

    def has(self, name: str) -> bool:
        self._system.invalidate_cache()  # others may have written files
        return bool(self._system.exists(f"{self._folder}/{name}"))

    def get(self, name: str) -> bytes:
        return bytes(self._system.cat_file(f"{self._folder}/{name}"))

    def put(self, name: str, data: bytes) -> None:
        self._system.pipe_file(f"{self._folder}/{name}", data)


def make_store(backend: str, place: str, max_bytes: int) -> PageStore:
    """Creates the page store that the config selects.

    Args:
        backend: "file", "fsspec", or the name of a registered class.
        place: folder, URL, or another argument of the class.
        max_bytes: maximum size of all files of a folder.

    Raises:
        ParameterError: no class is registered as `backend`, or the class can't use `place`.
    """
    if backend == "file":
        return Folder(place, max_bytes)
    registered = {each.name: each for each in entry_points(group=GROUP)}
    if backend != "fsspec" and backend not in registered:
        known = ", ".join(["file", "fsspec", *sorted(registered)])
        hint = f'Name one of {known}, or register a class as an entry point of "{GROUP}".'
        raise ParameterError(
            "hicache_storage_backend", f"no store is called {backend!r:.80}.", hint=hint
        )
    try:
        return Blobs(
            FsspecStore(place) if backend == "fsspec" else registered[backend].load()(place)
        )
    except Exception as error:  # third-party code can raise anything
        raise ParameterError(
            "hicache_storage_dir", f"{backend!r} can't use {place!r:.200}: {error}"
        ) from error
