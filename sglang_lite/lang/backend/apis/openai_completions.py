"""Requests to OpenAI's text completions, for base models, and readers of the answers."""

from __future__ import annotations

from typing import Any

from sglang_lite.lang.backend.apis.api import Api, ApiRequest, PartialAnswer
from sglang_lite.lang.backend.apis.openai_chat import CHAT, ChatReader, parameters
from sglang_lite.protocol import Delta, TokenLogprob
from sglang_lite.protocol.anything import Foreign, Json


def request_arguments(request: ApiRequest) -> dict[str, Json]:
    """Arguments of `completions.create` for a request. The API can't specify the form of an answer."""
    arguments = {"model": request.target.model, **parameters(request)}
    if arguments.pop("logprobs", False):
        arguments["logprobs"] = arguments.pop("top_logprobs", 0)
    return arguments | {"prompt": request.prompt.text}


class CompletionsReader(ChatReader):
    """Reader of a completion, or of its chunks. Differs from ChatReader only in the field that contains a choice's
    text."""

    def piece(self, choice: Foreign, sample: PartialAnswer) -> Delta:
        return Delta(choice.text or "", logprobs=_logprobs(choice.logprobs), index=choice.index)


def _logprobs(logprobs: Any) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of tokens. The API reports tokens only as text, so that the ids are -1."""
    if getattr(logprobs, "tokens", None) is None:
        return ()
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return tuple(
        TokenLogprob(logprob, -1, token, tuple((each, -1, text) for text, each in (top or {}).items()))
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, tops)
    )


COMPLETIONS = Api(request_arguments, lambda client: client.completions.create, CHAT.streamed, CompletionsReader)
