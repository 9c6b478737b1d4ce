"""Route of OpenAI's chat completions, with the additional fields of SGLang and vLLM."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import Delta, Generation, TokenLogprob, Usage
from sglang_lite.server.async_engine import wait_for_first_event
from sglang_lite.server.conversation.sample_reader import (
    SampleReader,
    encode_openai_logprobs,
    reported_logprobs,
)
from sglang_lite.server.endpoint import (
    HttpRequest,
    Route,
    drop_ignored_priorities,
    json_response,
    read_body,
)
from sglang_lite.server.http.sse import DONE, EventStream, encode_event
from sglang_lite.server.openai.chat_answer import (
    build_assistant_reply,
    chat_token_counts,
    encode_chat_delta,
)
from sglang_lite.server.openai.chat_request import (
    CHAT,
    ChatRequest,
    RenderedChat,
    render_chat,
)
from sglang_lite.server.parameters.completion_fields import StreamOptions, check_stream_options
from sglang_lite.server.parameters.running_usage import RunningUsage
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service


async def complete(service: Service, call: HttpRequest) -> Response:
    """Answers a request for a chat completion."""
    chat = await read_body(service, call, _read_chat_request)
    body = chat.body
    service.find_requested_adapter(body.model)  # rejects an unknown model
    check_stream_options(body.stream, body.stream_options, call.unused)
    [request] = await service.images.fetch_requests(
        [chat.engine_request(service.engine.context_length)]
    )
    [request] = drop_ignored_priorities(
        service, call, [service.select_requested_adapter(body.answering_model, request)]
    )
    head = {
        "id": f"chatcmpl-{random_id()}",
        "object": f"chat.completion{'.chunk' if body.stream else ''}",
        "created": int(time.time()),
        "model": service.resolve_answering_model(body.answering_model),
    }
    if body.stream:
        events = await wait_for_first_event(service.async_engine.generate(request))
        return EventStream(events, partial(_stream_chat_chunks, service, chat, head), "openai")
    found = await service.async_engine.results(request)
    choices = [
        {
            **_encode_chat_choice(service, chat, each),
            **body.requested_id_fields(service, request, each),
        }
        for each in found
    ]
    reasoning = sum(
        [
            await service.count_text_tokens(choice["message"].get("reasoning_content", ""))
            for choice in choices
        ]
    )
    if body.include_reasoning is False:
        for choice in choices:
            choice["message"].pop("reasoning_content", None)
    usage = chat_token_counts([generation.usage for generation in found], reasoning)
    # like vLLM
    prompt = {"prompt_token_ids": choices[0]["prompt_token_ids"]} if body.return_token_ids else {}
    prompt |= body.scores.encode_prompt(found[0])
    return json_response({**head, **prompt, "choices": choices, "usage": usage})


def _read_chat_request(reader: RequestReader, call: HttpRequest) -> RenderedChat:
    return render_chat(reader, call.read_fields(CHAT), call.unused)


def _encode_chat_choice(
    service: Service, chat: RenderedChat, generation: Generation
) -> dict[str, Any]:
    sample = chat.new_sample_reader()
    new = sample.read_event(generation)
    message = build_assistant_reply(chat.echoed + new.content, new.reasoning, sample.calls)
    return {
        "index": generation.index,
        "message": {**message, "refusal": None},
        "logprobs": _logprobs(service, chat.body, reported_logprobs(generation))
        if chat.body.logprobs
        else None,
        "finish_reason": sample.openai_finish_reason(generation),
        "matched_stop": generation.matched,
        **sample.own_fields(generation),
    }


async def _stream_chat_chunks(
    service: Service,
    chat: RenderedChat,
    head: dict[str, Any],
    events: AsyncGenerator[list[Delta | Generation], None],
) -> AsyncGenerator[bytes, None]:
    """Yields the chunks of a stream, which all have the fields of `head`."""
    body = chat.body
    options = body.stream_options or StreamOptions()
    running = RunningUsage(chat.prompt_tokens)
    if options.include_usage:
        head = {**head, "usage": None}
    samples: dict[int, SampleReader] = {}
    usages: dict[int, Usage] = {}

    def chunk(
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: Any = None,
        **more: Any,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
            **more,
        }
        return encode_event({**head, "choices": [choice], **running.fields})

    async for batch in events:
        parts: list[bytes] = []
        for each in batch:
            if each.index not in samples:
                samples[each.index] = chat.new_sample_reader()
                parts.append(chunk(each.index, {"role": "assistant", "content": chat.echoed}))
            running.add_event(each.index, each)
            sample = samples[each.index]
            new = encode_chat_delta(sample.read_event(each))
            if body.include_reasoning is False:
                new.pop("reasoning_content", None)
            if isinstance(each, Delta):
                logprobs = _logprobs(service, body, each.logprobs) if body.logprobs else None
                if new or (logprobs and logprobs["content"]):
                    parts.append(chunk(each.index, new, logprobs=logprobs))
            else:
                rest = reported_logprobs(each)[sample.logprobs :]
                logprobs = _logprobs(service, body, rest) if body.logprobs and rest else None
                if new or logprobs:
                    parts.append(chunk(each.index, new, logprobs=logprobs))
                parts.append(
                    chunk(
                        each.index,
                        {},
                        sample.openai_finish_reason(each),
                        **sample.own_fields(each),
                    )
                )
                usages[each.index] = each.usage
        yield b"".join(parts)
    end = b""
    if options.include_usage:
        reasoning = sum(
            [await service.count_text_tokens(sample.reasoning) for sample in samples.values()]
        )
        end = encode_event(
            {**head, "choices": [], "usage": chat_token_counts(list(usages.values()), reasoning)}
        )
    yield end + DONE


def _logprobs(
    service: Service, body: ChatRequest, entries: Sequence[TokenLogprob]
) -> dict[str, Any]:
    """Converts log-probabilities of generated tokens to the protocol's form."""
    content = encode_openai_logprobs(
        service.engine.tokenizer.token_bytes,
        body.scores.limit_alternatives(entries),
        as_ids=bool(body.return_tokens_as_token_ids),
    )
    return {"content": content, "refusal": None}


ROUTES = (
    Route(
        "/v1/chat/completions",
        complete,
        "Answer a conversation",
        protocol="openai",
        fields=CHAT,
        streams=True,
        counts_as_open=True,
    ),
)
