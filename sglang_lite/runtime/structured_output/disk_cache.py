"""Disk cache of grammars that took long to compile, for later processes. Stores the result of a
worker's `prepare`.

A file's name is a hash of everything that the grammar depends on. Its content is a checksum, then
the compressed pickle. Unpickling creates only texts, and later the nodes of a language. A file that
is damaged, too large or writable by other users is removed instead of used. Write access to the
folder at worst lets one grammar replace another.
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

from sglang_lite.protocol import Constraint
from sglang_lite.runtime.host.limited_folder import remove_oldest_files
from sglang_lite.runtime.structured_output.llguidance import Prepared
from sglang_lite.runtime.structured_output.registry import LIBRARIES
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary

logger = logging.getLogger("sglang_lite")

SLOW_S = 1.0  # a grammar is stored if compiling it takes more seconds than this
# limit of all files together (least recently used go first), of one file, and of its content
MAX_BYTES = 256 << 20
_DIGEST = 32  # bytes of a SHA-256 digest


class GrammarDiskCache:
    """Cache of prepared grammars in a folder.

    Args:
        folder: folder of the files, created when the first file is written.
        vocabulary: vocabulary of the grammars.
        backend: name of the grammar engine.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, backend: str) -> None:
        self._folder = folder
        digest = hashlib.sha256(f"{backend} {_hash_compiler_versions()}".encode())
        digest.update(repr((vocabulary.tokens, vocabulary.eos_ids)).encode())
        self._fingerprint = digest.hexdigest()

    def read_grammar(self, constraint: Constraint) -> Any:  # the type given to `store_grammar`
        """Returns the prepared grammar of a constraint, or None if no valid file exists."""
        path = self.path_of(constraint)
        try:
            prepared = _Unpickler(
                io.BytesIO(_verify_and_decompress(_read_trusted_file(path)))
            ).load()
        except FileNotFoundError:
            return None
        except Exception as error:  # any error, as the file may hold anything
            logger.warning("%s is not used: %s", path, error)
            with contextlib.suppress(OSError):  # remove it, so that it is not reported again
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # the file may belong to root
            os.utime(path)
        return prepared

    def store_grammar(self, constraint: Constraint, prepared: object) -> None:
        """Stores a prepared grammar, unless it is too large or can't be written."""
        try:
            content = pickle.dumps(prepared, protocol=5)
            if len(content) > MAX_BYTES:
                return
            packed = zlib.compress(content, 1)
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                try:
                    file.write(hashlib.sha256(packed).digest() + packed)
                    file.flush()
                    os.replace(file.name, self.path_of(constraint))
                except BaseException:  # free the space on a full disk
                    os.unlink(file.name)
                    raise
            remove_oldest_files(self._folder.iterdir(), MAX_BYTES)
        except (OSError, RecursionError) as error:
            logger.warning("a compiled grammar could not be kept in %s: %s", self._folder, error)

    def path_of(self, constraint: Constraint) -> Path:
        name = hashlib.sha256(
            f"{self._fingerprint} {constraint!r}".encode("utf-8", "surrogatepass")
        ).hexdigest()
        return self._folder / name


def _read_trusted_file(path: Path) -> bytes:
    """Reads a file. Raises ValueError if other users can write to it or if it is too large."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would block
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("somebody else could have written it")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        return file.read(MAX_BYTES)


def _verify_and_decompress(content: bytes) -> bytes:
    """Returns the pickle in a file's content. Raises ValueError or zlib.error if it is damaged or
    too large.
    """
    packed = content[_DIGEST:]
    if content[:_DIGEST] != hashlib.sha256(packed).digest():
        raise ValueError("the checksum is wrong")
    reader = zlib.decompressobj()
    pickled = reader.decompress(packed, MAX_BYTES)
    if not reader.eof:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes, or no end")
    return pickled


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != (Prepared.__module__, Prepared.__name__):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a grammar")
        return Prepared  # its language is pickled separately, and unpickled with the same care


@lru_cache(maxsize=1)
def _hash_compiler_versions() -> str:
    """Returns the versions of all libraries that compile grammars and a hash of our own source,
    which changes between releases.
    """
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted(
        [*package.glob("constraints/**/*.py"), *package.glob("runtime/structured_output/*.py")]
    ):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {[_version(name) for name in LIBRARIES]}"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
