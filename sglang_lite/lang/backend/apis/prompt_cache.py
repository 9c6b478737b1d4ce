"""Prompt caches of providers: the places at which a prompt is marked for them, and the key of prompts that begin alike.
Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from sglang_lite.protocol import Message, Prompt
from sglang_lite.protocol.anything import Json

MIN_PREFIX_CHARS = 4 * 1024  # characters: about 1,024 tokens, the shortest prefix that any provider caches
_MAX_MARKS = 4  # maximum number of marks that Anthropic accepts
_MARK = {"type": "ephemeral"}


def marks(prompt: Prompt) -> tuple[int, ...]:
    """Numbers of messages in the prefixes that are worth caching: at most four, in ascending order."""
    lengths = list(accumulate((_length(message) for message in prompt.messages), initial=0))
    long = [count for count in prompt.shared if count < len(lengths) and lengths[count] >= MIN_PREFIX_CHARS]
    return tuple(sorted(long[:_MAX_MARKS]))


def cache_key(prompt: Prompt) -> str | None:
    """Key of prompts that begin alike: a digest of the shortest shared prefix. None if the prompt is too short or
    shares no prefix."""
    if not prompt.shared or sum(map(_length, prompt.messages)) < MIN_PREFIX_CHARS:
        return None
    begin = prompt.messages[: min(prompt.shared)]
    turns = repr([(message.role, message.content) for message in begin])
    return hashlib.sha256(turns.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def with_marks(request: Mapping[str, Json], prompt: Prompt) -> dict[str, Json]:
    """Request of Anthropic's Messages API with `cache_control` at the ends of the prompt's shared prefixes.

    Args:
        request: request whose `system` has the prompt's system turns, and whose `messages` have one message for each
            other turn.
    """
    marked = dict(request)
    messages = list(request["messages"])
    system = sum(1 for message in prompt.messages if message.role == "system") if "system" in request else 0
    for count in marks(prompt):
        if count > system:
            at = count - system - 1
            messages[at] = {**messages[at], "content": _marked(messages[at]["content"])}
        elif count == system:
            marked["system"] = _marked(request["system"])
    return marked | {"messages": messages}


def _marked(content: Any) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return [*blocks[:-1], {**blocks[-1], "cache_control": _MARK}]


def _length(message: Message) -> int:
    return sum(len(part) for part in message.content if isinstance(part, str))
