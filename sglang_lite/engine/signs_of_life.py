"""Watch over a process that is stopped or swapped out: it neither sends anything nor ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time

logger = logging.getLogger("sglang_lite")

LOOK_S = 2.0  # between two looks at a process from which nothing comes
LOOKS = 5  # looks without a sign of life before it is missing


class SignsOfLife:
    """Signs of life of an engine's process, which sends a beat every half a second and takes processor time for it.

    C code that keeps Python's lock, as in a load, a compilation or a step, can keep the beats back; then the process
    still takes processor time. Where the system does not tell it (only Linux does), no process is ever missing.

    Args:
        pid: id of the process; None for one on another machine, which is never missing.

    Attributes:
        missing: True while none has been seen for 10 s.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid, self._used, self._looks = pid, processor_time(pid), 0
        self.missing = False

    def seen(self) -> None:
        """Notes that the process has sent something."""
        self._looks, self.missing = 0, False

    def look(self) -> None:
        """Looks for another sign when nothing has come for `LOOK_S`. Logs once that there is none. Counts looks, not
        time: this process may have been stopped, too."""
        before, self._used = self._used, processor_time(self._pid)
        if self._used is None or self._used != before:
            self.seen()
            return
        self._looks += 1
        if self._looks == LOOKS:
            self.missing = True
            with contextlib.suppress(Exception):  # the caller's logging handlers may raise
                logger.error(
                    "the engine's process %d has given no sign of life for %g s: it is stopped or swapped out. "
                    "Calls wait until it continues. If it is stopped: kill -CONT %d",
                    self._pid, LOOKS * LOOK_S, self._pid,
                )  # fmt: skip


def processor_time(pid: int | None) -> int | None:
    """Processor time that all threads of a process have taken, in ns, or None if the system does not tell it."""
    if pid is None:
        return None
    clock = ctypes.c_int()
    clock_of = getattr(ctypes.CDLL(None), "clock_getcpuclockid", None)  # macOS lacks it
    if clock_of is None or clock_of(ctypes.c_int(pid), ctypes.byref(clock)):
        return None
    try:
        return time.clock_gettime_ns(clock.value)
    except OSError:  # the process has ended
        return None
