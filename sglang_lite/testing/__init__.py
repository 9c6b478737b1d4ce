"""Helpers for tests of programs: a server that answers like providers, recordings, and a guard
against network access.

No other module of the package imports this one. An SDK is imported only for its types, on the first
request.
"""

from sglang_lite.testing.answers import (
    Buffered,
    Cut,
    Fail,
    Html,
    Say,
    Slow,
    ToolCall,
    overload,
    rate_limit,
)
from sglang_lite.testing.http import Drop, Events, Hold, Reply, Request
from sglang_lite.testing.network import no_network
from sglang_lite.testing.server import ServerForTests, server_for_tests

__all__ = [
    "Buffered",
    "Cut",
    "Drop",
    "Events",
    "Fail",
    "Hold",
    "Html",
    "Reply",
    "Request",
    "Say",
    "ServerForTests",
    "Slow",
    "ToolCall",
    "no_network",
    "overload",
    "rate_limit",
    "server_for_tests",
]
