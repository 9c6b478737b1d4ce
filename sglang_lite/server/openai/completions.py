"""Route of OpenAI's text completions, with the additional fields of SGLang and vLLM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.responses import Response

from sglang_lite.constraints.schema import client_schema
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import (
    Delta,
    Generation,
    ParameterError,
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
from sglang_lite.server.fields import COMPLETIONS_NEUTRAL, COMPLETIONS_REFUSED, Fields
from sglang_lite.server.http.sse import DONE, EventStream, encode_event
from sglang_lite.server.parameters import sampling
from sglang_lite.server.parameters.completion_fields import (
    CompletionFields,
    StreamOptions,
    check_stream_options,
)
from sglang_lite.server.programs import program
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service


class CompletionRequest(CompletionFields, kw_only=True):
    """Request for completions of one text or several."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    stream_options: StreamOptions | None = None
    json_schema: str | None = None
    program: dict[str, Any] | None = None


COMPLETIONS = Fields(CompletionRequest, COMPLETIONS_NEUTRAL, COMPLETIONS_REFUSED)
_MAX_TOKENS = 16  # OpenAI's default


async def complete(service: Service, call: HttpRequest) -> Response:
    """Generates completions of a request's prompts."""
    given = await read_body(service, call, _read_completion_request)
    if isinstance(given, program.ParsedProgram):
        return await program.execute_parsed_program(service, call, given)
    body, texts, requests = given
    requests = [service.select_requested_adapter(body.model, request) for request in requests]
    check_stream_options(body.stream, body.stream_options, call.unused)
    requests = drop_ignored_priorities(service, call, requests)
    head = {
        "id": f"cmpl-{random_id()}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.resolve_answering_model(body.model),
    }
    parsed = _ParsedCompletions(body, head, requests, texts)
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
        for generation in sorted(generations, key=lambda each: each.index):
            sample = parsed.new_sample(service, index, generation.index)
            choice = sample.next_choice(generation.text, reported_logprobs(generation), generation)
            choices.append(
                {**choice, **body.requested_id_fields(service, requests[index], generation)}
            )
    usages = [[generation.usage for generation in generations] for generations in found.values()]
    return json_response(
        {**parsed.head, "choices": choices, "usage": completions_token_counts(usages)}
    )


# Values that gateways add to requests without these fields.
_ADDED = {"echo": False, "ignore_eos": False, "no_stop_trim": False, "skip_special_tokens": True}


def _program(body: CompletionRequest) -> dict[str, Any]:
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


def _read_completion_request(
    reader: RequestReader, call: HttpRequest
) -> tuple[CompletionRequest, Sequence[str | None], list[GenerateRequest]] | program.ParsedProgram:
    """Returns the request without its prompts, the texts to echo, and the requests for the engine.
    A text is None if its prompt is not echoed or has token ids. If the body has a program, returns
    only the program.
    """
    body = call.read_fields(COMPLETIONS)
    if body.program is not None:
        parsed = program.parse_program_request(reader, call, _program(body), "/program")
        return replace(parsed, models=(body.model, *parsed.models))
    requests = _build_engine_requests(reader, body)
    texts = [
        each if isinstance(each, str) and body.echo else None
        for each in _list_completion_prompts(body.prompt)
    ]
    body.prompt = ""
    return body, texts, requests


def _build_engine_requests(reader: RequestReader, body: CompletionRequest) -> list[GenerateRequest]:
    prompts = _list_completion_prompts(body.prompt)
    if body.logprobs is not None and not 0 <= body.logprobs <= 256:
        raise ParameterError("logprobs", f"{body.logprobs} is not between 0 and 256.")
    several = len(prompts) > 1
    if several and body.rid is not None:
        raise ParameterError(
            "rid",
            "names one request, but `prompt` has several. Send them one by one, or leave rid out.",
        )
    scored = body.logprobs is not None
    params = sampling.read_sampling_params(
        body,
        max_tokens=_MAX_TOKENS,
        return_logprob=scored,
        top_logprobs_num=body.logprobs or 0,
        return_text_in_logprobs=scored,
        logprob_start_len=0 if scored and body.echo else -1,
        return_prompt_token_ids=body.asks_for_ids,
    )
    schema = None if body.json_schema is None else client_schema(body.json_schema)
    constraint = body.constraint(json_schema=schema)
    return [
        GenerateRequest(
            reader.prepare_prompt(prompt),
            params,
            constraint,
            stream=bool(body.stream),
            namespace=body.cache_salt or "",
            priority=body.priority or 0,
            rid=body.rid,
            routed_dp_rank=body.replica,
        )
        for prompt in prompts
    ]


def _list_completion_prompts(
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


@dataclass(frozen=True, slots=True)
class _ParsedCompletions:
    """Checked and converted request, and the fields that all parts of its answer share. `texts` has
    the text to echo for each prompt, or None.
    """

    body: CompletionRequest
    head: dict[str, Any]
    requests: Sequence[GenerateRequest]
    texts: Sequence[str | None]

    def new_sample(self, service: Service, prompt: int, index: int) -> _Sample:
        request = self.requests[prompt]
        return _Sample(
            service, self.body, request, self.texts[prompt], prompt * request.samples + index
        )


@dataclass(slots=True)
class _Sample:
    """Completion of one sample as received so far.

    Attributes:
        prompt_text: text of its prompt, if it was given as text and is echoed.
        index: index of its choice.
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
            None if self.body.logprobs is None else self._logprobs(entries, self.length + begun)
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
        for each in entries:
            offsets.append(at)
            at += len(each.text or "")
        return {
            "tokens": [each.text or "" for each in entries],
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": [
                None if each.logprob is None else {text or "": value for value, _, text in each.top}
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
        yield b"".join(encode_event({**head, "choices": [choice]}) for choice in parts)
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
