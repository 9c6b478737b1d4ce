"""Marks the threads that run an engine's loop. Such a thread must never block on a program, because
the program itself waits for the loop.
"""

from __future__ import annotations

import threading


class _ThreadMark(threading.local):
    runs_engine: bool = False


# set by an engine's loop on its own thread, and checked by the language before it blocks
this_thread = _ThreadMark()
