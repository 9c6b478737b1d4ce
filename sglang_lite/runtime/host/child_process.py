"""Start of a child process that runs a module of this package, connected by a socket.

The process isn't forked, because this process has threads, and isn't started by `multiprocessing`, which would run the
caller's main module again. The connection has no path or port that other programs could find.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

from sglang_lite.import_paths import import_paths

_FIRST = 3  # first descriptor after standard input, output and error


def start_child(
    module: str, *arguments: int | str | None, nice: int = 0, **settings: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:  # each of `Popen`'s arguments has its own type
    """Starts a process that runs `main(descriptor, *arguments)` of a module, with this process's `sys.path`,
    environment and working directory, and without standard input. Ctrl-C is left to this process.

    Args:
        module: name of the module.
        arguments: what follows the file descriptor of the process's end of the socket.
        nice: by how much its priority is lower than this process's, from the first import on.
        settings: other arguments of `subprocess.Popen`.

    Returns:
        The process, and this process's end of the socket.

    Raises:
        OSError: the process can't be started.
    """
    ours, theirs = _socket_pair()
    with theirs:
        code = (
            f"import sys; sys.path[:] = {import_paths()!r}\n"  # before importing a `signal.py` in the folder
            f"import os, signal; os.nice({nice}); signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            f"from {module} import main\n"
            f"main(*{(theirs.fileno(), *arguments)!r})"
        )
        try:
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, **settings)
        except BaseException:
            ours.close()
            raise
    return process, ours


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Makes two connected blocking sockets, regardless of `socket.setdefaulttimeout`. Neither uses descriptor 0, 1 or
    2, even if those are closed: printed output would go into the socket, and the child process replaces them.

    Raises:
        OSError: no descriptor is free.
    """
    first, second = socket.socketpair()
    try:
        return _waiting(first), _waiting(second)
    except OSError:
        first.close()
        second.close()
        raise


def _waiting(end: socket.socket) -> socket.socket:
    import fcntl  # which Windows lacks

    if end.fileno() < _FIRST:
        moved = socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST))
        end.close()
        end = moved
    end.setblocking(True)
    return end
