"""Warnings of what a server left out of its answer, for the metadata of the node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sglang_lite.protocol import Generation, SamplingParams, Unset, Usage

WARNINGS: Final[Mapping[str, str]] = {
    "usage": "usage: the server did not report it, or only a part; what is missing is shown as 0",
    "logprobs": "logprobs: requested, but the server sent none",
    "alternatives": "top_logprobs or token_ids_logprob: requested, but the server sent no alternatives",
    "finish_reason": "finish_reason: the server sent none, so the answer is taken as complete",
}


def unsent(answer: Generation, params: SamplingParams, usage: Usage, *, end_assumed: bool = False) -> list[str]:
    """Warnings for what an answer lacks, as texts of `WARNINGS`.

    Args:
        params: parameters of the request.
        usage: usage of all samples of the request.
        end_assumed: whether the server sent no finish reason.
    """
    asked = params.return_logprob is True and bool(answer.text)
    tops, ids = params.top_logprobs_num, params.token_ids_logprob
    alternatives = (not isinstance(tops, Unset) and tops > 0, not isinstance(ids, Unset) and bool(ids))
    missing = {
        "usage": not usage.prompt_tokens or (bool(answer.text) and not usage.completion_tokens),
        "logprobs": asked and not answer.output_logprobs,
        "alternatives": asked and any(
            wanted and not any(getattr(each, kind) for each in answer.output_logprobs)
            for wanted, kind in zip(alternatives, ("top", "ids"))
        ),
        "finish_reason": end_assumed,
    }  # fmt: skip
    return [warning for name, warning in WARNINGS.items() if missing[name]]
