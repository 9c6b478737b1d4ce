"""For tests of programs: a server that answers as providers do, recordings, and a guard against the network.

Nothing of the package imports it, and it imports an SDK only for its types, when the first request comes.
"""

from sglang_lite.testing.answers import Buffered, Cut, Fail, Html, Say, Slow, ToolCall, overload, rate_limit
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
]  # fmt: skip
