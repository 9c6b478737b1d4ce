"""Routes of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import (
    CapabilityError,
    Delta,
    Generation,
    ParameterError,
    Prompt,
    RequestAbortedError,
    SglError,
    Usage,
)
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import wait_for_first_event
from sglang_lite.server.conversation.addresses import image_addresses
from sglang_lite.server.conversation.sample_reader import SampleReader
from sglang_lite.server.endpoint import (
    HttpRequest,
    Route,
    drop_ignored_priorities,
    json_response,
    read_body,
)
from sglang_lite.server.errors import NotFoundError, encode_error_content
from sglang_lite.server.http.event_log import EventLog
from sglang_lite.server.http.sse import EventStream, encode_event
from sglang_lite.server.openai.responses_answer import Event, ResponseAnswer, TextLogprobs
from sglang_lite.server.openai.responses_items import Item, complete_input_items
from sglang_lite.server.openai.responses_request import (
    INPUT_TOKENS,
    LOGPROBS,
    RESPONSES,
    ResponsesRequest,
    conversation_from_items,
)
from sglang_lite.server.parameters import sampling
from sglang_lite.server.parameters.completion_fields import check_stream_options
from sglang_lite.server.parameters.thinking import report_ignored_thinking, set_thinking_limit
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.responses_store import PACK, UNPACK, StoredResponse
from sglang_lite.server.service import Service
from sglang_lite.text.chat_format import RenderedConversation

T = TypeVar("T")
_NAMES = {"max_output_tokens": "max_tokens"}


async def create(service: Service, call: HttpRequest) -> Response:
    """Creates a response."""
    found, before_bytes = await _parse_with_store(service, call, _read_response_request)
    body = found.body
    rendered = found.rendered
    service.find_requested_adapter(body.model)  # rejects an unknown model
    check_stream_options(body.stream, body.stream_options, call.unused)
    scored = LOGPROBS in (body.include or ())
    params = sampling.read_sampling_params(
        body,
        _NAMES,
        max_tokens=service.engine.context_length,
        return_logprob=scored,
        top_logprobs_num=body.top_logprobs or 0,
        return_text_in_logprobs=scored,
    )
    params = set_thinking_limit(
        params, rendered, None if body.reasoning is None else body.reasoning.effort
    )
    made = _Response(
        service,
        call.key,
        body,
        found.items,
        len(call.data) + before_bytes,
        ResponseAnswer(
            SampleReader(rendered),
            TextLogprobs(service.engine.tokenizer.token_bytes) if scored else None,
        ),
    )
    generate = GenerateRequest(
        rendered.prompt,
        params,
        rendered.constraint,
        stream=bool(body.stream),
        namespace=body.cache_salt or "",
        priority=body.priority or 0,
        rid=made.id,
    )
    [generate] = drop_ignored_priorities(
        service, call, [service.select_requested_adapter(body.model, generate)]
    )
    [generate] = await service.images.fetch_requests([generate])
    if body.store is not False:
        service.stored.check_conversation_size(made.input_bytes)
    if body.stream:
        events = await wait_for_first_event(service.async_engine.generate(generate))
        return EventStream(events, partial(_stream_response_events, made), "openai")
    (generation,) = await service.async_engine.results(generate)
    for _ in made.answer.encode_response_events(generation):
        pass
    await made.complete_from_generation(generation)
    made.store()
    return json_response(made.content)


@dataclass(frozen=True, slots=True)
class _StoreReferences:
    """References to the parts of the store that a request needs: the id of an earlier response, and
    ids of items.
    """

    response: str | None
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _StoreParts:
    """Parts of the store that a request needs: input and output of the earlier response, and items
    by id. The input includes the conversation before that response.
    """

    input: bytes
    output: Sequence[Item]
    items: Mapping[str, Item]


@dataclass(frozen=True, slots=True)
class _ParsedRequest:
    """Request, parsed and rendered.

    Attributes:
        body: the request without its input.
        items: the conversation, as `StoredResponse.input`.
        rendered: rendered conversation.
    """

    body: ResponsesRequest
    items: bytes
    rendered: RenderedConversation


async def _parse_with_store(
    service: Service, call: HttpRequest, function: Callable[..., T | _StoreReferences]
) -> tuple[T, int]:
    """Reads a request with `function`. If the function returns references, calls it again with the
    parts of the store. Returns the function's result, and the size in bytes of the earlier
    conversation.

    Raises:
        SglError: the request is invalid, or a part of the store doesn't exist.
    """
    found = await read_body(service, call, function, (None,))
    if not isinstance(found, _StoreReferences):
        return found, 0
    items = {id: dict(service.stored.find_item(call.key, id)) for id in found.items}
    before = (
        None if found.response is None else _finished_response(service, call.key, found.response)
    )
    size = 0 if before is None else before.conversation_bytes
    known = (
        _StoreParts(PACK([]), (), items)
        if before is None
        else _StoreParts(before.input, before.content["output"], items)
    )
    again = await read_body(service, call, function, (known,), size)
    assert not isinstance(again, _StoreReferences)
    return again, size


def _read_response_request(
    reader: RequestReader, call: HttpRequest, known: _StoreParts | None
) -> _ParsedRequest | _StoreReferences:
    """Parses and renders a request. Returns references instead if parts of the store are needed and
    `known` is None.
    """
    body = call.read_fields(RESPONSES)
    items = _resolve_conversation_items(
        call, body, known, reads_images="image" in reader.media_kinds
    )
    if isinstance(items, _StoreReferences):
        return items
    conversation = conversation_from_items(body, items, call.unused)
    body.input = None
    rendered = reader.render(conversation, call.unused)
    effort = None if body.reasoning is None else body.reasoning.effort
    report_ignored_thinking(rendered, {}, ("reasoning.effort", effort), call.unused)
    return _ParsedRequest(body, PACK(items), rendered)


def _resolve_conversation_items(
    call: HttpRequest, body: ResponsesRequest, known: _StoreParts | None, *, reads_images: bool
) -> list[Item] | _StoreReferences:
    """Returns the items of a conversation, beginning with the earlier conversation that the request
    refers to, if any. Returns references instead if parts of the store are needed and `known` is
    None.
    """
    wanted: list[str] = []

    def note_wanted(id: str) -> Item:
        wanted.append(id)
        return {}

    find = note_wanted if known is None else known.items.__getitem__
    items = complete_input_items(body.input, find, call.unused, reads_images=reads_images)
    if known is not None:
        return [*UNPACK(known.input), *map(dict, known.output), *items]
    if wanted or body.previous_response_id is not None:
        return _StoreReferences(body.previous_response_id, tuple(dict.fromkeys(wanted)))
    return items


def _finished_response(service: Service, key: str, id: str) -> StoredResponse:
    """Returns the earlier response with an id. Raises ParameterError if it is still running."""
    try:
        found = service.stored.find_response(key, id)
    except NotFoundError as error:
        raise NotFoundError(f"previous_response_id: {error.message}", hint=error.hint) from None
    if found.status == "in_progress":
        raise ParameterError("previous_response_id", "is still running. Wait until it has ended.")
    return found


async def _stream_response_events(
    made: _Response, events: AsyncGenerator[list[Delta | Generation], None]
) -> AsyncGenerator[bytes, None]:
    log = made.log = EventLog()
    made.store()
    numbered = made.answer.new_event
    try:
        yield made.encode_events(
            numbered(f"response.{kind}", response=made.content)
            for kind in ("created", "in_progress")
        )
        async for batch in events:
            new = [event for each in batch for event in made.answer.encode_response_events(each)]
            if isinstance(batch[-1], Generation):
                await made.complete_from_generation(batch[-1])
                new.append(numbered(f"response.{made.content['status']}", response=made.content))
            if new:
                yield made.encode_events(new)
    except SglError as error:
        new = list(made.answer.close_item("incomplete"))
        made.complete_with_error(error)
        kind = "failed" if made.content["status"] == "failed" else "incomplete"
        yield made.encode_events([*new, numbered(f"response.{kind}", response=made.content)])
    finally:
        if made.content["status"] == "in_progress":  # the client has disconnected
            new = list(made.answer.close_item("incomplete"))
            made.content = {**made.content, "status": "cancelled", "output": made.answer.items}
            # for other readers of the log
            made.encode_events([*new, numbered("response.incomplete", response=made.content)])
        log.mark_complete()
        if made.stored is not None:
            made.service.stored.update_content(made.key, made.stored, made.content)


@dataclass(slots=True)
class _Response:
    """Response that is being created.

    Args:
        service: service of the server.
        key: API key of the request.
        body: request of the response.
        items: input of the response, with the whole conversation before it, as
            `StoredResponse.input`.
        input_bytes: size of the items in bytes.
        answer: answer to the conversation.

    Attributes:
        content: the response in its present state.
        log: events of the stream; None if the response is not streamed.
        stored: entry of the store, once `store` was called; None if the request disables storing.
    """

    service: Service
    key: str
    body: ResponsesRequest
    items: bytes
    input_bytes: int
    answer: ResponseAnswer
    id: str = field(default_factory=lambda: f"resp_{random_id()}", init=False)
    content: dict[str, Any] = field(init=False)
    log: EventLog | None = field(default=None, init=False)
    stored: StoredResponse | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        body = self.body
        text = body.text
        reasoning = body.reasoning
        self.content = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self.service.resolve_answering_model(body.model),
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (None if text is None else text.format) or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def store(self) -> None:
        """Stores the response, unless the request disables storing."""
        if self.body.store is not False:
            self.stored = StoredResponse(self.content, self.items, self.input_bytes, self.log)
            self.service.stored.add_response(self.key, self.stored)

    def encode_events(self, events: Iterable[Event]) -> bytes:
        """Encodes events, and appends them to the log if the response is stored."""
        written = [encode_event(each, each["type"]) for each in events]
        if self.log is not None and self.stored is not None:
            self.service.stored.add_events(self.key, self.stored, written)
        return b"".join(written)

    async def complete_from_generation(self, generation: Generation) -> None:
        """Completes the content with the result of the generation."""
        cut = generation.finish_reason == "length"
        own = self.answer.sample.own_fields(generation)
        drawn: dict[str, Any] = {
            name: own.pop(name) for name in ("exact", "weighted") if name in own
        }
        self.content = {
            **self.content,
            "status": "incomplete" if cut else "completed",
            "completed_at": int(time.time()),
            "incomplete_details": {
                "reason": "max_output_tokens",
                **own,
            }
            if cut
            else None,
            **drawn,
            "output": self.answer.items,
            "usage": await self._encode_response_usage(generation.usage),
        }

    def complete_with_error(self, error: SglError) -> None:
        """Completes the content with an error."""
        self.content = {**self.content, "output": self.answer.items}
        if isinstance(error, RequestAbortedError):
            self.content["status"] = "cancelled"
            return
        told = encode_error_content(error, "openai")["error"]
        self.content |= {
            "status": "failed",
            "error": {"code": "server_error", "message": told["message"]},
        }

    async def _encode_response_usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
                **usage.image_counts,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": await self.service.count_text_tokens(
                    self.answer.sample.reasoning
                )
            },
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


# --------------------------------------------------------------------------------- stored responses


async def retrieve(service: Service, call: HttpRequest) -> Response:
    """Returns a stored response. With `stream=true`, replays its stream of events, after
    `starting_after` if given.
    """
    _check_query(call, _OF_RESPONSE)
    found = service.stored.find_response(call.key, call.path["id"])
    stream = call.query.get("stream", "false")
    after = call.query.get("starting_after")
    if stream not in ("true", "false"):
        raise ParameterError("stream", f"{stream!r:.40} is neither true nor false.")
    if stream == "false":
        if after is not None:
            raise ParameterError(
                "starting_after", "needs a stream.", hint="Set stream=true, or leave it out."
            )
        return json_response(found.content)
    if found.log is None:
        raise ParameterError(
            "stream",
            "the response was not streamed, so it has no events.",
            hint="Leave it out, or make the response with stream=true.",
        )
    written = found.log.read_after(-1 if after is None else _parse_starting_after(after, found.log))
    return EventStream(written, lambda parts: parts, "openai")


def _parse_starting_after(given: str, log: EventLog) -> int:
    if not (given.isascii() and given.isdigit()):
        raise ParameterError("starting_after", f"{given!r:.40} is not the number of an event.")
    if int(given[:9]) >= len(log):
        raise ParameterError(
            "starting_after", f"there is no event {given:.40}; the last one is {len(log) - 1}."
        )
    return int(given)


async def input_tokens(service: Service, call: HttpRequest) -> Response:
    """Counts the tokens of a response's prompt."""
    (model, found), _ = await _parse_with_store(service, call, _count_response_input)
    service.find_requested_adapter(model)  # rejects an unknown model
    if isinstance(found, Prompt):
        found = len(
            await asyncio.to_thread(
                service.reader.ids, await service.images.fetch_prompt_images(found)
            )
        )
    return json_response({"object": "response.input_tokens", "input_tokens": found})


