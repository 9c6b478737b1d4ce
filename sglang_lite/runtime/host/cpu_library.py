"""Compiles C++ files of this package into libraries for this processor, if a compiler is installed.

No library is required: without one, operators of torch or numpy run instead, which are slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger("sglang_lite")

# Sums may be reordered to vectorise them; NaN and infinity keep their meaning.
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-shared",
    "-fPIC",
)
_TIMEOUT_S = 60


@functools.cache
def load_cpu_library(
    source: Path, folder: Path, kind: type[ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL | None:
    """Returns the library of a C++ file, compiled at first use on this machine by `CXX` or the
    first compiler found.

    Args:
        source: C++ file.
        folder: folder where libraries are kept.
        kind: class of the library; `PyDLL` for functions so short that they should keep Python's
            lock.

    Returns:
        The library, or None if no compiler is installed or compilation fails, which is logged.
    """
    compiler = (
        shutil.which(os.environ.get("CXX") or "c++")
        or shutil.which("g++")
        or shutil.which("clang++")
    )
    if compiler is None:
        warn_without_compiler()
        return None
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    )
    digest.update(repr((_FLAGS, os.path.realpath(compiler), _instruction_sets())).encode())
    library = folder / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile_library(compiler, source, library)
        return kind(os.fspath(library))
    except (OSError, subprocess.SubprocessError) as error:
        cure = (
            "Set SGLANG_LITE_CACHE to a folder that can be written."
            if isinstance(error, OSError)
            else ""
        )
        logger.warning(
            "%s: can't be compiled to %s, slower code runs instead: %s. %s",
            source.name,
            library,
            error,
            cure,
        )
        return None


@functools.cache
def warn_without_compiler() -> None:
    """Warns that no compiler is installed. The warning appears only once, although several
    libraries need a compiler.
    """
    logger.warning(
        "no C++ compiler was found: decoding on a CPU and files of the KV cache take longer. Install g++ or clang++, "
        "or set CXX to a compiler."
    )


def _compile_library(compiler: str, source: Path, library: Path) -> None:
    """Compiles the library, writing it atomically."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *_FLAGS, os.fspath(source), "-o", os.fspath(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        made.replace(library)


def _instruction_sets() -> str:
    """Returns the processor's instruction sets as reported by Linux. A library compiled for other
    instruction sets might not run.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [line for line in lines if line.startswith(("flags", "Features"))]
    return found[0] if found else f"{platform.machine()} {platform.processor()}"
