"""Images in data URLs (RFC 2397) and in base64, and at addresses, which are fetched before an engine reads them."""

from __future__ import annotations

import base64
import binascii
import re

from sglang_lite.errors import shown
from sglang_lite.protocol import CapabilityError, Image, ParameterError

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.=-]+)*?(;base64)?,", re.ASCII)


def image_from(source: object, where: str) -> Image:
    """Image of a data URL, or of base64; one at an address of the web, whose bytes are to be fetched.

    Raises:
        CapabilityError: the image is an address of another kind.
        ParameterError: the source is no image.
    """
    if not isinstance(source, str):
        raise ParameterError(where, f"{shown(source)} is no data URL.")
    if (remote := Image(url=source)).address:
        return remote
    if re.match(r"[a-zA-Z][\w+.-]*://", source):
        raise unfetched(source, where)
    header = _DATA_URL.match(source)
    kind = "" if header is None else header[1] or ""
    if header is not None and (not kind.startswith("image/") or not header[2]):
        raise ParameterError(where, f"{header[0]!r:.80} is no image in base64.", hint="data:image/png;base64,…")
    if kind == "image/svg+xml":
        raise ParameterError(where, "an SVG is no image of pixels.", hint="Render it to PNG.")
    try:
        data = base64.b64decode(source if header is None else source[header.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ParameterError(where, f"is no base64: {error}") from None
    if not data:
        raise ParameterError(where, "is empty.", hint="Give the bytes of an image in base64.")
    return Image(data, kind)


def unfetched(url: str, where: str) -> CapabilityError:
    """Error for an address where none is fetched."""
    return CapabilityError(
        f"{shown(url)} is an address, and none is fetched here.", parameter=where,
        hint="Send the bytes as data:image/png;base64,…",
    )  # fmt: skip
