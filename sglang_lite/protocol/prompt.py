"""Prompts: rendered text with final tokens, and the same conversation as messages for chat APIs."""

from __future__ import annotations

from typing import Literal, TypeAlias

from sglang_lite.protocol.record import Record

MediaKind: TypeAlias = Literal["image", "video", "audio"]


class Span(Record, frozen=True):
    """Part of a prompt's text. Adjacent spans without ids are tokenised as one text.

    Attributes:
        text: text of the span.
        ids: final token ids, as a model wrote them, which are never retokenised; None for
            other text.
        special: whether the name of a special token in the text stands for that token. False
            for text of users and tools: it is tokenised as ordinary characters, even if it
            forms a special token's name together with adjacent text.
    """

    text: str
    ids: tuple[int, ...] | None = None
    special: bool = True


def is_placeholder(span: Span) -> bool:
    """Returns True if a span stands for an image. The ids of such a span are an empty tuple. It may
    have a text, for backends that read text.
    """
    return span.ids == ()


class Media(Record, frozen=True):
    """An image, video or sound: encoded bytes and their media type (`image/png`, `video/mp4` …), or
    a URL without bytes.

    Attributes:
        frames: number of frames of a video shown to the model; 0 for its family's default.
    """

    data: bytes = b""
    media_type: str = ""
    url: str = ""
    frames: int = 0

    @property
    def kind(self) -> MediaKind:
        """Kind of medium, according to its type; "image" without a type."""
        if self.media_type.startswith("video/"):
            return "video"
        return "audio" if self.media_type.startswith("audio/") else "image"

    @property
    def address(self) -> str:
        """Web address from which to fetch the bytes, or "" if there is none."""
        return self.url if self.url[:8].lower().startswith(("http://", "https://")) else ""


class Message(Record, frozen=True):
    """A finished turn of a conversation. Each content item is text or media."""

    role: str
    content: tuple[str | Media, ...]

    @property
    def text(self) -> str:
        """Text of the turn, without its media."""
        if len(self.content) == 1 and isinstance(self.content[0], str):
            return self.content[0]
        return "".join([part for part in self.content if isinstance(part, str)])


class PromptTools(Record, frozen=True):
    """Tools shown to a model, because its answer may call them.

    Attributes:
        shown: JSON texts of the tools, in the form that chat templates and chat APIs take.
        family: format in which the model writes calls (a name of text.tool_formats), or None
            for one JSON object.
        parallel: whether several tools may be called in one answer.
    """

    shown: tuple[str, ...]
    family: str | None = None
    parallel: bool = False


class Prompt(Record, frozen=True):
    """A prompt for a backend to continue.

    Attributes:
        spans: parts of the rendered text, in order; their concatenated texts are the whole
            prompt.
        messages: finished turns, for chat APIs.
        role: role of the open turn, or None if no turn is open.
        partial: text already written in the open turn.
        images: images in the order of their placeholders in the text: see `is_placeholder`.
        shared: numbers of leading messages that other prompts of the program are known to
            share, at forks and before user turns, likeliest first.
        tools: tools to show the model that are not in the spans yet, or None. A backend
            that renders no conversation itself calls `lang.backend.rendering.with_tools`.
    """

    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    role: str | None = None
    partial: str = ""
    images: tuple[Media, ...] = ()
    shared: tuple[int, ...] = ()
    tools: PromptTools | None = None

    @property
    def text(self) -> str:
        return "".join([span.text for span in self.spans])
