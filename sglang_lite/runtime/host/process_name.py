"""Sets the name of a process, which tells a server's processes apart in `ps -o comm` and `top`."""

import contextlib
from pathlib import Path


def set_process_name(name: str) -> None:
    """Sets this process's name, up to 15 characters. Does nothing on systems other than Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
