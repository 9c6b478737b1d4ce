"""JSON that every reader takes for one line."""

from __future__ import annotations

from typing import Final

# Line ends for Unicode (and `str.splitlines`) that JSON permits in a string as they are, in UTF-8.
_LINE_ENDS: Final = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def one_line(json: bytes) -> bytes:
    """JSON without whitespace between its values, with U+0085, U+2028 and U+2029 escaped: many clients split lines
    there, and would cut a server-sent event or a record of a file."""
    for end, escaped in _LINE_ENDS:
        json = json.replace(end, escaped)
    return json
