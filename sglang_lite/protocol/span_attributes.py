"""Attributes of a result in OpenTelemetry spans, named by the semantic conventions for generative
AI where possible. No attribute contains text: texts may be private, and the spans may be sent to a
third party's collector.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.protocol.results import Generation, Selection


def result_attributes(
    result: Generation | Selection,
) -> dict[str, str | int | float | Sequence[str]]:
    """Returns the attributes of a span for a result: its numbers of tokens, its times and its
    finish reason.
    """
    usage = result.usage
    attributes: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "sglang_lite.forced_tokens": usage.forced_tokens,
        "sglang_lite.queue_s": usage.queue_s,
        "sglang_lite.first_token_s": usage.first_token_s,
    }
    if isinstance(result, Generation):
        attributes["gen_ai.response.finish_reasons"] = [result.finish_reason]
    return attributes
