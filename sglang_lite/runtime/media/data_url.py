"""Parses images, videos and sounds given as data URLs (RFC 2397), as base64, or as web addresses.
Addresses are fetched before an engine reads them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping

from sglang_lite.errors import short_repr
from sglang_lite.protocol import CapabilityError, Media, MediaKind, ParameterError

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.=-]+)*?(;base64)?,", re.ASCII)
ARTICLES: Mapping[MediaKind, str] = {"image": "an image", "video": "a video", "audio": "a sound"}


def parse_medium(source: object, where: str, kind: MediaKind = "image") -> Media:
    """Parses an image, video or sound given as a data URL or as base64 text. A web address is
    returned as a medium without bytes, which are fetched later.

    Args:
        source: the URL, or base64.
        where: name of the parameter, for errors.
        kind: required kind of medium.

    Raises:
        CapabilityError: the source is an address with another scheme.
        ParameterError: the source is none of these.
    """
    untold = "" if kind == "image" else f"{kind}/*"
    if not isinstance(source, str):
        raise ParameterError(where, f"{short_repr(source)} is no data URL.")
    if (remote := Media(url=source, media_type=untold)).address:
        return remote
    if re.match(r"[a-zA-Z][\w+.-]*://", source):
        raise unsupported_url_error(source, where)
    header = _DATA_URL.match(source)
    found = "" if header is None else header[1] or ""
    if header is not None and (not found.startswith(f"{kind}/") or not header[2]):
        example = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}[kind]
        raise ParameterError(
            where, f"{header[0]!r:.80} is no {kind} in base64.", hint=f"data:{example};base64,…"
        )
    if found == "image/svg+xml":
        raise ParameterError(where, "an SVG is no image of pixels.", hint="Render it to PNG.")
    try:
        data = base64.b64decode(source if header is None else source[header.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ParameterError(where, f"is no base64: {error}") from None
    if not data:
        raise ParameterError(
            where, "is empty.", hint=f"Give the bytes of {ARTICLES[kind]} in base64."
        )
    return Media(data, found or untold)


def unsupported_url_error(url: str, where: str) -> CapabilityError:
    """Returns the error for a web address where only data is accepted."""
    return CapabilityError(
        f"{short_repr(url)} is an address, and none is fetched here.",
        parameter=where,
        hint="Send the bytes as data:image/png;base64,…",
    )
