"""Images, videos and sounds as spans of a prompt."""

from __future__ import annotations

from typing import NamedTuple

from sglang_lite.protocol import Media, Span
from sglang_lite.protocol.record import Record


class Grid(NamedTuple):
    """Features of an image, video or sound, arranged in rows and columns. Their tokens are
    adjacent, and the model distinguishes them by position.

    Attributes:
        rows, columns: size of a plane.
        times: positions in time of its planes; an image has one plane.
    """

    rows: int
    columns: int
    times: tuple[int, ...] = (0,)

    @property
    def size(self) -> int:
        return len(self.times) * self.rows * self.columns


class MediaItem(Record, frozen=True):
    """Image, video or sound of a prompt.

    Attributes:
        medium: its bytes.
        key: hash of the bytes and of the settings with which they are prepared.
        count: number of its features, each of which takes one token.
        token_id: id of the token that stands for each of them in the model's text.
        grids: all its features in grids, if the model distinguishes them by position; else empty.
        both_ways: whether its tokens, which are adjacent, attend to each other in both directions.
    """

    medium: Media
    key: bytes
    count: int
    token_id: int
    grids: tuple[Grid, ...] = ()
    both_ways: bool = False


class ImageSpan(Span, frozen=True):
    """Placeholders of a whole image, video or sound, or of one part of it.

    Attributes:
        text: name of the token that stands for them in the model's text.
        ids: virtual ids.
        item: the medium, in the span of its first part; None in the spans of its other parts.
    """

    item: MediaItem | None = None
