"""The turns of a loop that answers calls: commands of other threads, then a step."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sglang_lite.protocol import EngineClosedError, SglError
from sglang_lite.runtime.core.inbox import Inbox

logger = logging.getLogger("sglang_lite")


def run_turns(
    inbox: Inbox, idle: Callable[[], bool], step: Callable[[], None], fail: Callable[[SglError], None]
) -> None:
    """Runs commands and steps until the inbox is closed.

    Args:
        idle: function that tells that a step would have nothing to do, so that commands are waited for.
        step: function that computes what waits. An exception ends the loop.
        fail: function that ends what still waits with an error.
    """
    inbox.gate.claim()
    try:
        while not inbox.closing:
            if idle():
                inbox.wait()
            inbox.run()
            step()
    except BaseException as error:
        inbox.crash = error
        logger.exception("the engine's loop has crashed")
        raise
    finally:
        inbox.end()
        inbox.run()
        fail(EngineClosedError("the engine was closed before the request finished."))
