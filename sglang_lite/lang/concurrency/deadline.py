"""Deadline of the current task, as `time.monotonic()`, or None if it has no deadline."""

from contextvars import ContextVar

current_deadline: ContextVar[float | None] = ContextVar("sglang_lite_deadline", default=None)
