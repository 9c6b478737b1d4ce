"""Requests to OpenAI's text completions, for base models, and readers of the answers."""

from __future__ import annotations

from typing import Any

from sglang_lite.lang.backend.openai_chat import CHAT, ChatReader, parameters
from sglang_lite.lang.backend.remote_api import Api, PartialAnswer, Question
from sglang_lite.protocol import Delta, TokenLogprob
from sglang_lite.protocol.anything import Foreign, Json


def request(question: Question) -> dict[str, Json]:
    """Arguments of `completions.create` for a question. The API can't specify the form of an answer."""
    asked = {"model": question.target.model, **parameters(question)}
    if asked.pop("logprobs", False):
        asked["logprobs"] = asked.pop("top_logprobs", 0)
    return asked | {"prompt": question.prompt.text}


class CompletionsReader(ChatReader):
    """Reader of a completion, or of its chunks. Differs from ChatReader only in the field that contains a choice's
    text."""

    def piece(self, choice: Foreign, sample: PartialAnswer) -> Delta:
        return Delta(choice.text or "", logprobs=_logprobs(choice.logprobs), index=choice.index)


def _logprobs(said: Any) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of tokens. The API reports tokens only as text, so that the ids are -1."""
    if getattr(said, "tokens", None) is None:
        return ()
    tops = said.top_logprobs or [None] * len(said.tokens)
    return tuple(
        TokenLogprob(logprob, -1, token, tuple((each, -1, text) for text, each in (top or {}).items()))
        for token, logprob, top in zip(said.tokens, said.token_logprobs, tops)
    )


COMPLETIONS = Api(request, lambda client: client.completions.create, CHAT.streamed, CompletionsReader)
