"""Starts child processes that run a module of this package and are connected by a socket. Also
reads the output of these processes.

The process isn't forked, because this process has threads, and isn't started by `multiprocessing`,
which would run the caller's main module again. The connection has no path or port that other
programs could find.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final

from sglang_lite.process.import_paths import import_paths

KEPT_LINES: Final = 20  # number of a process's last printed lines, shown if it fails
_LONGEST_LINE = 10_000  # bytes; the rest of a longer line counts as the next line
_FIRST = 3  # first descriptor after standard input, output and error


def start_child(
    module: str, *arguments: int | str | None, nice: int = 0, **settings: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:  # each of `Popen`'s arguments has its own type
    """Starts a process that runs `main(descriptor, *arguments)` of a module.

    It has this process's `sys.path`, environment and working directory, and no standard input.
    Ctrl-C is left to this process.

    Args:
        module: name of the module.
        arguments: arguments after the file descriptor of the process's end of the socket.
        nice: by how much its priority is lower than this process's, from the first import on.
        settings: other arguments of `subprocess.Popen`.

    Returns:
        The process, and this process's end of the socket.

    Raises:
        OSError: the process can't be started.
    """
    ours, theirs = _make_socket_pair()
    with theirs:
        code = (
            # before importing a `signal.py` in the folder
            f"import sys; sys.path[:] = {import_paths()!r}\n"
            f"import os, signal; os.nice({nice}); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            f"from {module} import main\n"
            f"main(*{(theirs.fileno(), *arguments)!r})"
        )
        try:
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, **settings
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def log_printed_lines(process: subprocess.Popen[bytes], logger: logging.Logger) -> Iterator[str]:
    """Logs the lines that a process prints, and yields each one. The caller must consume them all,
    since a full pipe would block the process.
    """
    assert process.stdout is not None
    with process.stdout as pipe:
        for line in iter(partial(pipe.readline, _LONGEST_LINE), b""):
            text = line.decode("utf-8", "replace").rstrip()
            yield text
            with contextlib.suppress(Exception):  # the caller's logging handlers may raise
                logger.info("%s", text)


def format_last_output(lines: Iterable[str]) -> str:
    """Formats the last lines that a process has printed as a sentence for an error message. Returns
    "" if there are none.
    """
    printed = [line for line in list(lines) if line]
    return " Its last output:\n" + "\n".join(printed) if printed else ""


def _make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Creates two connected blocking sockets, regardless of `socket.setdefaulttimeout`.

    Neither uses descriptor 0, 1 or 2, even if those are closed: printed output would go into the
    socket, and the child process replaces them.

    Raises:
        OSError: no descriptor is free.
    """
    first, second = socket.socketpair()
    try:
        return _make_blocking(first), _make_blocking(second)
    except OSError:
        first.close()
        second.close()
        raise


def _make_blocking(end: socket.socket) -> socket.socket:
    import fcntl  # not on Windows

    if end.fileno() < _FIRST:
        moved = socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST))
        end.close()
        end = moved
    end.setblocking(True)
    return end
