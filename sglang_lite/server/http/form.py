"""Bodies of forms with files (RFC 7578)."""

from __future__ import annotations

import re

from sglang_lite.protocol import ParameterError

_BOUNDARY = re.compile(
    r'multipart/form-data\b.*?;\s*boundary=(?:"([^"]+)"|([^";,\s]+))', re.IGNORECASE
)
_NAME = re.compile(rb';\s*name="([^"]*)"', re.IGNORECASE)
_MAX_PARTS = 64  # parts of a form


def parse_form(data: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Returns the names and contents of a form's parts, in order.

    Args:
        data: the body.
        content_type: value of its header `Content-Type`.

    Raises:
        ParameterError: the body is not a form, is cut off, or has more than 64 parts.
    """
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise ParameterError(
            "body", f"is {content_type[:100]!r}, and no form.", hint="Send multipart/form-data."
        )
    boundary = (found[1] or found[2]).encode("latin-1")
    _, *parts = (b"\r\n" + data).split(b"\r\n--" + boundary, _MAX_PARTS + 1)
    if not parts or not parts[-1].startswith(b"--"):
        raise ParameterError(
            "body", f"has more than {_MAX_PARTS} parts, or is cut off.", hint="Send it whole."
        )
    fields = []
    for part in parts[:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if name is None:
            raise ParameterError(
                "body", "has a part without a name.", hint='Name it: form-data; name="file".'
            )
        fields.append((name[1].decode("utf-8", "replace"), content))
    return fields
