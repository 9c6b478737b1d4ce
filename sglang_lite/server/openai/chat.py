"""Route of OpenAI's chat completions, with the additional fields of SGLang and vLLM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response

from sglang_lite.protocol import Delta, Generation, ParameterError, SglError, TokenLogprob, Usage
from sglang_lite.protocol.anything import Json
from sglang_lite.random_ids import random_id
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import with_first_event
from sglang_lite.server.conversation.images import RequestImages
from sglang_lite.server.conversation.sample_reader import (
    CallDelta,
    PartialToolCall,
    SampleDelta,
    SampleReader,
    entries_of,
    logprobs_of,
)
from sglang_lite.server.endpoint import HttpRequest, Route, answer, read, with_priorities
from sglang_lite.server.errors import content_of
from sglang_lite.server.http.sse import DONE, EventStream, event
from sglang_lite.server.openai.chat_request import CHAT, ChatRequest, ChatStreamOptions, CustomTool, conversation_of
from sglang_lite.server.parameters import sampling, streams
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service
from sglang_lite.text.chat_format import RenderedConversation

_NAMES = {"max_completion_tokens": "max_tokens"}


@dataclass(frozen=True, slots=True)
class _ParsedChat:
    """Request, parsed and rendered.

    Attributes:
        rendered: rendered conversation of the request.
        forced_custom_tool: name of the custom tool whose input is the whole text, or None.
        custom_tools: names of all custom tools.
    """

    body: ChatRequest
    rendered: RenderedConversation
    id: str
    created: int
    model: str
    forced_custom_tool: str | None
    custom_tools: frozenset[str]

    def sample(self) -> SampleReader:
        """New reader for a sample."""
        separate, stream_reasoning = self.body.separate_reasoning is not False, self.body.stream_reasoning is not False
        return SampleReader(self.rendered, self.custom_tools, self.forced_custom_tool, separate, stream_reasoning)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


async def complete(service: Service, call: HttpRequest) -> Response:
    """Handler of POST /v1/chat/completions."""
    body, rendered, custom, custom_tools = await read(service, call, _read)
    service.adapter_of(body.model)  # refused here
    streams.check_options(body)
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise ParameterError("stream_options.continuous_usage_stats", "is not supported.", hint="Use include_usage.")
    if not body.logprobs and body.top_logprobs:
        raise ParameterError("top_logprobs", "needs logprobs: true.")
    params = sampling.read(
        body, _NAMES, max_tokens=service.engine.context_length, return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0, return_text_in_logprobs=bool(body.logprobs),
        return_prompt_token_ids=body.asks_for_ids,
    )  # fmt: skip
    request = GenerateRequest(
        rendered.prompt, params, rendered.constraint, stream=bool(body.stream), namespace=body.cache_salt or "",
        priority=body.priority or 0, rid=body.rid,
        routed_dp_rank=body.replica,
    )  # fmt: skip
    [request] = with_priorities(service, call, [service.adapted(body.model, request)])
    parsed = _ParsedChat(
        body, rendered, f"chatcmpl-{random_id()}", int(time.time()), service.name_of(body.model), custom, custom_tools
    )
    if body.stream:
        events = await with_first_event(service.async_engine.generate(request))
        return EventStream(_stream(service, parsed, events), events)
    found = await service.async_engine.results(request)
    choices = [
        {**_choice_of(service, parsed, generation), **body.ids_of(service, request, generation)} for generation in found
    ]
    reasoning = sum([await service.tokens(choice["message"].get("reasoning_content", "")) for choice in choices])
    usage = usage_of([generation.usage for generation in found], reasoning)
    prompt = {"prompt_token_ids": choices[0]["prompt_token_ids"]} if body.return_token_ids else {}  # as vLLM
    return answer({**parsed.head("chat.completion"), **prompt, "choices": choices, "usage": usage})


def _read(
    reader: RequestReader, call: HttpRequest
) -> tuple[ChatRequest, RenderedConversation, str | None, frozenset[str]]:
    """Request without messages and tools, rendered conversation, the custom tool that is forced (or None), and the
    names of all custom tools."""
    body = call.read(CHAT)
    images = RequestImages(accepted=reader.images is not None)
    conversation, custom = conversation_of(body, call.unused, images)
    custom_tools = frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool))
    body.messages, body.tools = [], None
    return body, reader.render(conversation, call.unused), custom, custom_tools


def _choice_of(service: Service, parsed: _ParsedChat, generation: Generation) -> dict[str, Any]:
    sample = parsed.sample()
    new = sample.read(generation)
    message: dict[str, Any] = {"role": "assistant", "content": new.content}
    if new.reasoning:
        message["reasoning_content"] = new.reasoning
    if sample.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [_as_call(call) for call in sample.calls]
    return {
        "index": generation.index,
        "message": {**message, "refusal": None},
        "logprobs": _logprobs(service, logprobs_of(generation)) if parsed.body.logprobs else None,
        "finish_reason": sample.finish(generation),
        "matched_stop": generation.matched,
    }


def _as_call(call: PartialToolCall) -> dict[str, Any]:
    """Call in the form of the protocol, as far as it has arrived."""
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(new: SampleDelta) -> dict[str, Any]:
    """Delta with new new of a sample."""
    delta: dict[str, Any] = {}
    if new.reasoning:
        delta["reasoning_content"] = new.reasoning
    if new.content:
        delta["content"] = new.content
    if new.calls:
        delta["tool_calls"] = [_call_delta(part) for part in new.calls]
    return delta


def _call_delta(part: CallDelta) -> dict[str, Any]:
    call, new = part.call, part.arguments
    if part.begins:
        return {"index": call.index, **_as_call(replace(call, arguments=new))}
    return {"index": call.index, **({"custom": {"input": new}} if call.custom else {"function": {"arguments": new}})}


async def _stream(
    service: Service, parsed: _ParsedChat, events: AsyncGenerator[list[Delta | Generation], None]
) -> AsyncGenerator[bytes, None]:
    """Yields the chunks of a stream."""
    body, head = parsed.body, parsed.head("chat.completion.chunk")
    options = body.stream_options or ChatStreamOptions()
    if options.include_usage:
        head["usage"] = None
    samples: dict[int, SampleReader] = {}
    usages: dict[int, Usage] = {}
    end = b""

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**head, "choices": [choice]})

    try:
        async with contextlib.aclosing(events):
            async for batch in events:
                parts: list[bytes] = []
                for each in batch:
                    if each.index not in samples:
                        samples[each.index] = parsed.sample()
                        parts.append(chunk(each.index, {"role": "assistant", "content": ""}))
                    sample = samples[each.index]
                    new = _delta(sample.read(each))
                    if isinstance(each, Delta):
                        logprobs = _logprobs(service, each.logprobs) if body.logprobs else None
                        if new or (logprobs and logprobs["content"]):
                            parts.append(chunk(each.index, new, logprobs=logprobs))
                    else:
                        rest = logprobs_of(each)[sample.logprobs :]
                        logprobs = _logprobs(service, rest) if body.logprobs and rest else None
                        if new or logprobs:
                            parts.append(chunk(each.index, new, logprobs=logprobs))
                        parts.append(chunk(each.index, {}, sample.finish(each)))
                        usages[each.index] = each.usage
                yield b"".join(parts)
        if options.include_usage:
            reasoning = sum([await service.tokens(sample.reasoning) for sample in samples.values()])
            end = event({**head, "choices": [], "usage": usage_of(list(usages.values()), reasoning)})
    except SglError as error:
        end = event(content_of(error, "openai"))
    yield end + DONE


def usage_of(usages: Sequence[Usage], reasoning: int) -> dict[str, Json]:
    """Token counts of an answer, whose samples share their prompt."""
    prompt, completion = usages[0].prompt_tokens, sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens, **usages[0].image_counts},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _logprobs(service: Service, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities of generated tokens, in the form of the protocol."""
    return {"content": entries_of(service.engine.tokenizer.token_bytes, entries), "refusal": None}


ROUTES = (
    Route(
        "/v1/chat/completions", complete, "Answer a conversation", protocol="openai", fields=CHAT, streams=True,
        counts_as_open=True,
    ),
)  # fmt: skip
