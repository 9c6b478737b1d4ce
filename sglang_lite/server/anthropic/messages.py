"""Routes of Anthropic's Messages API."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import Delta, Generation, ParameterError, Prompt, Usage
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.anthropic.messages_request import (
    CountTokensRequest,
    conversation_from_messages,
)
from sglang_lite.server.async_engine import wait_for_first_event
from sglang_lite.server.conversation.addresses import image_addresses
from sglang_lite.server.conversation.images import RequestImages
from sglang_lite.server.conversation.sample_reader import CallDelta, SampleDelta, SampleReader
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_body
from sglang_lite.server.fields import MESSAGES_NEUTRAL, MESSAGES_REFUSED, Fields
from sglang_lite.server.http.sse import EventStream, encode_event
from sglang_lite.server.parameters import sampling
from sglang_lite.server.parameters.thinking import (
    report_ignored_thinking,
    set_thinking_budget,
    set_thinking_limit,
)
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service
from sglang_lite.text.chat_format import RenderedConversation


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Request to generate a message."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    exact: bool | str | None = None
    stream: bool | None = None


MESSAGES = Fields(MessagesRequest, MESSAGES_NEUTRAL, MESSAGES_REFUSED)
COUNTED = Fields(CountTokensRequest, MESSAGES_NEUTRAL, MESSAGES_REFUSED)
_NAMES = {"stop_sequences": "stop"}


async def create(service: Service, call: HttpRequest) -> Response:
    """Generates a message."""
    body, rendered, ids = await read_body(service, call, _read_messages_request)
    service.find_requested_adapter(body.model)  # rejects an unknown model
    prompt: Prompt | Sequence[int] = ids
    if rendered.prompt.images:
        prompt = await service.images.fetch_prompt_images(rendered.prompt)
        ids = ids or await asyncio.to_thread(service.reader.ids, prompt)
    params = set_thinking_budget(
        sampling.read_sampling_params(body, _NAMES), "thinking.budget_tokens", body.budget_tokens
    )
    params = set_thinking_limit(params, rendered, body.effort)
    request = GenerateRequest(prompt, params, rendered.constraint, stream=bool(body.stream))
    request = service.select_requested_adapter(body.model, request)
    message = _Message(service, body, SampleReader(rendered, prefix="toolu_"), len(ids))
    if body.stream:
        events = await wait_for_first_event(service.async_engine.generate(request))
        return EventStream(events, partial(_stream_message, message), "anthropic")
    (generation,) = await service.async_engine.results(request)
    for _ in message.encode_message_events(generation):
        pass
    await message.end_message(generation)
    return json_response(message.response)


async def count_tokens(service: Service, call: HttpRequest) -> Response:
    """Counts the tokens of a message's prompt."""
    model, found = await read_body(service, call, _count_message_tokens)
    service.find_requested_adapter(model)  # rejects an unknown model
    if isinstance(found, Prompt):
        found = len(
            await asyncio.to_thread(
                service.reader.ids, await service.images.fetch_prompt_images(found)
            )
        )
    return json_response({"input_tokens": found})


def _read_messages_request(
    reader: RequestReader, call: HttpRequest
) -> tuple[MessagesRequest, RenderedConversation, Sequence[int]]:
    """Reads a request. Returns it without its conversation and tools, together with the rendered
    conversation and the prompt's token ids. There are no ids if images are still to be fetched.
    """
    body = call.read_fields(MESSAGES)
    if body.max_tokens < 1:
        raise ParameterError(
            "max_tokens", f"{body.max_tokens} is less than 1.", hint="Give 1 or more."
        )
    rendered = reader.render(
        conversation_from_messages(body, call.unused, _new_image_collector(reader)), call.unused
    )
    budgets = {"thinking.budget_tokens": body.budget_tokens}
    report_ignored_thinking(rendered, budgets, ("output_config.effort", body.effort), call.unused)
    body.messages = []
    body.system = None
    body.tools = None
    return body, rendered, () if image_addresses(rendered.prompt) else reader.ids(rendered.prompt)


def _new_image_collector(reader: RequestReader) -> RequestImages:
    return RequestImages(reader.media_kinds)


def _count_message_tokens(
    reader: RequestReader, call: HttpRequest
) -> tuple[str | None, int | Prompt]:
    """Returns the model's name and the number of tokens in the prompt. If images of the prompt are
    still to be fetched, returns the prompt instead of the number.
    """
    body = call.read_fields(COUNTED)
    prompt = reader.render(
        conversation_from_messages(body, call.unused, _new_image_collector(reader)), call.unused
    ).prompt
    return body.model, prompt if image_addresses(prompt) else len(reader.ids(prompt))


# ------------------------------------------------------------------------------------------ answers


async def _stream_message(
    message: _Message, events: AsyncGenerator[list[Delta | Generation], None]
) -> AsyncGenerator[bytes, None]:
    yield _encode_message_event({"type": "message_start", "message": message.head})
    async for batch in events:
        if parts := b"".join(
            _encode_message_event(each)
            for new in batch
            for each in message.encode_message_events(new)
        ):
            yield parts
        if isinstance(batch[-1], Generation):
            yield _encode_message_event(await message.end_message(batch[-1]))
    yield _encode_message_event({"type": "message_stop"})


