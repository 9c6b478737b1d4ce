"""Shortens Python's switch interval while an engine has its own process.

A thread that has waited for the engine needs the interpreter's lock. If another thread computes, it
gets the lock only after the switch interval: 5 ms by default, and 40 ms with eight computing
threads. A submission and its answer need the lock three times. So the interval is 0.5 ms while an
engine runs, and is restored afterwards. (This costs eight computing threads a tenth of their speed,
and a single one nothing.)
"""

from __future__ import annotations

import sys
import threading

SHORT_S = 0.0005

_lock = threading.Lock()
_wanted = 0  # number of engines that want the short interval
_before = SHORT_S


def shorten_switch_interval() -> None:
    """Shortens the switch interval. Calls may be nested: the interval stays short until
    `restore_switch_interval` has been called equally often.
    """
    global _wanted, _before
    with _lock:
        _wanted += 1
        if _wanted == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, SHORT_S))


def restore_switch_interval() -> None:
    """Undoes one call of `shorten_switch_interval`. The last call restores the former interval,
    unless other code has changed it meanwhile.
    """
    global _wanted
    with _lock:
        _wanted -= 1
        if not _wanted and abs(sys.getswitchinterval() - SHORT_S) < 1e-6:
            sys.setswitchinterval(_before)
