"""C++ files of ours as libraries, compiled for this processor where there is a compiler.

None is needed: whoever has none runs torch's operators, which is slower for few rows.
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
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger("sglang_lite")

# Sums may be added in another order, so that they are vectors; NaN and infinity stay what they are.
_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fassociative-math", "-shared", "-fPIC",
)  # fmt: skip
_TIMEOUT_S = 60


@functools.cache
def cpu_library(source: Path, folder: Path, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL | None:
    """The library of a C++ file, compiled at the first use on this machine, by `CXX` or the compiler that is found.

    Args:
        folder: where libraries are kept.
        kind: `PyDLL` for functions that take so few microseconds that they keep Python's lock.

    Returns:
        None where there is no compiler, or it fails, which the log says.
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or sys.platform == "win32":
        logger.info("there is no C++ compiler: few rows on a CPU are decoded by torch's operators, which is slower.")
        return None
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))))
    digest.update(repr((_FLAGS, os.path.realpath(compiler), _processor())).encode())
    library = folder / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(compiler, source, library)
        return kind(os.fspath(library))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s: can't be compiled to %s, torch's operators run instead: %s", source.name, library, error)
        return None


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Writes the library, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [compiler, *_FLAGS, os.fspath(source), "-o", os.fspath(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        made.replace(library)


def _processor() -> str:
    """The instructions that this processor has, as Linux tells them: a library for others would not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [line for line in lines if line.startswith(("flags", "Features"))]
    return found[0] if found else f"{platform.machine()} {platform.processor()}"
