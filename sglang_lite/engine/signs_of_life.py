"""Detects that a process is stopped or swapped out. Such a process sends nothing, but has not
ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("sglang_lite")

LOOK_S = 2.0  # between two looks at a silent process
LOOKS = 5  # looks without a sign of life before a process is missing
_PROCESSES = Path("/proc")
_KILL = 1 << (signal.SIGKILL - 1)  # in a mask of pending signals
_ENDING = 0x4 | 0x200 | 0x400  # Linux's PF_EXITING, PF_DUMPCORE and PF_SIGNALED
# the same if other processes wait for it
_LOOK_OF_MANY_S = 1.0
_LOOKS_OF_MANY = 3


class SignsOfLife:
    """Watches an engine's process for signs of life. The process sends a heartbeat every half
    second, and uses processor time for it.

    C code that holds the GIL, for example during a load, a compilation or a step, can delay the
    heartbeats. It still uses processor time, which is also a sign of life. Where the system does
    not report processor time (only Linux does), a process is never reported as missing.

    Args:
        pid: id of the process; None for one on another machine, which is never reported as missing.
        end: function that ends the process when it is missing, if other processes wait for it; None
            to keep waiting.

    Attributes:
        every_s: seconds between two checks.
        missing: True after 10 s without a sign of life (3 s if `end` is given), until there is one
            again.
    """

    def __init__(self, pid: int | None, end: Callable[[], object] | None = None) -> None:
        self._pid = pid
        self._used = processor_time(pid)
        self._looks = 0
        self._end = end
        self.every_s, self._most = (
            (LOOK_S, LOOKS) if end is None else (_LOOK_OF_MANY_S, _LOOKS_OF_MANY)
        )
        self.missing = False

    @property
    def is_ending(self) -> bool:
        """True once the process has been killed or has ended: see the function `is_ending`."""
        return is_ending(self._pid)

    def record_sign(self) -> None:
        """Records that the process has sent something."""
        self._looks = 0
        self.missing = False

    def look_for_sign(self) -> None:
        """Checks whether the process has used processor time. Called when nothing has arrived for
        `every_s`. After several checks without a sign of life, logs an error once. Checks are
        counted instead of seconds, because this process may have been stopped, too.
        """
        before = self._used
        self._used = processor_time(self._pid)
        if self._used is None or self._used != before:
            self.record_sign()
            return
        self._looks += 1
        if self._looks == self._most:
            self.missing = True
            cure = f"Calls wait until it continues. If it is stopped: kill -CONT {self._pid}"
            with contextlib.suppress(Exception):  # the caller's logging handlers may raise
                logger.error(
                    "the engine's process %d has given no sign of life for %g s: it is stopped or swapped out. %s",
                    self._pid,
                    self._most * self.every_s,
                    cure if self._end is None else "It is ended.",
                )
            if self._end is not None:
                self._end()


def is_ending(pid: int | None) -> bool:
    """Returns True if a process of this machine has ended, or was killed and is about to end.

    The end of its connection comes later: the system first reclaims its memory, which takes up to
    seconds. If the system does not show processes (only Linux does), no process is ever ending.

    Args:
        pid: id of the process; None for one on another machine, which is never ending.
    """
    if pid is None or not _PROCESSES.is_dir():
        return False
    try:
        lines = (_PROCESSES / str(pid) / "status").read_text().splitlines()
        facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        flags = int((_PROCESSES / str(pid) / "stat").read_text().rpartition(") ")[2].split()[6])
    except (FileNotFoundError, ProcessLookupError):
        return True
    was_killed = any(int(facts[name], 16) & _KILL for name in ("SigPnd", "ShdPnd"))
    return was_killed or facts["State"][0] in "ZX" or bool(flags & _ENDING)


def processor_time(pid: int | None) -> int | None:
    """Returns the processor time that all threads of a process have used, in ns, or None if the
    system does not report it.
    """
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
