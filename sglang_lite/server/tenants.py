"""Namespaces of API keys: the names that one client gives its requests and sessions mean nothing to
another.
"""

from __future__ import annotations

import hashlib


def own_name(key: str, name: str) -> str:
    """Returns the engine's name for what a client has named. It differs from that of the same name
    under another key.

    Args:
        key: API key of the client; "" if none is required, in which case the name is unchanged.
        name: name that the client has given.
    """
    return f"{hashlib.sha256(key.encode()).hexdigest()} {name}" if key else name
