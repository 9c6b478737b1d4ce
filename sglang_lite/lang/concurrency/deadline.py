"""The moment by which the current task's work must have ended, as `time.monotonic()`; None without one."""

from contextvars import ContextVar

current_deadline: ContextVar[float | None] = ContextVar("sglang_lite_deadline", default=None)
