"""Images, videos and sounds in requests, and their places among the texts of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from sglang_lite.protocol import CapabilityError, Media, MediaKind, ParameterError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.media.data_url import parse_medium
from sglang_lite.runtime.media.placeholders import NAMES
from sglang_lite.server.fields import MEDIA_NEUTRAL

Part: TypeAlias = str | dict[str, Any]  # text, or {"type": "image"} …


class RequestImages:
    """Images, videos and sounds of a request, in the order of its messages.

    Args:
        accepted: kinds that the model takes.

    Attributes:
        found: media so far.
    """

    def __init__(self, accepted: frozenset[MediaKind]) -> None:
        self._accepted = accepted
        self.found: list[Media] = []

    def add_part(
        self,
        source: object,
        name: str,
        where: str,
        *,
        role: str = "user",
        kind: MediaKind = "image",
    ) -> dict[str, str]:
        """Adds an image, a video or a sound. Returns its placeholder: a part of the message for the
        chat template.

        Args:
            source: data URL, or base64 of the bytes; or an object that has one of these as `url` or
                `data`.
            name: name of the part in its protocol.
            where: place in the request.
            role: role of the message.
            kind: kind of the medium.

        Raises:
            CapabilityError: the model takes none of this kind, the message is not a user's, or the
                source is an address outside the web.
            ParameterError: the source is not of this kind, or its object has a field that is not
                supported.
        """
        if kind not in self._accepted:
            reads = "reads" if self._accepted else "reads only text,"
            raise CapabilityError(f"the model {reads} no {name}.", parameter=where)
        if role != "user":
            problem = f"only a user's message can have {NAMES[kind]}s, not one of role {role!r}."
            raise CapabilityError(problem, parameter=where)
        self.found.append(parse_medium(_source(source, where), where, kind))
        return {"type": kind}


def _source(given: object, where: str) -> object:
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        if name not in ("url", "data", *MEDIA_NEUTRAL) and value is not None:
            raise ParameterError(
                f"{where}.{name}", "is not supported by this server.", hint="Leave it out."
            )
    return given.get("url", given.get("data"))


def unreadable_part_error(kind: str, where: str) -> CapabilityError:
    """Returns the error for a part of a message that can't be read at its location, `where`."""
    hint = "Send text, and images in a user's message if the model reads them."
    return CapabilityError(f"no {kind} is read here.", parameter=where, hint=hint)


def join_parts(parts: Sequence[Part]) -> str | list[dict[str, Json]]:
    """Joins the parts of a message into its content: a text in which each part has its own line, or
    a list of parts if some are not text.
    """
    content: list[dict[str, Any]] = []
    for part in parts:
        if not isinstance(part, str):
            content.append(part)
        elif content and content[-1]["type"] == "text":
            content[-1] = {"type": "text", "text": f"{content[-1]['text']}\n{part}"}
        else:
            content.append({"type": "text", "text": part})
    if any(part["type"] != "text" for part in content):
        return content
    return content[0]["text"] if content else ""
