"""Requests of OpenAI's text completions: converts their prompts and fields to requests of the
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_lite.constraints.schema import client_schema
from sglang_lite.protocol import ParameterError, Prompt, SamplingParams, Unset
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.fields import COMPLETIONS_NEUTRAL, COMPLETIONS_REFUSED, Fields
from sglang_lite.server.parameters import sampling
from sglang_lite.server.parameters.completion_fields import CompletionFields, StreamOptions
from sglang_lite.server.parameters.prompt_logprobs import RequestedLogprobs
from sglang_lite.server.parameters.truncation import truncated_ids
from sglang_lite.server.reader import RequestReader


class CompletionRequest(CompletionFields, kw_only=True):
    """Request for completions of one text or several."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    n_probs: int | None = None
    add_special_tokens: bool | None = None
    stream_options: StreamOptions | None = None
    json_schema: str | None = None
    program: dict[str, Any] | None = None

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives at each token, in OpenAI's field (`logprobs`) or llama.cpp's
        (`n_probs`); None for no log-probabilities. Raises ParameterError if both are given, or if
        the number is out of range.
        """
        if None not in (self.logprobs, self.n_probs):
            raise ParameterError("n_probs", "and logprobs are both given. Give one of them.")
        name = "logprobs" if self.n_probs is None else "n_probs"
        count: int | None = getattr(self, name)
        if count is not None and not 0 <= count <= 256:
            raise ParameterError(name, f"{count} is not between 0 and 256.")
        return count

    @property
    def draw_count(self) -> int:
        """Number of samples to draw. The answer has the `n` best of them. Raises ParameterError if
        `best_of` is invalid.
        """
        kept = self.n or 1
        if self.best_of is None or self.best_of == kept:
            return kept
        if not kept <= self.best_of <= 256:
            raise ParameterError("best_of", f"{self.best_of} is not between n ({kept}) and 256.")
        if self.stream:
            raise ParameterError(
                "best_of", "is known only when all samples have ended.", hint="Set stream: false."
            )
        return self.best_of


COMPLETIONS = Fields(CompletionRequest, COMPLETIONS_NEUTRAL, COMPLETIONS_REFUSED)
_MAX_TOKENS = 16  # OpenAI's default

# Values that gateways add to requests without these fields.
_ADDED = {"echo": False, "ignore_eos": False, "no_stop_trim": False, "skip_special_tokens": True}


def program_in_body(body: CompletionRequest) -> dict[str, Json]:
    """Returns the program in a request's body. Raises ParameterError for fields that can't be
    combined with a program.
    """
    assert body.program is not None
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if (
            name not in ("prompt", "model", "stream", "program")
            and value is not None
            and value is not _ADDED.get(name)
        ):
            raise ParameterError(
                name, "can't be combined with `program`.", hint="Set it in the program."
            )
    streams = body.program.get("stream") or body.program.get("open") or False
    if bool(body.stream) is not bool(streams):
        raise ParameterError(
            "stream", "differs from the value in the program.", hint="Set both, or neither."
        )
    return body.program


def build_engine_requests(reader: RequestReader, body: CompletionRequest) -> list[GenerateRequest]:
    prompts = list_completion_prompts(body.prompt)
    several = len(prompts) > 1
    if several and body.name is not None:
        raise ParameterError(
            "request_id" if body.rid is None else "rid",
            "names one request, but `prompt` has several. Send them one by one, or leave it out.",
        )
    requested = RequestedLogprobs.of_body(body, body.alternatives)
    params = sampling.read_sampling_params(
        body,
        max_tokens=_MAX_TOKENS,
        **requested.sampling_values(0 if requested.output is not None and body.echo else -1),
        return_prompt_token_ids=body.asks_for_ids,
    )
    if body.draw_count > params.samples:
        params = msgspec.structs.replace(params, n=body.draw_count, return_logprob=True)
    if body.suffix:
        params = _end_at_suffix(reader, body, params)
    schema = None if body.json_schema is None else client_schema(body.json_schema)
    constraint = body.constraint(json_schema=schema)
    return [
        GenerateRequest(
            _prepare_prompt(reader, body, prompt, params),
            params,
            constraint,
            stream=bool(body.stream),
            namespace=body.cache_salt or "",
            priority=body.priority or 0,
            rid=body.name,
            routed_dp_rank=body.replica,
        )
        for prompt in prompts
    ]


def _prepare_prompt(
    reader: RequestReader,
    body: CompletionRequest,
    prompt: str | Sequence[int],
    params: SamplingParams,
) -> str | Sequence[int] | Prompt:
    """Returns the prompt to submit. With a suffix, builds an infill prompt. Otherwise, encodes a
    text without its beginning-of-sequence token and truncates the prompt, if the request asks for
    these.
    """
    if body.suffix:
        if not isinstance(prompt, str):
            raise ParameterError("suffix", "needs a prompt of text, not of token ids.")
        return reader.infill_format.write_prompt(reader.tokenizer, prompt, body.suffix)
    if body.add_special_tokens is False and isinstance(prompt, str):
        prompt = reader.tokenizer.encode(prompt, first=False)
    room = params.max_tokens if isinstance(params.max_tokens, int) else 0
    cut = truncated_ids(reader, body, prompt, room)
    return reader.prepare_prompt(prompt if cut is None else cut)


def _end_at_suffix(
    reader: RequestReader, body: CompletionRequest, params: SamplingParams
) -> SamplingParams:
    """If the request has a suffix, adds the tokens that end a text before a suffix to the stops.
    Raises ParameterError if the suffix can't be combined with another field, or the model takes no
    suffixes.
    """
    for name in ("echo", "truncate_prompt_tokens", "heal"):
        if getattr(body, name):
            raise ParameterError(
                "suffix", f"can't be combined with {name}.", hint="Leave one of the two out."
            )
    stops = () if isinstance(params.stop_token_ids, Unset) else params.stop_token_ids
    ends = () if params.ignore_eos is True else reader.infill_format.ends
    return msgspec.structs.replace(params, stop_token_ids=(*stops, *ends))


def list_completion_prompts(
    given: str | Sequence[str | int | list[int]],
) -> Sequence[str | Sequence[int]]:
    """Returns the prompts of a request: one text, one list of token ids, or a list of texts or of
    id lists.
    """
    if isinstance(given, str):
        return [given]
    ids = [each for each in given if isinstance(each, int)]
    prompts = [each for each in given if not isinstance(each, int)]
    if not given:
        raise ParameterError("prompt", "is empty.", hint="Give a text, or a list of texts.")
    if ids and prompts:
        raise ParameterError("prompt", "mixes token ids and prompts. Give only one kind.")
    if len({type(each) for each in prompts}) > 1:
        raise ParameterError(
            "prompt", "mixes texts and lists of token ids.", hint="Send two requests."
        )
    return prompts or [ids]
