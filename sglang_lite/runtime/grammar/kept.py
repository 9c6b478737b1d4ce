"""What took long to compile, kept on disk for the next process: what a worker has prepared, under a name that is made
of everything it depends on.

A file is one line of JSON with a checksum, then what was prepared, compressed. It is no pickle, so what somebody else
has put there is at worst a wrong grammar; one that is damaged is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import zlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import sglang_lite
from sglang_lite.protocol import Constraint
from sglang_lite.runtime.grammar.vocabulary import Vocabulary

logger = logging.getLogger("sglang_lite")

SLOW_S = 1.0  # to compile: anything faster is compiled again
MAX_BYTES = 256 << 20  # of all files together; the ones used longest ago go first
_LIBRARIES = ("llguidance", "xgrammar", "outlines-core")


class KeptGrammars:
    """
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

    def get(self, constraint: Constraint) -> tuple[str, str | bytes] | None:
        """The name of an engine and what it had prepared; None where nothing good is kept."""
        path = self._path(constraint)
        try:
            line, _, packed = path.read_bytes().partition(b"\n")
            head = json.loads(line)
            data = zlib.decompress(packed)
            if head["sha256"] != hashlib.sha256(data).hexdigest():
                raise ValueError("the checksum is wrong")
            os.utime(path)
            return head["engine"], data.decode() if head["text"] else data
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, zlib.error) as error:
            logger.warning("%s is not used: %s", path, error)
            return None

    def put(self, constraint: Constraint, engine: str, prepared: str | bytes) -> None:
        """Keeps what was prepared, if the disk lets it."""
        data = prepared.encode() if isinstance(prepared, str) else prepared
        head = {"engine": engine, "text": isinstance(prepared, str), "sha256": hashlib.sha256(data).hexdigest()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(json.dumps(head).encode() + b"\n" + zlib.compress(data, 1))
            os.replace(file.name, self._path(constraint))
            self._drop_oldest()
        except OSError as error:
            logger.warning("a compiled grammar could not be kept in %s: %s", self._folder, error)

    def _path(self, constraint: Constraint) -> Path:
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


@lru_cache(maxsize=1)
def _versions() -> str:
    """Of everything that compiling goes through; of our own code its text, which changes between releases."""
    digest = hashlib.sha256()
    package = Path(sglang_lite.__file__).parent
    for path in sorted([*package.glob("constraints/**/*.py"), *package.glob("runtime/grammar/*.py")]):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()} {[_version(name) for name in _LIBRARIES]}"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
