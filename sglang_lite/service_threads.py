"""Threads that everything waits for, and which may therefore wait for nothing."""

from __future__ import annotations

import threading


class _Serving(threading.local):
    engine: bool = False


serving = _Serving()  # an engine's loop sets it on its thread; the language asks before it blocks
