"""Account of one call of a provider's API in a run with a budget: what it may have used beyond what it reported."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from dataclasses import asdict
from typing import TypeVar

from sglang_lite.lang.backend.apis.api import ApiRequest, PartialAnswer, Reader
from sglang_lite.lang.backend.token_counts import (
    NOT_CREDIBLE,
    SentRequests,
    Tokenizer,
    beyond,
    estimated_tokens,
    is_credible,
    note_unreported,
    sent_requests,
    tokens_of,
    unreported_usages,
)
from sglang_lite.protocol import BackendError, SglError, Unset, Usage

_T = TypeVar("_T")


class CallAccount:
    """Account of one call, which is a request, those of the SDK's retries, and more if the model pauses. Without effect
    outside a run with a budget.

    Args:
        request: request that is asked.
        reader: reader of the answer.
        tokenizer: tokenizer of the model, or None if unknown.

    Attributes:
        answered: number of requests whose answer was read to its end.
    """

    def __init__(self, request: ApiRequest, reader: Reader, tokenizer: Tokenizer | None) -> None:
        self._request, self._reader, self._tokenizer = request, reader, tokenizer
        self._sent = SentRequests()
        self._over = False
        self.answered = 0

    async def counted(self, sending: Awaitable[_T]) -> _T:
        """Result of `sending`, whose requests are counted."""
        token = sent_requests.set(self._sent)
        try:
            return await sending
        finally:
            sent_requests.reset(token)

    def end(self) -> None:
        """Ends the account of a call that was answered: of requests that the SDK had to repeat, and of an answer that
        reports less than it must have used, all that they may have used counts."""
        self._over = True
        if unreported_usages.get() is None:
            return
        note_unreported(self._possible(), self._sent.processed - self.answered)
        reported, samples = self._reader.usage, self._reader.samples.values()
        whole = all(sample.finish_reason is not None for sample in samples)
        if not whole or not is_credible(reported, self._request.prompt, map(_text, samples), self._tokenizer):
            note_unreported(beyond(reported, self._possible()))
            self._reader.meta.setdefault("warnings", []).append(NOT_CREDIBLE)

    def fail(self, error: SglError | None) -> None:
        """Ends the account of a call that failed, unless it has ended: nobody tells what its requests had used.

        Args:
            error: None for a call that was stopped, whose last request counts elsewhere.
        """
        if self._over or unreported_usages.get() is None:
            return
        unanswered = self._sent.processed - self.answered
        if not self._sent.tried:  # by an SDK with connections of its own
            unanswered = isinstance(error, BackendError) and error.usage is None
        if error is None:
            note_unreported(self._possible(), unanswered - 1)
        elif unanswered > 0:
            note_unreported(beyond(self._reader.usage, self._possible()))
            note_unreported(self._possible(), unanswered - 1)

    def _possible(self) -> Usage:
        """Most tokens that one request may have used."""
        request, params = self._request, self._request.params
        prompt = estimated_tokens(request.prompt, self._tokenizer)
        if request.shape is not None:
            prompt += tokens_of(json.dumps(asdict(request.shape), default=dict), self._tokenizer)
        seen = sum(tokens_of(_text(sample), self._tokenizer) for sample in self._reader.samples.values())
        longest = 0 if isinstance(params.max_tokens, Unset) else params.max_tokens * params.samples
        return Usage(prompt, 0, max(longest, seen))


def _text(sample: PartialAnswer) -> str:
    """All that was received of a sample."""
    return " ".join([
        sample.text, sample.reasoning or "", sample.refusal, *(call.arguments for call in sample.calls.values())
    ])  # fmt: skip
