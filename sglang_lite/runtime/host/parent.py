"""Ends a child process when its parent ends, however that happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def end_with_parent(
    parent: int, look: Callable[[], object] = lambda: None, every_s: float = 0.5
) -> None:
    """Starts a thread that ends this process once its parent is gone. This also works if a forked
    copy of the parent keeps its connections open.

    Args:
        parent: process id.
        look: called at each check of the parent; an OSError, from a connection to it, also ends
            this process.
        every_s: time between two checks, in seconds.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.getppid() == parent:
                look()
                time.sleep(every_s)
        os._exit(0)

    threading.Thread(target=watch, name="sglang_lite-watch", daemon=True).start()


def be_killed_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends, even if this process is
    stopped or blocks all Python threads. Does nothing on other systems.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
