"""Mark for threads that run an engine's loop. Everything waits for the loop, so such a thread must
never block on a program.
"""

from __future__ import annotations

import threading


class _ThreadMark(threading.local):
    runs_engine: bool = False


# set by an engine's loop on its own thread, and checked by the language before it blocks
this_thread = _ThreadMark()
