"""Log-probabilities of a prompt's tokens in answers, in vLLM's form (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sglang_lite.protocol import Generation, ParameterError, TokenLogprob
from sglang_lite.protocol.anything import Json
from sglang_lite.server.parameters.completion_fields import CompletionFields

_MAX_ALTERNATIVES = 256


@dataclass(frozen=True, slots=True)
class RequestedLogprobs:
    """Which log-probabilities a request asks for.

    Attributes:
        output: number of alternatives at each token of the answer; None for no log-probabilities.
        prompt: number of alternatives at each token of the prompt, or None.
    """

    output: int | None
    prompt: int | None

    @classmethod
    def of_body(cls, body: CompletionFields, output: int | None) -> RequestedLogprobs:
        """Reads a request's fields. Raises ParameterError if the log-probabilities of the prompt
        can't be reported.
        """
        prompt = body.prompt_logprobs
        if prompt is None:
            return cls(output, None)
        if not 0 <= prompt <= _MAX_ALTERNATIVES:
            raise ParameterError(
                "prompt_logprobs", f"{prompt} is not between 0 and {_MAX_ALTERNATIVES}."
            )
        if body.stream:
            raise ParameterError(
                "prompt_logprobs", "has no place in a stream.", hint="Set stream: false."
            )
        return cls(output, prompt)

    def sampling_values(self, start: int = -1) -> dict[str, Json]:
        """Returns, by name, the sampling parameters that make the engine compute these
        log-probabilities. `start` is the first token of the prompt that the answer's own
        log-probabilities include; -1 for none.
        """
        scored = self.output is not None or self.prompt is not None
        return {
            "return_logprob": scored,
            "top_logprobs_num": max(self.output or 0, self.prompt or 0),
            "return_text_in_logprobs": scored,
            "logprob_start_len": start if self.prompt is None else 0,
        }

    def limit_alternatives(self, entries: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Returns the answer's entries with only as many alternatives as the request asks for."""
        if (self.prompt or 0) <= (self.output or 0):
            return entries
        return [msgspec.structs.replace(each, top=each.top[: self.output or 0]) for each in entries]

    def encode_prompt(self, generation: Generation) -> dict[str, Json]:
        """Returns the field of an answer with the prompt's log-probabilities, if they were
        requested. The first token has none.
        """
        if self.prompt is None:
            return {}
        return {
            "prompt_logprobs": [
                None,
                *(_encode_entry(each, self.prompt) for each in generation.prompt_logprobs),
            ]
        }


def _encode_entry(entry: TokenLogprob, count: int) -> dict[str, Json]:
    """Returns the likeliest tokens at a position and the prompt's own token there, by id. The rank
    of a token that is not among the likeliest ones is null.
    """
    found: dict[str, Json] = {
        str(entry.token_id): {"logprob": entry.logprob, "rank": None, "decoded_token": entry.text}
    }
    for rank, (logprob, token_id, text) in enumerate(entry.top[: max(count, 1)], 1):
        if rank <= count or token_id == entry.token_id:
            found[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": text}
    return found
