"""Reports of steps that don't finish: because of a kernel that hangs, a device that is lost, a logit processor that
waits."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_lite.runtime.core.step_loop import StepLoop

logger = logging.getLogger("sglang_lite")


def watch_steps(loop: StepLoop, timeout_s: float) -> None:
    """Logs the stack of each step that takes longer than `timeout_s`. Never returns.

    Args:
        loop: step loop to watch, which runs on the main thread.
        timeout_s: longest time of a step without a report, in seconds.
    """
    main = threading.main_thread().ident
    assert main is not None
    told = None
    while True:
        time.sleep(timeout_s / 4)
        since = loop.stepping_since
        if since is None or since == told or time.monotonic() - since < timeout_s:
            continue
        told = since
        stack = "".join(traceback.format_stack(sys._current_frames().get(main)))  # noqa: SLF001 # Python's own way
        logger.warning("a step of the engine has stood still for %g s. It is here:\n%s", timeout_s, stack)
