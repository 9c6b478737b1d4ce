"""Truncates prompts as vLLM's fields `truncate_prompt_tokens` and `truncation_side` request."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.protocol import ParameterError, Prompt
from sglang_lite.server.parameters.completion_fields import CompletionFields
from sglang_lite.server.reader import RequestReader


def truncated_ids(
    reader: RequestReader,
    body: CompletionFields,
    prompt: Prompt | str | Sequence[int],
    max_tokens: int,
) -> Sequence[int] | None:
    """Returns the token ids of the truncated prompt, or None if the request doesn't truncate its
    prompt.

    Args:
        max_tokens: maximum number of tokens of the answer. If `truncate_prompt_tokens` is -1, the
            prompt is truncated so that this many tokens still fit after it.

    Raises:
        ParameterError: the number is invalid, or the prompt has images.
    """
    count = body.truncate_prompt_tokens
    if count is None:
        if body.truncation_side is not None:
            raise ParameterError("truncation_side", "needs truncate_prompt_tokens.")
        return None
    if count != -1 and count < 1:
        raise ParameterError(
            "truncate_prompt_tokens",
            f"{count} is neither a number of tokens nor -1.",
            hint="-1 keeps what fits beside the answer.",
        )
    if isinstance(prompt, Prompt) and prompt.images:
        raise ParameterError(
            "truncate_prompt_tokens", "can't cut a prompt with images.", hint="Leave it out."
        )
    kept = max(reader.longest - max_tokens, 1) if count == -1 else count
    ids = reader.ids(prompt) if isinstance(prompt, Prompt | str) else prompt
    return ids[:kept] if body.truncation_side == "right" else ids[-kept:]
