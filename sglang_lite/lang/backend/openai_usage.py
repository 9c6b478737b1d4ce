"""Usage as reported by OpenAI's APIs, with the field names of chat, completions and responses."""

from __future__ import annotations

from sglang_lite.protocol import Usage
from sglang_lite.protocol.anything import Foreign


def parse_usage(usage: Foreign) -> Usage:
    """Usage that an API reports; all zero if it reports none."""
    prompt = getattr(usage, "prompt_tokens", None) or getattr(usage, "input_tokens", None) or 0
    completion = getattr(usage, "completion_tokens", None) or getattr(usage, "output_tokens", None) or 0
    details = getattr(usage, "prompt_tokens_details", None) or getattr(usage, "input_tokens_details", None)
    return Usage(
        prompt, getattr(details, "cached_tokens", None) or 0, completion,
        written_tokens=getattr(details, "cache_write_tokens", None) or 0,
        reasoning_tokens=reasoning_meta(usage).get("reasoning_tokens", 0),
    )  # fmt: skip


def reasoning_meta(usage: Foreign) -> dict[str, int]:
    """Metadata with the number of tokens that a reported usage spent on reasoning; empty if unknown."""
    details = getattr(usage, "completion_tokens_details", None) or getattr(usage, "output_tokens_details", None)
    tokens = getattr(details, "reasoning_tokens", None)
    return {} if tokens is None else {"reasoning_tokens": tokens}
