"""Names of `sglang_lite.testing` for the tests beside it."""

from sglang_lite.testing import Drop, Events, Hold, Reply

__all__ = ["Drop", "Events", "Hold", "Reply"]
