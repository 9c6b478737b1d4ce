"""Images among the spans of a prompt."""

from __future__ import annotations

from sglang_lite.protocol import Image, Span
from sglang_lite.protocol.record import Record


class MediaItem(Record, frozen=True):
    """Image of a prompt.

    Attributes:
        image: its bytes.
        key: hash of the bytes and of the settings that they are prepared with.
        count: number of its features, each of which takes one token.
        grid: rows and columns of its features, if the model tells them apart by position.
        both_ways: whether its tokens, which lie side by side, attend to each other in both directions.
    """

    image: Image
    key: bytes
    count: int
    grid: tuple[int, int] | None = None
    both_ways: bool = False


class ImageSpan(Span, frozen=True):
    """Placeholders of an image, or of a part of one.

    Attributes:
        text: name of the token that the model's text has in their place.
        ids: virtual ids.
        item: the image, in the span of its first part; None in those of the others.
    """

    item: MediaItem | None = None
