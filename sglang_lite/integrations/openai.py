"""Client of the package openai that sends its requests to an engine of this process, without a
server or a port. For libraries that expect such a client. Needs the package openai.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import httpx2
from openai import AsyncOpenAI

from sglang_lite.engine.engine import Engine
from sglang_lite.integrations.chat import ChatAnswer, ChatEvent, EngineChat
from sglang_lite.lang.checks import check_booleans
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import SglError
from sglang_lite.protocol.anything import Json
from sglang_lite.server.errors import NotFoundError, encode_error_content, find_error_status
from sglang_lite.server.openai.chat_answer import encode_chat_delta

BASE_URL = "http://engine/v1"  # placeholder: nothing is sent there


def async_client(engine: Engine) -> AsyncOpenAI:
    """Returns an openai client whose chat completions an engine answers. Calls of other endpoints
    raise openai.NotFoundError. Invalid requests raise the same errors as with a server.

    Args:
        engine: the engine, which stays open.
    """
    transport = EngineTransport(engine)
    client = httpx2.AsyncClient(transport=transport)
    return AsyncOpenAI(base_url=BASE_URL, api_key="none is sent", http_client=client, max_retries=0)


class EngineTransport(httpx2.AsyncBaseTransport):
    """Transport of httpx2 that lets an engine answer chat completions.

    Args:
        engine: the engine, which stays open.
    """

    def __init__(self, engine: Engine) -> None:
        self._chat = EngineChat(engine)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            if request.url.path != "/v1/chat/completions":
                raise NotFoundError(
                    f"{request.url.path} is not a route of an engine.", hint="Serve the model."
                )
            fields = json.loads(await request.aread())
            model = fields.pop("model", "")
            timeout = request.extensions.get("timeout", {}).get("read")
            streams = fields.pop("stream", False)
            check_booleans(stream=streams)
            if not streams:
                answer = await self._chat.answer_async(**fields, timeout=timeout)
                head = {"id": f"chatcmpl-{random_id()}", "created": int(time.time())}
                return httpx2.Response(200, json={**head, **answer.as_completion(model)})
            events = self._chat.stream_async(**fields, timeout=timeout)
            first = await anext(events)  # raises the error of an invalid request
            usage = (fields.get("stream_options") or {}).get("include_usage")
            stream = _Chunks(first, events, model, usage=bool(usage))
            return httpx2.Response(
                200, headers={"content-type": "text/event-stream"}, stream=stream
            )
        except SglError as error:
            return httpx2.Response(
                find_error_status(error).status, json=encode_error_content(error, "openai")
            )


class _Chunks(httpx2.AsyncByteStream):
    """Stream of a chat completion, as server-sent events."""

    def __init__(
        self, first: ChatEvent, events: AsyncGenerator[ChatEvent, None], model: str, *, usage: bool
    ) -> None:
        self._first = first
        self._events = events
        self._usage = usage
        self._head = {
            "id": f"chatcmpl-{random_id()}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            yield _encode_sse_event(self._build_chunk({"role": "assistant", "content": ""}))
            for each in self._encode_as_chunks(self._first):
                yield _encode_sse_event(each)
            async for event in self._events:
                for each in self._encode_as_chunks(event):
                    yield _encode_sse_event(each)
        except SglError as error:
            yield _encode_sse_event(encode_error_content(error, "openai"))
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        with contextlib.suppress(RuntimeError):  # events are being read; their reader ends them
            await self._events.aclose()

    def _encode_as_chunks(self, event: ChatEvent) -> list[dict[str, Any]]:  # JSON
        if not isinstance(event, ChatAnswer):
            return [self._build_chunk(encode_chat_delta(event))]
        chunks = [self._build_chunk({}, event.finish, event.logprobs)]
        if self._usage:
            chunks.append({**self._head, "choices": [], "usage": event.as_completion("")["usage"]})
        return chunks

    def _build_chunk(
        self,
        delta: dict[str, Json],
        finish: str | None = None,
        logprobs: Sequence[Json] | None = None,
    ) -> dict[str, Any]:
        told = None if logprobs is None else {"content": logprobs}
        return {
            **self._head,
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": told}],
        }


def _encode_sse_event(data: dict[str, Json]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
