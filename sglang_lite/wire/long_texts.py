"""Long schemas in the JSON of a body: a client sends each one once, and then refers to it by its
hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

LONG = 1 << 16  # bytes of a schema's JSON from which it is replaced by its hash
KEEP = "x-keep-texts"  # header of a body whose long schemas the server should keep
# Inside a string a quotation mark follows a backslash, so these are members of objects.
_SCHEMA = re.compile(rb'"schema":("(?:[^"\\]++|\\.)*+")', re.DOTALL)
_NAMED = re.compile(rb'"schema":\{"\$sha256":"([0-9a-f]{64})"\}')


def replace_long_schemas(body: bytes) -> bytes:
    """Replaces each long schema of a body with `{"$sha256":"…"}`, the hash of its JSON."""
    if len(body) < LONG:
        return body
    return _SCHEMA.sub(
        lambda found: (
            found[0] if len(found[1]) < LONG else b'"schema":{"$sha256":"%s"}' % _digest(found[1])
        ),
        body,
    )


def long_schemas(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the hash and the JSON of each long schema of a body."""
    for found in _SCHEMA.finditer(body):
        if len(found[1]) >= LONG:
            yield _digest(found[1]), found[1]


def referenced_hashes(body: bytes) -> list[bytes]:
    """Returns the hashes that a body refers to."""
    return _NAMED.findall(body) if b'"$sha256"' in body else []


def restore_schemas(body: bytes, texts: dict[bytes, bytes]) -> bytes:
    """Replaces the hashes in a body with the JSON of their schemas."""
    return _NAMED.sub(lambda found: b'"schema":' + texts[found[1]], body)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
