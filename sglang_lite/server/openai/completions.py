"""Route of OpenAI's text completions, with the additional fields of SGLang and vLLM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import (
    Delta,
    Generation,
    Prompt,
    TokenLogprob,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import merge_streams, wait_for_first_event
from sglang_lite.server.conversation.sample_reader import own_fields, reported_logprobs
from sglang_lite.server.endpoint import (
    HttpRequest,
    Route,
    drop_ignored_priorities,
    json_response,
    read_body,
)
from sglang_lite.server.http.sse import DONE, EventStream, encode_event
from sglang_lite.server.openai.completions_request import (
    COMPLETIONS,
    CompletionRequest,
    build_engine_requests,
    list_completion_prompts,
    program_in_body,
)
from sglang_lite.server.parameters.completion_fields import StreamOptions, check_stream_options
from sglang_lite.server.parameters.prompt_logprobs import RequestedLogprobs
from sglang_lite.server.parameters.running_usage import RunningUsage, count_prompt_tokens
from sglang_lite.server.programs import program
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service


async def complete(service: Service, call: HttpRequest) -> Response:
    """Generates completions of a request's prompts."""
    given = await read_body(service, call, _read_completion_request)
    if isinstance(given, program.ParsedProgram):
        return await program.execute_parsed_program(service, call, given)
    body, texts, requests, prompt_tokens = given
    service.find_requested_adapter(body.model)  # rejects an unknown model
    requests = [
        service.select_requested_adapter(body.answering_model, request) for request in requests
    ]
    check_stream_options(body.stream, body.stream_options, call.unused)
    requests = drop_ignored_priorities(service, call, requests)
    head = {
        "id": f"cmpl-{random_id()}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.resolve_answering_model(body.answering_model),
    }
    parsed = _ParsedCompletions(body, head, requests, texts, prompt_tokens)
    engine = service.async_engine
    if body.stream:
        events = await wait_for_first_event(
            merge_streams([engine.generate(request) for request in requests])
        )
        return EventStream(events, partial(_stream_completion_chunks, service, parsed), "openai")
    found: dict[int, list[Generation]] = {index: [] for index in range(len(requests))}
    async with contextlib.aclosing(
        merge_streams([engine.generate(request) for request in requests])
    ) as events:
        async for index, batch in events:
            found[index] += (each for each in batch if isinstance(each, Generation))
    choices = []
    for index, generations in found.items():
        for generation in _keep_best(generations, body.n or 1):
            sample = parsed.new_sample(service, index, generation.index)
            choice = sample.next_choice(generation.text, reported_logprobs(generation), generation)
            choices.append(
                {
                    **choice,
                    **parsed.scores.encode_prompt(generation),
                    **body.requested_id_fields(service, requests[index], generation),
                }
            )
    usages = [[generation.usage for generation in generations] for generations in found.values()]
    return json_response(
        {**parsed.head, "choices": choices, "usage": completions_token_counts(usages)}
    )


def _keep_best(generations: Sequence[Generation], count: int) -> list[Generation]:
    """If there are more than `count` samples, returns the `count` samples with the highest
    log-probability per token, best first. Otherwise returns all samples in the order in which they
    were drawn.
    """
    if len(generations) <= count:
        return sorted(generations, key=lambda each: each.index)
    ranked = sorted(generations, key=lambda each: (-_mean_logprob(each), each.index))
    return [msgspec.structs.replace(each, index=index) for index, each in enumerate(ranked[:count])]


def _mean_logprob(generation: Generation) -> float:
    entries = reported_logprobs(generation)
    return sum(each.logprob or 0.0 for each in entries) / max(len(entries), 1)


def _read_completion_request(
    reader: RequestReader, call: HttpRequest
) -> (
    tuple[CompletionRequest, Sequence[str | None], list[GenerateRequest], int | None]
    | program.ParsedProgram
):
    """Returns the request without its prompts, the texts to echo, the requests for the engine, and
    the number of the prompts' tokens if each chunk of the answer has it. A text is None if its
    prompt is not echoed or has token ids. If the body has a program, returns only the program.
    """
    body = call.read_fields(COMPLETIONS)
    if body.program is not None:
        parsed = program.parse_program_request(reader, call, program_in_body(body), "/program")
        return replace(parsed, models=(body.model, *parsed.models))
    requests = build_engine_requests(reader, body)
    truncated = body.truncate_prompt_tokens is not None
    texts = [
        each if isinstance(each, str) and body.echo and not truncated else None
        for each in list_completion_prompts(body.prompt)
    ]
    body.prompt = ""
    prompt_tokens = None
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        prompt_tokens = sum(count_prompt_tokens(reader, request.prompt) for request in requests)
    return body, texts, requests, prompt_tokens


@dataclass(frozen=True, slots=True)
class _ParsedCompletions:
    """Checked and converted request, and the fields that all parts of its answer share. `texts` has
    the text to echo for each prompt, or None. `prompt_tokens` is given if each chunk has it.
    """

    body: CompletionRequest
    head: dict[str, Any]
    requests: Sequence[GenerateRequest]
    texts: Sequence[str | None]
    prompt_tokens: int | None

    @property
    def scores(self) -> RequestedLogprobs:
        """The log-probabilities that the request asks for."""
        return RequestedLogprobs.of_body(self.body, self.body.alternatives)

    def new_sample(self, service: Service, prompt: int, index: int) -> _Sample:
        number = prompt * (self.body.n or 1) + index
        return _Sample(
            service, self.body, self.requests[prompt], self.texts[prompt], number, self.scores
        )