def _encode_message_event(content: dict[str, Any]) -> bytes:
    return encode_event(content, content["type"])


@dataclass(slots=True)
class _Message:
    """Message as received so far.

    Args:
        service: service of the server.
        body: request of the message.
        sample: reader of the message's sample.
        prompt_tokens: number of tokens of the prompt.

    Attributes:
        head: the message without content, for the first event.
        response: the complete message, once `end_message` was called.
        blocks: content blocks of the message.
    """

    service: Service
    body: MessagesRequest
    sample: SampleReader
    prompt_tokens: int
    blocks: list[dict[str, Any]] = field(default_factory=list, init=False)
    head: dict[str, Any] = field(init=False)
    response: dict[str, Any] = field(init=False)
    _open: bool = field(default=False, init=False)  # the last block is incomplete
    _arguments: str = field(default="", init=False)  # arguments of the last block, if it is a call

    def __post_init__(self) -> None:
        self.head = {
            "id": f"msg_{random_id()[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self.service.resolve_answering_model(self.body.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self.prompt_tokens, **_NOT_CREATED, "output_tokens": 0},
        }

    def encode_message_events(self, each: Delta | Generation) -> Iterator[dict[str, Any]]:
        """Yields the stream's events for an event of the engine."""
        yield from self._encode_sample_delta(self.sample.read_event(each))
        if isinstance(each, Generation):
            yield from self._close_block()

    async def end_message(self, generation: Generation) -> dict[str, Any]:
        """Returns the event that ends the message, and sets `response`. Called after all content
        was read.
        """
        end = _stop_fields(self.sample, generation, self.body.max_tokens)
        usage = await self._encode_message_usage(generation.usage)
        self.response = {**self.head, "content": self.blocks, **end, "usage": usage}
        return {"type": "message_delta", "delta": end, "usage": usage}

    def _encode_sample_delta(self, new: SampleDelta) -> Iterator[dict[str, Any]]:
        for kind, part in new.ordered_pieces:
            if isinstance(part, CallDelta):
                yield from self._encode_call_delta(part)
            elif kind == "content":
                yield from self._text("text", part)
            else:
                yield from self._text("thinking", part)

    def _text(self, kind: Literal["text", "thinking"], text: str) -> Iterator[dict[str, Any]]:
        if not self._open or self.blocks[-1]["type"] != kind:
            yield from self._open_block(
                {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            )
        if kind == "text" or self.body.shows_thinking:
            self.blocks[-1][kind] += text
            yield self._block_delta_event({"type": f"{kind}_delta", kind: text})

    def _encode_call_delta(self, part: CallDelta) -> Iterator[dict[str, Any]]:
        if part.begins:
            yield from self._open_block(
                {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
            )
        if part.arguments:
            self._arguments += part.arguments
            yield self._block_delta_event(
                {"type": "input_json_delta", "partial_json": part.arguments}
            )

    def _open_block(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close_block()
        self.blocks.append(block)
        self._open = True
        self._arguments = ""
        yield {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(block),
        }

    def _close_block(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        self._open = False
        block = self.blocks[-1]
        # no server checks the signature, but clients drop thinking without one
        if block["type"] == "thinking":
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._block_delta_event(
                {"type": "signature_delta", "signature": block["signature"]}
            )
        if block["type"] == "tool_use":
            with contextlib.suppress(msgspec.DecodeError):  # the call was cut
                block["input"] = msgspec.json.decode(self._arguments)
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _block_delta_event(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    async def _encode_message_usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            **_NOT_CREATED,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "thinking_tokens": await self.service.count_text_tokens(self.sample.reasoning)
            },
        }


# Writing to the cache costs nothing.
_NOT_CREATED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _stop_fields(sample: SampleReader, generation: Generation, limit: int) -> dict[str, Any]:
    """Returns the fields that say why a message ended: the stop reason, the stop sequence, and this
    package's own fields.
    """
    reason = sample.openai_finish_reason(generation)
    matched = None
    found = "end_turn"
    if reason == "tool_calls":
        found = "tool_use"
    elif reason == "length":
        full = generation.usage.completion_tokens < limit
        found = "model_context_window_exceeded" if full else "max_tokens"
    elif isinstance(generation.matched, str):
        found = "stop_sequence"
        matched = generation.matched
    return {"stop_reason": found, "stop_sequence": matched, **sample.own_fields(generation)}


ROUTES = (
    Route(
        "/v1/messages", create, "Write a message", protocol="anthropic", fields=MESSAGES, streams=True,
        counts_as_open=True,
    ),
    Route(
        "/v1/messages/count_tokens", count_tokens, "Count the tokens of a message's prompt", protocol="anthropic",
        fields=COUNTED, counts_as_open=True,
    ),
)  # fmt: skip
