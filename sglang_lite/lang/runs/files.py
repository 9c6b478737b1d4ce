"""Files of runs: JSON lines, each a message of `sglang_lite.wire`. Errors name the file and the
line.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from pathlib import Path
from typing import TypeAlias

from sglang_lite import wire
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import ParameterError, ProgramError, WireError

AnyPath: TypeAlias = str | os.PathLike[str]

_FULL = "Make room on its disk, or give another path."
_CURES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EACCES: "Give a path that you may write.",
    errno.EPERM: "Give a path that you may write.",
    errno.EROFS: "Give a path that you may write.",
    errno.ENOENT: "Make its folder first, or give another path.",
    errno.EISDIR: "Give the path of a file in it.",
}


def read(path: AnyPath) -> bytes:
    """Returns the content of a file. Raises ParameterError if it can't be read, or is larger than a
    message may be.
    """
    try:
        if (size := Path(path).stat().st_size) > wire.LIMITS.bytes:
            raise ParameterError(
                "path", f"{str(path)!r} has {size:,} bytes, the limit is {wire.LIMITS.bytes:,}."
            )
        return Path(path).read_bytes()
    except OSError as error:
        raise file_error(path, "read", error) from error


def write(path: AnyPath, content: bytes, parameter: str = "path") -> None:
    """Writes a file atomically: on failure an existing file remains unchanged, and nothing else is
    left.

    Args:
        parameter: parameter of the user's call, or option of the command, that gave the path.

    Raises:
        ParameterError: the file can't be written.
    """
    beside = Path(f"{os.fspath(path)}.part")
    try:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(_remove, beside)
            beside.write_bytes(content)
            beside.replace(path)
            on_failure.pop_all()
    except OSError as error:
        raise file_error(path, "written", error, parameter) from error


def append(
    file: io.FileIO, path: AnyPath, line: bytes, *, parameter: str = "path", durable: bool = False
) -> None:
    """Writes a line at the end of a file.

    Args:
        file: the file, without a buffer.
        path: its path, for errors.
        parameter: parameter of the user's call that gave the path.
        durable: whether to wait until the line is on the disk.

    Raises:
        ParameterError: the line can't be written. The file then contains no part of it.
    """
    start = file.seek(0, os.SEEK_END) if file.seekable() else 0
    try:
        left = memoryview(line)
        while left:
            left = left[file.write(left) or 0 :]
        if durable:
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise file_error(path, "written", error, parameter) from error


def lock(file: io.FileIO, path: AnyPath, parameter: str) -> None:
    """Keeps other runs from writing a file until it is closed. Does nothing on Windows, where
    Python has no such locks.

    Args:
        file: the open file.
        path: its path, for errors.
        parameter: parameter of the user's call that gave the path, for errors.

    Raises:
        ProgramError: another run is writing the file.
        ParameterError: the file can't be locked.
    """
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ProgramError(
            f"{os.fspath(path)} is being written by another run.",
            hint="Wait for its end, or name another file.",
            where=user_location(),
        ) from error
    except OSError as error:
        raise file_error(path, "locked", error, parameter) from error


def sync_folder(path: AnyPath) -> None:
    """Waits until the folder's entry for a new file is on the disk. Does nothing on Windows."""
    if sys.platform == "win32":  # Windows can't open folders
        return
    folder = os.open(Path(path).absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_if_empty(path: AnyPath) -> None:
    """Removes a file if it is empty."""
    with contextlib.suppress(OSError):
        if Path(path).stat().st_size == 0:
            _remove(Path(path))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def kv_file_path(path: AnyPath) -> str:
    """Returns the path of the file beside a saved state that contains the KV cache of the state's
    text.
    """
    return f"{os.fspath(path)}.kv"


def file_error(path: AnyPath, what: str, error: OSError, parameter: str = "path") -> ParameterError:
    """Returns the error for a file that can't be used. `what` is "read", "written" or "locked"."""
    hint = _CURES.get(error.errno or 0, "") if what == "written" else ""
    if what == "read" and error.errno == errno.ENOENT:
        hint = "Check the path. A relative one begins where Python was started."
    return ParameterError(
        parameter, f"{os.fspath(path)!r} can't be {what}: {error.strerror or error}.", hint=hint
    )


def decode_line(path: AnyPath, number: int, line: bytes, hint: str) -> wire.Message:
    """Decodes the record in a line of a file. Raises WireError if the line is not a message or has
    another version of the format. The error gets `hint` if it has none of its own.
    """
    try:
        return wire.decode(line.removesuffix(b"\n"))
    except WireError as error:
        reason = error.message.removeprefix("wire: ").rpartition(" (at ")[0]
        raise line_error(path, number, reason, error.pointer, error.hint or hint) from None


def line_error(
    path: AnyPath, number: int, problem: str, pointer: str = "", hint: str = ""
) -> WireError:
    """Returns the error for a line of a file."""
    return WireError(f"{os.fspath(path)}, line {number}: {problem}", pointer=pointer, hint=hint)