def _count_response_input(
    reader: RequestReader, call: HttpRequest, known: _StoreParts | None
) -> tuple[str | None, int | Prompt] | _StoreReferences:
    """Returns the model's name and the number of the prompt's tokens. Returns the prompt in place
    of the number if its images must be fetched first. Returns references if parts of the store are
    needed and `known` is None.
    """
    body = ResponsesRequest(**msgspec.structs.asdict(call.read_fields(INPUT_TOKENS)))
    items = _resolve_conversation_items(
        call, body, known, reads_images="image" in reader.media_kinds
    )
    if isinstance(items, _StoreReferences):
        return items
    conversation = conversation_from_items(body, items, call.unused)
    prompt = reader.render(conversation, call.unused).prompt
    return body.model, prompt if image_addresses(prompt) else len(reader.ids(prompt))


async def compact(service: Service, _: HttpRequest) -> Response:
    """Refuses to compact a conversation."""
    raise CapabilityError(
        f"{service.model_name} does not compact conversations.",
        hint="Send fewer items, or ask the model for a summary and continue from that.",
    )


async def delete(service: Service, call: HttpRequest) -> Response:
    """Deletes a response from the store."""
    removed = service.stored.remove_response(call.key, call.path["id"])
    return json_response({"id": removed.id, "object": "response", "deleted": True})


