"""Mark of service threads: everything waits for an engine's loop, so its thread must never block on a program."""

from __future__ import annotations

import threading


class _Serving(threading.local):
    engine: bool = False


serving = _Serving()  # set by an engine's loop on its own thread, and checked by the language before it blocks
