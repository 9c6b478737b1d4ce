"""Ollama's answers: `/api/chat` and `/api/generate`, whose streams are lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from sglang_lite.protocol import BackendError, Delta, Generation, TokenLogprob
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import wait_for_first_event
from sglang_lite.server.conversation.sample_reader import (
    PartialToolCall,
    SampleReader,
    encode_openai_logprobs,
    reported_logprobs,
)
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_body
from sglang_lite.server.http.sse import EventStream
from sglang_lite.server.ollama.ollama_request import (
    CHAT,
    GENERATE,
    OllamaChat,
    OllamaGenerate,
    Read,
    read_chat,
    read_generate,
)
from sglang_lite.server.parameters.thinking import set_thinking_limit
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service
from sglang_lite.wire.json_lines import one_line


class JsonLines(EventStream):
    """Streamed response of lines of JSON."""

    media_type = "application/x-ndjson"

    def encode_error(self, content: Mapping[str, Json]) -> bytes:
        return _encode_line(content)


@dataclass(slots=True)
class _Sample:
    """Answer as received so far."""

    service: Service
    body: OllamaChat | OllamaGenerate
    reader: SampleReader
    calls: int = 0  # number of calls sent

    def read_message_part(
        self, each: Delta | Generation
    ) -> tuple[dict[str, Any], Sequence[TokenLogprob]]:
        """Returns what an event adds: a message with new content, reasoning and completed calls,
        and its log-probabilities.
        """
        sent = self.reader.logprobs
        new = self.reader.read_event(each)
        ended = self.reader.ended
        calls = self.reader.calls[self.calls : ended]
        self.calls = ended
        message: dict[str, Any] = {
            "content": new.content,
            "thinking": new.reasoning,
            "tool_calls": [_encode_ollama_call(call) for call in calls],
        }
        entries = each.logprobs if isinstance(each, Delta) else reported_logprobs(each)[sent:]
        return {name: value for name, value in message.items() if value}, entries

    def lines(self, each: Delta | Generation) -> Iterator[dict[str, Any]]:
        """Yields the lines of a stream for an event."""
        message, entries = self.read_message_part(each)
        if message or (entries and self.body.logprobs):
            yield _encode_answer_line(self.service, self.body, message, entries)
        if isinstance(each, Generation):
            yield {
                **_encode_answer_line(self.service, self.body, {}),
                **_last_line_fields(self.reader, each),
            }


def _encode_answer_line(
    service: Service,
    body: OllamaChat | OllamaGenerate,
    message: dict[str, Any],
    entries: Sequence[TokenLogprob] = (),
) -> dict[str, Any]:
    """Creates the line for a part of an answer."""
    content = message.get("content", "")
    if isinstance(body, OllamaGenerate):
        said = {
            "response": content,
            **{name: each for name, each in message.items() if name != "content"},
        }
    else:
        said = {"message": {"role": "assistant", **message, "content": content}}
    if body.logprobs:
        said["logprobs"] = encode_openai_logprobs(service.engine.tokenizer.token_bytes, entries)
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": body.model, "created_at": now, **said, "done": False}


def _encode_ollama_call(call: PartialToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError as error:
        raise BackendError(f"the model's call of {call.name} can't be read: {error}.") from error
    return {
        "id": call.id,
        "function": {"index": call.index, "name": call.name, "arguments": arguments},
    }


def _last_line_fields(sample: SampleReader, generation: Generation) -> dict[str, Any]:
    """Returns the fields of an answer's last line: reason, counts, and times in nanoseconds. The
    prompt's time does not include waiting in the queue.
    """
    usage = generation.usage
    return {
        "done": True,
        "done_reason": "length" if generation.finish_reason == "length" else "stop",
        **sample.own_fields(generation),
        "total_duration": int(usage.total_s * 1e9),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(max(usage.first_token_s - usage.queue_s, 0.0) * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(max(usage.total_s - usage.first_token_s, 0.0) * 1e9),
    }


def resolve_ollama_model_name(service: Service, name: str) -> str:
    """Returns the name of the model or adapter that a request names. The tag `:latest` is dropped
    unless the model's own name has a tag.

    Raises:
        NotFoundError: neither is served.
    """
    if ":" not in service.model_name:
        name = name.removesuffix(":latest")
    return service.resolve_answering_model(name)


def _answer_handler(function: Callable[[RequestReader, HttpRequest], Read]) -> Callable[..., Any]:
    """Returns a handler for a chat or a generation. `function` reads the request's body."""

    async def handle(service: Service, call: HttpRequest) -> Response:
        body, rendered, params = await read_body(service, call, function)
        name = resolve_ollama_model_name(service, body.model)
        streams = body.stream is not False
        if rendered is None:  # without a prompt, Ollama only loads the model
            return json_response(
                {**_encode_answer_line(service, body, {}), "done": True, "done_reason": "load"}
            )
        params = set_thinking_limit(
            params, rendered, body.think if isinstance(body.think, str) else None
        )
        request = GenerateRequest(rendered.prompt, params, rendered.constraint, stream=streams)
        request = service.select_requested_adapter(name, request)
        sample = _Sample(service, body, SampleReader(rendered))
        if streams:
            events = await wait_for_first_event(service.async_engine.generate(request))
            return JsonLines(events, partial(_stream_json_lines, sample), "ollama")
        (generation,) = await service.async_engine.results(request)
        return json_response(
            {
                **_encode_answer_line(service, body, *sample.read_message_part(generation)),
                **_last_line_fields(sample.reader, generation),
            }
        )

    return handle


def _encode_line(line: object) -> bytes:
    return one_line(msgspec.json.encode(line)) + b"\n"


async def _stream_json_lines(
    sample: _Sample, events: AsyncGenerator[list[Delta | Generation], None]
) -> AsyncGenerator[bytes, None]:
    async for batch in events:
        lines = [line for each in batch for line in sample.lines(each)]
        yield b"".join(map(_encode_line, lines))


ROUTES = (
    Route(
        "/api/chat", _answer_handler(read_chat), "Answer a conversation", protocol="ollama", fields=CHAT, streams=True,
        counts_as_open=True,
    ),
    Route(
        "/api/generate", _answer_handler(read_generate), "Answer or continue a prompt", protocol="ollama",
        fields=GENERATE, streams=True, counts_as_open=True,
    ),
)  # fmt: skip
