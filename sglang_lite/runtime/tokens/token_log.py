"""The one rule that makes ids of a prompt: what a model wrote keeps its ids, text between is tokenised as one.

It holds on every path (call by call, whole programs), so their tokens, cache hits and scores agree.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_lite.protocol import Span
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


def tokenise(tokenizer: Tokenizer, spans: Iterable[Span]) -> list[int]:
    """The ids of a prompt. The beginning-of-sequence id is added once, before the first text."""
    ids: list[int] = []
    text = ""
    for span in spans:
        if span.ids is None:
            text += span.text
            continue
        if text:
            ids += tokenizer.encode(text, first=not ids)
            text = ""
        ids += span.ids
    if text or not ids:
        ids += tokenizer.encode(text, first=not ids)
    return ids


def kept_spans(tokenizer: Tokenizer, ids: tuple[int, ...], text: str) -> tuple[Span, ...]:
    """How a generation enters the prompt that follows it.

    The longest run of its tokens whose text lies within `text` (a stop string may cut inside a token) keeps its ids;
    what is left of the text is tokenised with what comes next.
    """
    for count in range(len(ids), 0, -1):
        kept = tokenizer.decode(ids[:count])
        if text.startswith(kept) and not kept.endswith("\ufffd"):
            head = Span(kept, ids[:count])
            return (head, Span(text[len(kept) :])) if len(kept) < len(text) else (head,)
    return (Span(text),) if text else ()
