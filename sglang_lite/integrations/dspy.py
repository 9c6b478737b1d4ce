"""DSPy: engines for `dspy.LM`. Needs the package dspy.

DSPy's own reader and writer of chat completions (`OpenAIChatLM`) stand between its records and `EngineChat`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import dspy
from dspy.lm15 import (
    InvalidRequestError,
    OpenAIChatLM,
    Request,
    Response,
    ServerError,
    StreamDeltaEvent,
    StreamEndEvent,
    StreamStartEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    UnsupportedFeatureError,
    Usage,
    response_from_openai_chat,
)
from dspy.lm15 import TimeoutError as LateError

from sglang_lite.engine.engine import Engine
from sglang_lite.integrations.chat import ChatAnswer, ChatEvent, EngineChat
from sglang_lite.protocol import (
    CapabilityError,
    ConstraintError,
    EngineClosedError,
    ParameterError,
    RequestTimeoutError,
    SglError,
)
from sglang_lite.protocol.anything import Json


def lm(engine: Engine, **options: Any) -> dspy.LM:  # as of dspy.LM
    """Language model that an engine of this process runs. Typed outputs are constrained, by `dspy.JSONAdapter`.

    Args:
        engine: the engine, which stays open.
        **options: arguments of `dspy.LM` (`temperature`, `max_tokens`, `cache` …).
    """
    chat = EngineChat(engine)
    name = f"sglang_lite/{engine.model_name}"
    return dspy.LM(name, engine=DspyEngine(chat), async_engine=AsyncDspyEngine(chat), **options)


class _Capable:
    """Abilities that DSPy's adapters ask for, and the fields of a request."""

    supports_function_calling = supports_reasoning = supports_response_schema = True
    supported_params = frozenset((
        "temperature", "max_tokens", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "logprobs",
        "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "stream",
    ))  # fmt: skip

    def __init__(self, chat: EngineChat) -> None:
        self.chat = chat
        self._dialect = OpenAIChatLM(api_key="none is sent", compat="sglang", adaptations="refuse")

    def fields(self, request: Request) -> dict[str, Json]:
        """Fields of a chat completion."""
        written = json.loads(self._dialect.build_request(request, stream=False).body or b"{}")
        return {name: value for name, value in written.items() if name != "model"}


class DspyEngine(_Capable):
    """Engine of `dspy.LM`, for calls that wait."""

    def complete(self, request: Request) -> Response:
        with _told():
            return _response(self.chat, self.chat.answer(**self.fields(request)), request)

    def stream(self, request: Request) -> Iterator[Any]:  # StreamEvent, which DSPy does not export
        with _told():
            yield StreamStartEvent(model=request.model)
            for event in self.chat.stream(**self.fields(request)):
                yield from _stream_events(event)

    def close(self) -> None:
        """Does nothing: the engine is its owner's."""


class AsyncDspyEngine(_Capable):
    """Engine of `dspy.LM`, for event loops."""

    async def complete(self, request: Request) -> Response:
        with _told():
            return _response(self.chat, await self.chat.answer_async(**self.fields(request)), request)

    async def stream(self, request: Request) -> AsyncIterator[Any]:  # as above
        with _told():
            yield StreamStartEvent(model=request.model)
            async with contextlib.aclosing(self.chat.stream_async(**self.fields(request))) as events:
                async for event in events:
                    for each in _stream_events(event):
                        yield each

    async def aclose(self) -> None:
        """Does nothing, as above."""


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raises our errors as DSPy's, which decides by them whether to try again."""
    try:
        yield
    except SglError as error:
        kinds = {RequestTimeoutError: LateError, CapabilityError: UnsupportedFeatureError,
                 ParameterError: InvalidRequestError, ConstraintError: InvalidRequestError,
                 EngineClosedError: InvalidRequestError}  # fmt: skip
        kind = next((theirs for ours, theirs in kinds.items() if isinstance(error, ours)), ServerError)
        raise kind(str(error)) from error


def _response(chat: EngineChat, answer: ChatAnswer, request: Request) -> Response:
    body = answer.as_completion(chat.engine.model_name)
    return response_from_openai_chat(body, response_format=request.config.response_format)


def _stream_events(event: ChatEvent) -> Iterator[Any]:  # as above
    if isinstance(event, ChatAnswer):
        usage = event.usage
        ends = {"stop": "stop", "length": "length", "tool_calls": "tool_call"}
        counted = Usage(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens + usage.completion_tokens)
        yield StreamEndEvent(finish_reason=ends.get(event.finish, "error"), usage=counted)
        return
    if event.reasoning:
        yield StreamDeltaEvent(ThinkingDelta(event.reasoning, part_index=0))
    if event.content:
        yield StreamDeltaEvent(TextDelta(event.content, part_index=1))
    for part in event.calls:
        named = (part.call.id, part.call.name) if part.begins else (None, None)
        yield StreamDeltaEvent(ToolCallDelta(part.arguments, 2 + part.call.index, *named))
