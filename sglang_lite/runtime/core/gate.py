"""Checks whether a call to an engine is allowed. The caller may be on any thread, or in a forked
copy of the engine's process.
"""

from __future__ import annotations

import os
import threading

from sglang_lite.protocol import BackendError, EngineClosedError

CLOSED = "the engine is closed."  # reason if the owner closed it


class Gate:
    """Checks that an engine is open, belongs to the caller's process, and may be waited for on the
    caller's thread.

    Takes no lock. Call it before taking any: in a forked copy, a lock may be held forever by a
    thread that doesn't exist there.

    Attributes:
        reason: why the engine is closed; "" while it is open.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._thread: int | None = None  # id of the engine's own thread, which calls the sinks
        self.reason = ""

    def claim_thread(self) -> None:
        """Marks the calling thread as the engine's own."""
        self._thread = threading.get_ident()

    def release_thread(self) -> None:
        """Ends the claim of the calling thread, because another thread may reuse its id."""
        if self.is_on_own_thread():
            self._thread = None

    def is_on_own_thread(self) -> bool:
        """Returns whether the calling thread has claimed the gate."""
        return threading.get_ident() == self._thread

    @property
    def is_forked_copy(self) -> bool:
        """Whether this process is a forked copy of the engine's process. A copy lacks the engine's
        threads.
        """
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raises EngineClosedError if this process is a forked copy."""
        if os.getpid() != self._process:  # not `is_forked_copy`, because each submission checks it
            raise EngineClosedError(
                f"the engine belongs to process {self._process}, and this one ({os.getpid()}) is a forked copy of it.",
                hint="Start an engine in this process (and make it the default backend here), or start processes with "
                'multiprocessing\'s "spawn" method.',
            )

    def check_open(self) -> None:
        """Raises EngineClosedError if the engine is closed, or this process is a forked copy."""
        if self.reason or os.getpid() != self._process:
            self.check_process()
            raise EngineClosedError(
                self.reason, hint="Make a new one: sgl.Engine(…)." if self.reason == CLOSED else ""
            )

    def check_blocking_call(self, name: str) -> None:
        """Checks that a blocking call may wait for the engine.

        Args:
            name: name of the call, for messages.

        Raises:
            BackendError: the call was made on the engine's own thread, and would wait for itself.
            EngineClosedError: like `check_open`.
        """
        self.check_process()
        if self.is_on_own_thread():
            raise BackendError(
                f"{name} was called on the engine's own thread, by a logit processor or a sink, and waits for it.",
                hint="Call it on another thread; submit() and its like don't wait.",
            )
        self.check_open()
