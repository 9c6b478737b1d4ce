"""The name of a process, by which `ps -o comm` and `top` tell a server's processes apart."""

import contextlib
from pathlib import Path


def name_process(name: str) -> None:
    """Names this process, of up to 15 characters; does nothing where the system has no such file (it is Linux's)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
