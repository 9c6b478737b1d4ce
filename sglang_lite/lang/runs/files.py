"""Files of runs: lines of JSON, each a message of `sglang_lite.wire`. Errors name the file, and the line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from sglang_lite import wire
from sglang_lite.protocol import ParameterError, WireError

AnyPath: TypeAlias = str | os.PathLike[str]


def read(path: AnyPath) -> bytes:
    """Content of a file. Raises ParameterError if it can't be read, or is larger than a message may be."""
    try:
        if (size := Path(path).stat().st_size) > wire.LIMITS.bytes:
            raise ParameterError("path", f"{str(path)!r} has {size:,} bytes, the limit is {wire.LIMITS.bytes:,}.")
        return Path(path).read_bytes()
    except OSError as error:
        raise failure(path, "read", error) from error


def write(path: AnyPath, content: bytes) -> None:
    """Writes a file atomically: on failure an existing file remains unchanged. Raises ParameterError if it can't be
    written."""
    beside = Path(f"{os.fspath(path)}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        raise failure(path, "written", error) from error


def prefix_path(path: AnyPath) -> str:
    """File of what was computed for the text of a state that is saved in another file."""
    return f"{os.fspath(path)}.kv"


def failure(path: AnyPath, what: str, error: OSError) -> ParameterError:
    return ParameterError("path", f"{os.fspath(path)!r} can't be {what}: {error.strerror or error}.")


def message(path: AnyPath, number: int, line: bytes, hint: str) -> wire.Message:
    """Record in a line of a file. Raises WireError if it is not a message, or has another version of the format; with
    `hint` unless the error has its own."""
    try:
        return wire.decode(line.removesuffix(b"\n"))
    except WireError as error:
        reason = error.message.removeprefix("wire: ").rpartition(" (at ")[0]
        raise fault(path, number, reason, error.pointer, error.hint or hint) from None


def fault(path: AnyPath, number: int, problem: str, pointer: str = "", hint: str = "") -> WireError:
    """Error for a line of a file."""
    return WireError(f"{os.fspath(path)}, line {number}: {problem}", pointer=pointer, hint=hint)