@dataclass(slots=True)
class _Sample:
    """Completion of one sample as received so far.

    Attributes:
        prompt_text: text of its prompt, if it was given as text and is echoed.
        index: index of its choice.
        scores: log-probabilities that the request asks for.
        sent: True if the echoed prompt was sent.
        length: number of characters sent, echoed prompt included.
        told: number of generated characters sent.
        entries: number of log-probabilities of generated tokens sent.
    """

    service: Service
    body: CompletionRequest
    request: GenerateRequest
    prompt_text: str | None
    index: int
    scores: RequestedLogprobs
    sent: bool = False
    length: int = 0
    told: int = 0
    entries: int = 0

    def next_choice(
        self, text: str, entries: Sequence[TokenLogprob], generation: Generation | None
    ) -> dict[str, Any]:
        """Returns the choice object with the text that has arrived since the previous one.

        Args:
            text: new text.
            entries: log-probabilities of the new tokens.
            generation: result of the sample if the choice is the last one, or None.
        """
        begun = 0
        if self.request.params.heal is True and not self.entries:
            # the prompt's last token may have begun the text, for which there is no entry
            begun = max(len(text) - sum(len(each.text or "") for each in entries), 0)
        self.told += len(text)
        self.entries += len(entries)
        if self.body.echo and not self.sent:
            self.sent = True
            text = self._prompt_as_text + text
            if generation is not None:
                entries = (*self._prompt_logprobs(generation.prompt_logprobs), *entries)
        logprobs = (
            None if self.scores.output is None else self._logprobs(entries, self.length + begun)
        )
        self.length += len(text)
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if generation is None else generation.finish_reason,
            "matched_stop": None if generation is None else generation.matched,
            **({} if generation is None else own_fields(generation)),
        }

    @property
    def _prompt_as_text(self) -> str:
        prompt = self.request.prompt
        if self.prompt_text is not None:
            return self.prompt_text
        assert not isinstance(prompt, Prompt | str)
        return self.service.engine.tokenizer.decode(prompt)

    def _prompt_logprobs(self, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Returns the log-probabilities of all tokens of the prompt; the first token has none."""
        tokenizer = self.service.engine.tokenizer
        prompt = self.request.prompt
        assert not isinstance(prompt, Prompt)
        first = (tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)[0]
        return [TokenLogprob(None, first, tokenizer.decode((first,), skip_special=False)), *entries]

    def _logprobs(self, entries: Sequence[TokenLogprob], at: int) -> dict[str, Any]:
        offsets = []
        entries = self.scores.limit_alternatives(entries)
        for each in entries:
            offsets.append(at)
            at += len(each.text or "")
        as_ids = self.body.return_tokens_as_token_ids
        return {
            "tokens": [
                f"token_id:{each.token_id}" if as_ids else each.text or "" for each in entries
            ],
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": [
                None
                if each.logprob is None
                else {
                    f"token_id:{token}" if as_ids else text or "": value
                    for value, token, text in each.top
                }
                for each in entries
            ],
            "text_offset": offsets,
        }


async def _stream_completion_chunks(
    service: Service,
    parsed: _ParsedCompletions,
    events: AsyncGenerator[tuple[int, list[Delta | Generation]], None],
) -> AsyncGenerator[bytes, None]:
    head = parsed.head
    options = parsed.body.stream_options or StreamOptions()
    if options.include_usage:
        head = {**head, "usage": None}
    samples: dict[tuple[int, int], _Sample] = {}
    usages: dict[int, list[Usage]] = {}
    running = RunningUsage(parsed.prompt_tokens)
    async for prompt, batch in events:
        parts = []
        for each in batch:
            at = (prompt, each.index)
            sample = samples.setdefault(at, parsed.new_sample(service, *at))
            if isinstance(each, Delta):
                parts.append(sample.next_choice(each.text, each.logprobs, None))
            else:
                rest = reported_logprobs(each)[sample.entries :]
                parts.append(sample.next_choice(each.text[sample.told :], rest, each))
                usages.setdefault(prompt, []).append(each.usage)
            running.add_event((prompt, each.index), each)
        yield b"".join(
            encode_event({**head, "choices": [choice], **running.fields}) for choice in parts
        )
    if options.include_usage:
        yield encode_event(
            {**head, "choices": [], "usage": completions_token_counts(list(usages.values()))}
        )
    yield DONE


def completions_token_counts(usages: Sequence[Sequence[Usage]]) -> dict[str, Json]:
    """Returns the total token counts of an answer. `usages` has the usages of the samples of each
    prompt.
    """
    prompt = sum(samples[0].prompt_tokens for samples in usages)
    completion = sum(usage.completion_tokens for samples in usages for usage in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(samples[0].cached_tokens for samples in usages)
        },
    }


ROUTES = (
    Route(
        "/v1/completions",
        complete,
        "Continue text",
        protocol="openai",
        fields=COMPLETIONS,
        streams=True,
        counts_as_open=True,
    ),
)
