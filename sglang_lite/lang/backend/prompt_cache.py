"""Prompt caches of providers: where a prompt is marked for them, and by which key its likes are found. All pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from sglang_lite.protocol import Message, Prompt
from sglang_lite.protocol.anything import Json

LEAST = 4 * 1024  # characters: about 1,024 tokens, of which no provider caches less
_MOST = 4  # marks that Anthropic takes
_MARK = {"type": "ephemeral"}


def marks(prompt: Prompt) -> tuple[int, ...]:
    """Numbers of messages at which prefixes end that are worth keeping: at most four, in order."""
    lengths = list(accumulate((_length(message) for message in prompt.messages), initial=0))
    long = [count for count in prompt.shared if count < len(lengths) and lengths[count] >= LEAST]
    return tuple(sorted(long[:_MOST]))


def cache_key(prompt: Prompt) -> str | None:
    """Key of prompts that begin as this one: a digest of its shortest shared prefix. None: it is too short, or it
    shares none."""
    if not prompt.shared or sum(map(_length, prompt.messages)) < LEAST:
        return None
    begin = prompt.messages[: min(prompt.shared)]
    said = repr([(message.role, message.content) for message in begin])
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def with_marks(request: Mapping[str, Json], prompt: Prompt) -> dict[str, Json]:
    """A request of Anthropic's Messages API with `cache_control` where the prompt's prefixes end.

    Args:
        request: with the prompt's system turns as `system`, and a message for each of its others.
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
