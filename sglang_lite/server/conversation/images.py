"""Images in requests, and their places among the texts of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from sglang_lite.protocol import CapabilityError, Image
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.media.data_url import image_from

Part: TypeAlias = str | dict[str, Any]  # text, or {"type": "image"}


class RequestImages:
    """Images of a request, in the order in which its messages have them.

    Args:
        accepted: whether the model reads images.

    Attributes:
        found: images so far.
    """

    def __init__(self, *, accepted: bool) -> None:
        self._accepted = accepted
        self.found: list[Image] = []

    def part(self, source: object, kind: str, where: str, *, role: str = "user") -> dict[str, str]:
        """Part of a message that stands for an image.

        Args:
            source: data URL, or base64 of the bytes.
            kind: name of the part in its protocol.
            where: place in the request.
            role: role of the message.

        Raises:
            CapabilityError: the model reads no images, the message is no user's, or the image is an address.
            ParameterError: the source is no image.
        """
        if not self._accepted:
            raise CapabilityError(f"the model reads only text, no {kind}.", parameter=where)
        if role != "user":
            raise CapabilityError(f"only a user's message can have images, not one of role {role!r}.", parameter=where)
        self.found.append(image_from(source, where))
        return {"type": "image"}


def unread_part(kind: str, where: str) -> CapabilityError:
    """Error for a part of a message that no model reads here, or not in that place."""
    hint = "Send text, and images in a user's message if the model reads them."
    return CapabilityError(f"no {kind} is read here.", parameter=where, hint=hint)


def joined(parts: Sequence[Part]) -> str | list[dict[str, Json]]:
    """Content of a message: its texts, each on a line of its own; a list of parts if it has images."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if not isinstance(part, str):
            content.append(part)
        elif content and content[-1]["type"] == "text":
            content[-1] = {"type": "text", "text": f"{content[-1]['text']}\n{part}"}
        else:
            content.append({"type": "text", "text": part})
    if any(part["type"] == "image" for part in content):
        return content
    return content[0]["text"] if content else ""
