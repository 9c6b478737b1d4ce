"""Answers of SGLang's native protocol: a sample's events as its dictionaries."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_lite.protocol import (
    ConstraintError,
    Delta,
    Generation,
    OverloadedError,
    ParameterError,
    Prompt,
    RequestAbortedError,
    SglError,
    TokenLogprob,
    Unset,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest


class SampleAnswer:
    """Answer of one sample, as a dictionary of the protocol. `add_event` returns the whole answer
    so far.

    Args:
        call: request of the sample.
        prompt_ids: token ids of the prompt.
        index: index of the sample in a streamed batch; None if the answer isn't a list or isn't
            streamed.
        decode: function that decodes token ids to text.
        rid: name of the sample; None for the name of the request.
        weight_version: version name of the model's weights.

    Attributes:
        outcome: final dictionary, or the error that ended the sample; None while the sample is
            running.
    """

    def __init__(
        self,
        call: GenerateRequest,
        prompt_ids: Sequence[int],
        index: int | None,
        decode: Callable[[Sequence[int]], str],
        *,
        rid: str | None = None,
        weight_version: str = "default",
    ) -> None:
        self._call = call
        self._prompt_ids = prompt_ids
        self._index = index
        self._decode = decode
        self._named = {"id": call.rid if rid is None else rid, "weight_version": weight_version}
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.outcome: dict[str, Any] | SglError | None = None

    def add_event(
        self, event: Delta | Generation | SglError, cached_tokens: int = 0
    ) -> dict[str, Json]:
        """Adds an event, and returns the answer's dictionary after it.

        Args:
            cached_tokens: number of tokens of the prompt that were found in the cache, for an
                incomplete answer.
        """
        if isinstance(event, Delta):
            self._texts.append(event.text)
            self._ids += event.token_ids
            self._logprobs += event.logprobs
            return self._encode_partial_answer(None, cached_tokens)
        if isinstance(event, Generation):
            self.outcome = answer = self._encode_complete_answer(
                event, _encode_finish_reason(event)
            )
        elif isinstance(event, RequestAbortedError) and event.partial is not None:
            self.outcome = answer = self._encode_complete_answer(event.partial, _failure(event))
        else:
            answer = self._encode_partial_answer(_failure(event), cached_tokens)
            self.outcome = answer if isinstance(event, RequestAbortedError) else event
        return answer

    def _encode_partial_answer(
        self, finish: dict[str, Any] | None, cached_tokens: int
    ) -> dict[str, Any]:
        return self._build_answer_fields(
            "".join(self._texts), self._ids, finish, cached_tokens, {}, (), self._logprobs
        )

    def _encode_complete_answer(
        self, generation: Generation, finish: dict[str, Any]
    ) -> dict[str, Any]:
        usage = generation.usage
        scores = {} if generation.scores is None else generation.scores.as_meta()
        told = {
            "e2e_latency": usage.total_s,
            "queue_time": usage.queue_s,
            "cached_tokens_details": _cached_tokens_by_tier(usage),
        }
        meta = {
            **told,
            **usage.image_counts,
            **generation.meta,
            **scores,
            **self._encode_experts_and_states(generation),
        }
        return self._build_answer_fields(
            generation.text,
            generation.token_ids,
            finish,
            usage.cached_tokens,
            meta,
            generation.prompt_logprobs,
            generation.output_logprobs,
            generation,
        )

    def _build_answer_fields(
        self,
        text: str,
        ids: Sequence[int],
        finish: dict[str, Any] | None,
        cached_tokens: int,
        meta: Mapping[str, Any],
        prompt_logprobs: Sequence[TokenLogprob],
        output_logprobs: Sequence[TokenLogprob],
        record: Generation | None = None,
    ) -> dict[str, Any]:
        info = {
            **self._named,
            "finish_reason": finish,
            "prompt_tokens": len(self._prompt_ids),
            "completion_tokens": len(ids),
            "cached_tokens": cached_tokens,
            "reasoning_tokens": 0,
            **meta,
        }
        if self._call.params.return_logprob is True:
            info |= self._logprob_fields(prompt_logprobs, output_logprobs)
        answer: dict[str, Any] = {"text": text, "output_ids": list(ids), "meta_info": info}
        if record is not None and record.prompt_ids:
            answer["prompt_token_ids"] = list(record.prompt_ids)
        if record is not None and isinstance(self._call.prompt, Prompt):
            answer["generation"] = record
        return answer if self._index is None else {**answer, "index": self._index}

    def _encode_experts_and_states(self, generation: Generation) -> dict[str, Json]:
        """Returns the recorded experts as their array in base64, and the hidden states as lists in
        SGLang's layout: one entry for the whole prompt, then one for each generated token.
        """
        found: dict[str, Json] = {}
        if generation.routed_experts is not None:
            found["routed_experts"] = base64.b64encode(generation.routed_experts.data).decode()
        if generation.hidden_states is not None:
            states = generation.hidden_states
            rows = memoryview(states.data).cast("f", states.shape).tolist()
            count = len(self._prompt_ids)
            found["hidden_states"] = [rows[:count], *rows[count:]]
        return found

    def _logprob_fields(
        self, prompt: Sequence[TokenLogprob], output: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        params = self._call.params
        entries = self._prompt_logprobs(prompt)
        fields: dict[str, Any] = {
            "input_token_logprobs": [(e.logprob, e.token_id, e.text) for e in entries],
            "output_token_logprobs": [(e.logprob, e.token_id, e.text) for e in output],
            "output_token_logprobs_length": len(output),
        }
        for name, attribute, wanted in (
            ("top_logprobs", "top", params.top_logprobs_num),
            ("token_ids_logprobs", "ids", params.token_ids_logprob),
        ):
            if wanted and not isinstance(wanted, Unset):
                fields[f"input_{name}"] = [list(getattr(e, attribute)) or None for e in entries]
                fields[f"output_{name}"] = [list(getattr(e, attribute)) for e in output]
        return fields

    def _prompt_logprobs(self, prompt: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Returns the log-probabilities of the prompt, one entry for each position from
        `logprob_start_len` on. The first token of a prompt has no log-probability, so its entry has
        only id and text.
        """
        params = self._call.params
        start = params.logprob_start_len
        if isinstance(start, Unset) or not 0 <= start < len(self._prompt_ids):
            return []
        if start:
            return list(prompt)
        first = self._prompt_ids[0]
        text = self._decode((first,)) if params.return_text_in_logprobs is True else None
        return [TokenLogprob(None, first, text), *prompt]


def _cached_tokens_by_tier(usage: Usage) -> dict[str, int]:
    """Returns the numbers of cached prompt tokens that were on the device, on the host and in
    storage.
    """
    on_device = usage.cached_tokens - usage.host_tokens - usage.disk_tokens
    return {"device": on_device, "host": usage.host_tokens, "storage": usage.disk_tokens}


def _encode_finish_reason(generation: Generation) -> dict[str, Any]:
    if generation.finish_reason == "length":
        return {"type": "length", "length": generation.usage.completion_tokens}
    return {"type": "stop", "matched": generation.matched}


def _failure(error: SglError) -> dict[str, Any]:
    status = 500
    if isinstance(error, ParameterError | ConstraintError):
        status = 400
    elif isinstance(error, OverloadedError):
        status = 503
    elif isinstance(error, RequestAbortedError):
        status = 499  # nginx's status for a client that has disconnected
    return {
        "type": "abort",
        "message": str(error),
        "status_code": status,
        "err_type": type(error).__name__,
    }
