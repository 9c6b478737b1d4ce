"""Namespaces of API keys, so that two clients can use the same name for a request or session."""

from __future__ import annotations

import hashlib


def scope_name_to_key(key: str, name: str) -> str:
    """Returns the engine's name for a client's request, session or namespace. The same name under
    two API keys gives two different engine names.

    Args:
        key: API key of the client; "" if none is required, in which case the name is unchanged.
        name: name that the client has given.
    """
    return f"{hashlib.sha256(key.encode()).hexdigest()} {name}" if key else name
