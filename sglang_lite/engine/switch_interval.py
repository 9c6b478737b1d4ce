"""Python's switch interval, shorter while an engine's answers are waited for.

A thread that has waited for the engine needs the interpreter's lock, and gets it from a thread that computes only after
the switch interval: 5 ms by default, and beside eight such threads 40. A submission and its answer need it three times.
So it is 1 ms while something is open at an engine, and what it was afterwards.
"""

from __future__ import annotations

import sys
import threading

SHORT_S = 0.001

_lock = threading.Lock()
_wanted = 0  # engines that have something open
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
