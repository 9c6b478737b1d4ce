"""Prompts: rendered text with the tokens that are final, and the same as messages for chat APIs."""

from __future__ import annotations

from sglang_lite.protocol.record import Record


class Span(Record, frozen=True):
    """A stretch of a prompt. Neighbouring spans without ids are tokenised as one text.

    Attributes:
        ids: tokens that are final (a model wrote them) and are never retokenised.
        special: a special token that is written out in the text is that token. False for what users and tools say: it
            is its characters and nothing else, together with the text around it too.
    """

    text: str
    ids: tuple[int, ...] | None = None
    special: bool = True


class Image(Record, frozen=True):
    """An image: encoded bytes and their media type (`image/png` …), or an address to fetch it from (no bytes)."""

    data: bytes = b""
    media_type: str = ""
    url: str = ""


class Message(Record, frozen=True):
    """A finished turn of a conversation. A content item is text or an image."""

    role: str
    content: tuple[str | Image, ...]


class Prompt(Record, frozen=True):
    """Prompt that a backend continues.

    Attributes:
        spans: the rendered text, in order; their texts concatenated are the whole prompt.
        messages: the finished turns, for chat APIs.
        role: the open turn's role, None outside a turn.
        partial: text already written in the open turn.
        images: images in the order of their placeholders in the text.
        shared: how many of the messages begin other prompts of the program, too, as far as that is known: at forks, and
            before turns of the user. The likeliest first.
    """

    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    role: str | None = None
    partial: str = ""
    images: tuple[Image, ...] = ()
    shared: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return "".join([span.text for span in self.spans])
