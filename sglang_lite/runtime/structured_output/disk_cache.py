"""Compiled grammars on disk for the next process, of constraints that took long: the result of a worker's `prepare`,
under a name that is made of everything it depends on.

A file is a checksum, then what was prepared, pickled and compressed. Unpickling makes nothing but text, and later the
parts of a language. One that is damaged or too large, or that somebody else could have written, is not used but
removed: who may write into the folder can at worst put one grammar in another's place.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import pickle
import stat
import tempfile
import zlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sglang_lite
from sglang_lite.protocol import Constraint
from sglang_lite.runtime.structured_output.base import PreparedGrammar
from sglang_lite.runtime.structured_output.llguidance import Prepared
from sglang_lite.runtime.structured_output.registry import LIBRARIES
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary

logger = logging.getLogger("sglang_lite")

SLOW_S = 1.0  # to compile: anything faster is compiled again
MAX_BYTES = 256 << 20  # of all files together, the ones used longest ago go first; of one, and of what is in it
_DIGEST = 32  # bytes of a SHA-256


class GrammarDiskCache:
    """Prepared grammars in a folder.

    Args:
        folder: of the files; made when the first one is written.
        vocabulary: that the grammars are for.
        backend: the engine that is asked for, or "auto".
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, backend: str) -> None:
        self._folder = folder
        digest = hashlib.sha256(f"{backend} {_versions()}".encode())
        digest.update(repr((vocabulary.tokens, vocabulary.eos_ids)).encode())
        self._fingerprint = digest.hexdigest()

    def get(self, constraint: Constraint) -> tuple[str, PreparedGrammar] | None:
        """The name of an engine and what it had prepared; None where nothing good is kept."""
        path = self.path_of(constraint)
        try:
            engine, prepared = _Unpickler(io.BytesIO(_unpacked(_content(path)))).load()
        except FileNotFoundError:
            return None
        except Exception as error:  # what was unpickled need not be what it should be
            logger.warning("%s is not used: %s", path, error)
            with contextlib.suppress(OSError):  # it would be said again
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # another user's file
            os.utime(path)
        return engine, prepared

    def put(self, constraint: Constraint, engine: str, prepared: PreparedGrammar) -> None:
        """Keeps what was prepared, if it is not too large and the disk lets it."""
        try:
            content = pickle.dumps((engine, prepared), protocol=5)
            if len(content) > MAX_BYTES:
                return
            packed = zlib.compress(content, 1)
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(hashlib.sha256(packed).digest() + packed)
            os.replace(file.name, self.path_of(constraint))
            self._drop_oldest()
        except (OSError, RecursionError) as error:
            logger.warning("a compiled grammar could not be kept in %s: %s", self._folder, error)

    def path_of(self, constraint: Constraint) -> Path:
        name = hashlib.sha256(f"{self._fingerprint} {constraint!r}".encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / name

    def _drop_oldest(self) -> None:
        found = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another process may drop some, too
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= MAX_BYTES:
                return
            path.unlink(missing_ok=True)
            total -= size


def _content(path: Path) -> bytes:
    """The bytes of a file. Raises ValueError: somebody else could have written it, or it is too large."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would be waited for
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.getuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("somebody else could have written it")
        if found.st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        return file.read(MAX_BYTES)


def _unpacked(content: bytes) -> bytes:
    """Reads a file's bytes: the pickle. Raises ValueError, zlib.error: they are damaged, or too much."""
    packed = content[_DIGEST:]
    if content[:_DIGEST] != hashlib.sha256(packed).digest():
        raise ValueError("the checksum is wrong")
    reader = zlib.decompressobj()
    found = reader.decompress(packed, MAX_BYTES)
    if not reader.eof:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes, or no end")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != (Prepared.__module__, Prepared.__name__):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a grammar")
        return Prepared  # whose language has bytes of its own, which are unpickled as carefully


@lru_cache(maxsize=1)
def _versions() -> str:
    """Versions of everything that compiling goes through; of our own code its text, which changes between releases."""
    digest = hashlib.sha256()
    package = Path(sglang_lite.__file__).parent
    for path in sorted([*package.glob("constraints/**/*.py"), *package.glob("runtime/structured_output/*.py")]):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {[_version(name) for name in LIBRARIES]}"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
