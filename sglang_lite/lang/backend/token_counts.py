"""Counts tokens: those that a backend has used, and those that a budget assumes if a provider
reports no usage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Protocol

from sglang_lite.protocol import (
    Generation,
    Played,
    ProgramEvent,
    ProgramSink,
    Prompt,
    Selection,
    Usage,
)

# bytes of a prompt for each token; English has four, source code about three
_BYTES_A_TOKEN: Final = 3
_OF_A_MESSAGE: Final = 8  # tokens of markup around a turn
_OF_AN_IMAGE: Final = 1_500
# Warning in the metadata of a node.
NOT_CREDIBLE: Final = (
    "usage: missing, or too small to be true, so the budget counts the call at its longest"
)


class TiktokenEncoding(Protocol):
    """Tokenizer of a model, with the interface of `tiktoken.encoding_for_model(…)`."""

    def encode(self, text: str) -> Sequence[int]:
        """Returns the token ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids."""


def count_text_tokens(text: str, tokenizer: TiktokenEncoding | None) -> int:
    """Counts the tokens of a text with the model's tokenizer. Without a tokenizer, estimates the
    number and errs on the high side.
    """
    if tokenizer is not None:
        return _count_exactly(tokenizer, text)
    return len(text.encode("utf-8", "replace")) // _BYTES_A_TOKEN + 1


def estimate_tokens(prompt: Prompt, tokenizer: TiktokenEncoding | None = None) -> int:
    """Estimates the tokens of a prompt, including its turn markup, tools and images. Uses either
    the text or the messages of the prompt, whichever has more tokens.
    """
    text = max(
        count_text_tokens(each, tokenizer)
        for each in (prompt.text, "\n".join(_message_texts(prompt)))
    )
    if prompt.tools is not None:
        text += count_text_tokens("\n".join(prompt.tools.shown), tokenizer)
    return text + _OF_A_MESSAGE * (len(prompt.messages) + 1) + _OF_AN_IMAGE * len(prompt.images)


def is_credible(
    reported: Usage, prompt: Prompt, texts: Iterable[str], tokenizer: TiktokenEncoding | None
) -> bool:
    """Returns True if a reported usage is plausible. It must not be below the number of tokens in
    the conversation and the answers. The model's tokenizer counts them; without a tokenizer, one
    token per word is assumed.
    """
    conversation = _message_texts(prompt) or [prompt.text]
    sent, answered = (
        sum(_minimum_token_count(text, tokenizer) for text in each)
        for each in (conversation, texts)
    )
    return reported.prompt_tokens >= max(sent, 1) and reported.completion_tokens >= answered


def _message_texts(prompt: Prompt) -> list[str]:
    return [
        part for message in prompt.messages for part in message.content if isinstance(part, str)
    ]


def _minimum_token_count(text: str, tokenizer: TiktokenEncoding | None) -> int:
    return len(text.split()) if tokenizer is None else _count_exactly(tokenizer, text.strip())


def _count_exactly(tokenizer: TiktokenEncoding, text: str) -> int:
    # tiktoken's `encode` rejects special tokens
    encode = getattr(tokenizer, "encode_ordinary", tokenizer.encode)
    return len(encode(text))


def possible_unreported_usage(reported: Usage, possible: Usage) -> Usage:
    """Returns how far a call's `possible` usage exceeds the reported usage."""
    return Usage(
        max(possible.prompt_tokens - reported.prompt_tokens, 0),
        0,
        max(possible.completion_tokens - reported.completion_tokens, 0),
    )


# Usages that calls of the current node may have had, and that none of their answers or errors
# reports; None outside a run with a budget.
unreported_usages: ContextVar[list[Usage] | None] = ContextVar(
    "sglang_lite_unreported_usages", default=None
)


def add_unreported_usage(usage: Usage, times: int = 1) -> None:
    """Charges the current node for usage that a provider did not report. The usage is charged
    `times` times. Does nothing outside a run with a budget.
    """
    usages = unreported_usages.get()
    if usages is not None:
        usages += [usage] * times


@dataclass(slots=True)
class SentRequests:
    """Counts of the requests that a call has made, including each retry by an SDK.

    Attributes:
        tried: number of requests that were started.
        processed: number of requests that a server may have processed: they were sent and not
            rejected.
    """

    tried: int = 0
    processed: int = 0


# Requests of the current call; None if they are not counted.
sent_requests: ContextVar[SentRequests | None] = ContextVar(
    "sglang_lite_sent_requests", default=None
)


@dataclass
class TokenUsage:
    """Tokens that a backend has used since it was created or reset."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    # answers come on several threads
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def add_usage(self, usage: Usage) -> None:
        with self._lock:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens

    def count_and_forward(self, sink: ProgramSink, event: ProgramEvent) -> None:
        """Passes a program's event on to the sink. If the event is a result, first adds its usage."""
        if isinstance(event, Played) and isinstance(event.event, Generation | Selection):
            self.add_usage(event.event.usage)
        sink(event)

    def reset(self) -> None:
        with self._lock:
            self.prompt_tokens = self.completion_tokens = 0
