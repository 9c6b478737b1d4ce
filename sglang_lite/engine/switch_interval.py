"""Python's switch interval, shorter while an engine has a process of its own.

A thread that has waited for the engine needs the interpreter's lock, and gets it from a thread that computes only after
the switch interval: 5 ms by default, and beside eight such threads 40. A submission and its answer need it three times.
So it is 0.5 ms from an engine's start to its end, and what it was afterwards. (Eight threads that compute lose a tenth
of their speed by that; one loses nothing.)
"""

from __future__ import annotations

import sys
import threading

SHORT_S = 0.0005

_lock = threading.Lock()
_wanted = 0  # engines
_before = SHORT_S


def shorten() -> None:
    """Makes it short, until as many calls of `restore` as of this."""
    global _wanted, _before
    with _lock:
        _wanted += 1
        if _wanted == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, SHORT_S))


def restore() -> None:
    """Makes it what it was, unless somebody has changed it meanwhile."""
    global _wanted
    with _lock:
        _wanted -= 1
        if not _wanted and abs(sys.getswitchinterval() - SHORT_S) < 1e-6:
            sys.setswitchinterval(_before)
