"""The moment by which what runs here must have ended."""

from contextvars import ContextVar

due: ContextVar[float | None] = ContextVar("sglang_lite_due", default=None)  # as `time.monotonic()`; None: no such