async def cancel(service: Service, call: HttpRequest) -> Response:
    """Aborts a running response."""
    found = service.stored.find_response(call.key, call.path["id"])
    if found.status == "in_progress":
        with contextlib.suppress(ParameterError):  # the response has just ended
            service.engine.abort(found.id)
        return json_response({**found.content, "status": "cancelled"})
    if found.status != "cancelled":
        raise ParameterError(
            "response_id", f"is {found.status}. Only a running response can be cancelled."
        )
    return json_response(found.content)


async def input_items(service: Service, call: HttpRequest) -> Response:
    """Returns a page of the input items of a response."""
    _check_query(call, _OF_ITEMS)
    items = list(service.stored.find_response(call.key, call.path["id"]).items)
    limit = call.query.get("limit", "20")
    order = call.query.get("order", "desc")
    after = call.query.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise ParameterError("limit", f"{limit!r:.40} is not between 1 and 100.")
    if order not in ("asc", "desc"):
        raise ParameterError("order", f"{order!r:.40} is neither asc nor desc.")
    if order == "desc":
        items.reverse()
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise ParameterError("after", f"{after!r:.100} is not an item of this response.")
        items = items[at + 1 :]
    data = items[: int(limit)]
    ends = (data[0]["id"], data[-1]["id"]) if data else ("", "")
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": ends[0],
            "last_id": ends[1],
            "has_more": len(data) < len(items),
        }
    )


