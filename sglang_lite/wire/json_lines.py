"""Makes JSON a single line for every reader, by escaping rare line ends."""

from __future__ import annotations

from typing import Final

# Unicode line ends (and those of `str.splitlines`) that JSON permits unescaped in a string, in
# UTF-8.
_LINE_ENDS: Final = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def one_line(json: bytes) -> bytes:
    """Escapes U+0085, U+2028 and U+2029 in compact JSON. Many clients split lines at these
    characters, and would cut a server-sent event or a record of a file.
    """
    for end, escaped in _LINE_ENDS:
        json = json.replace(end, escaped)
    return json
