"""Usage as reported by OpenAI's APIs, with the field names of chat, completions and responses."""

from __future__ import annotations

from sglang_lite.protocol import Usage
from sglang_lite.protocol.anything import Foreign


def parse_usage(usage: Foreign) -> Usage:
    """Usage that an API reports. A count that it does not report, or that is no count, is 0."""
    details = getattr(usage, "prompt_tokens_details", None) or getattr(usage, "input_tokens_details", None)
    return Usage(
        _count(usage, "prompt_tokens") or _count(usage, "input_tokens"),
        _count(details, "cached_tokens"),
        _count(usage, "completion_tokens") or _count(usage, "output_tokens"),
        written_tokens=_count(details, "cache_write_tokens"),
        reasoning_tokens=reasoning_meta(usage).get("reasoning_tokens", 0),
    )


def _count(counts: Foreign, name: str) -> int:
    found = getattr(counts, name, None)
    return found if isinstance(found, int) and found > 0 else 0


def reasoning_meta(usage: Foreign) -> dict[str, int]:
    """Metadata with the number of tokens that a reported usage spent on reasoning; empty if unknown."""
    details = getattr(usage, "completion_tokens_details", None) or getattr(usage, "output_tokens_details", None)
    tokens = getattr(details, "reasoning_tokens", None)
    return {"reasoning_tokens": tokens} if isinstance(tokens, int) else {}