def _check_query(call: HttpRequest, known: Sequence[str]) -> None:
    """Raises ParameterError if the URL has an unknown parameter."""
    for name in call.query:
        if name not in known:
            raise ParameterError(
                name[:100],
                "is not a parameter of this request.",
                hint=f"It has: {', '.join(known)}.",
            )


# `include` is accepted without effect: its values name parts that are always included, or parts of
# hosted tools.
_OF_RESPONSE = ("include", "include[]", "include_obfuscation", "starting_after", "stream")
_OF_ITEMS = ("include", "include[]", "limit", "order", "after")
_PATH = "/v1/responses/{id}"
ROUTES = (
    Route(
        "/v1/responses", create, "Make a response", protocol="openai", fields=RESPONSES, streams=True,
        counts_as_open=True,
    ),
    Route(
        "/v1/responses/input_tokens", input_tokens, "Count the tokens of a response's prompt", protocol="openai",
        fields=INPUT_TOKENS,
    ),
    Route("/v1/responses/compact", compact, "Shorten a conversation: refused", protocol="openai"),
    Route(_PATH, retrieve, "A response", ("GET",), protocol="openai", query=_OF_RESPONSE, streams=True),
    Route(_PATH, delete, "Forget a response", ("DELETE",), protocol="openai"),
    Route(f"{_PATH}/cancel", cancel, "End a response that runs", protocol="openai"),
    Route(
        f"{_PATH}/input_items", input_items, "The items that a response was made of", ("GET",), protocol="openai",
        query=_OF_ITEMS,
    ),
)  # fmt: skip
