"""Names of each API key's own: what one client calls its requests and sessions says nothing to another."""

from __future__ import annotations

import hashlib


def own_name(key: str, name: str) -> str:
    """Name by which the engine knows what a client has named: different for the same name of another key.

    Args:
        key: API key of the client; "" if none is required, in which case the name is unchanged.
        name: name that the client has given.
    """
    return f"{hashlib.sha256(key.encode()).hexdigest()} {name}" if key else name
