"""DSPy: engines for `dspy.LM`. Needs the package dspy.

DSPy's own reader and writer of chat completions (`OpenAIChatLM`) translates between its records and
`EngineChat`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import dspy
from dspy import lm15

from sglang_lite import protocol
from sglang_lite.engine.engine import Engine
from sglang_lite.integrations.chat import ChatAnswer, ChatEvent, EngineChat
from sglang_lite.protocol.anything import Json

_ENDS = {"stop": "stop", "length": "length", "tool_calls": "tool_call"}
# All others become server errors, after which DSPy retries.
_ERRORS = {
    protocol.RequestTimeoutError: lm15.TimeoutError,
    protocol.CapabilityError: lm15.UnsupportedFeatureError,
    protocol.ParameterError: lm15.InvalidRequestError,
    protocol.ConstraintError: lm15.InvalidRequestError,
    protocol.EngineClosedError: lm15.InvalidRequestError,
}


def lm(engine: Engine, **options: Any) -> dspy.LM:  # as for dspy.LM
    """Returns a `dspy.LM` whose model is an engine of this process. With `dspy.JSONAdapter`, typed
    outputs are constrained to their types.

    Args:
        engine: the engine, which stays open.
        **options: arguments of `dspy.LM` (`temperature`, `max_tokens`, `cache` …).
    """
    chat = EngineChat(engine)
    name = f"sglang_lite/{engine.model_name}"
    return dspy.LM(name, engine=DspyEngine(chat), async_engine=AsyncDspyEngine(chat), **options)


class _Dialect:
    """Translates records and errors between DSPy and this package. Also states the capabilities
    that DSPy's adapters ask for.
    """

    supports_function_calling = supports_reasoning = supports_response_schema = True
    supported_params = frozenset((
        "temperature", "max_tokens", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "logprobs",
        "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "stream",
    ))  # fmt: skip

    def __init__(self, chat: EngineChat) -> None:
        self.chat = chat
        self._dialect = lm15.OpenAIChatLM(
            api_key="none is sent", compat="sglang", adaptations="refuse"
        )

    def completion_fields(self, request: lm15.Request) -> dict[str, Json]:
        """Converts a DSPy request to the fields of a chat completion."""
        written = json.loads(self._dialect.build_request(request, stream=False).body or b"{}")
        return {name: value for name, value in written.items() if name != "model"}

    def response(self, answer: ChatAnswer, request: lm15.Request) -> lm15.Response:
        body = answer.as_completion(self.chat.engine.model_name)
        return lm15.response_from_openai_chat(body, response_format=request.config.response_format)

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Converts our errors raised in the `with` block into DSPy's errors. DSPy decides by their
        classes whether to retry.
        """
        try:
            yield
        except protocol.SglError as error:
            kind = next(
                (_ERRORS[ours] for ours in type(error).__mro__ if ours in _ERRORS), lm15.ServerError
            )
            raise kind(str(error)) from error


class DspyEngine(_Dialect):
    """Engine of `dspy.LM` for blocking calls. Closing it leaves the underlying engine open."""

    def complete(self, request: lm15.Request) -> lm15.Response:
        with self.translate_errors():
            return self.response(self.chat.answer(**self.completion_fields(request)), request)

    # lm15.StreamEvent is a union, not a class
    def stream(self, request: lm15.Request) -> Iterator[Any]:
        with self.translate_errors():
            yield lm15.StreamStartEvent(model=request.model)
            for event in self.chat.stream(**self.completion_fields(request)):
                yield from _convert_to_dspy_events(event)


class AsyncDspyEngine(_Dialect):
    """Engine of `dspy.LM`, for event loops."""

    async def complete(self, request: lm15.Request) -> lm15.Response:
        with self.translate_errors():
            return self.response(
                await self.chat.answer_async(**self.completion_fields(request)), request
            )

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:  # as above
        with self.translate_errors():
            yield lm15.StreamStartEvent(model=request.model)
            async with contextlib.aclosing(
                self.chat.stream_async(**self.completion_fields(request))
            ) as events:
                async for event in events:
                    for each in _convert_to_dspy_events(event):
                        yield each


def _convert_to_dspy_events(event: ChatEvent) -> Iterator[Any]:  # as above
    if isinstance(event, ChatAnswer):
        prompt = event.usage.prompt_tokens
        completion = event.usage.completion_tokens
        counted = lm15.Usage(prompt, completion, prompt + completion)
        yield lm15.StreamEndEvent(finish_reason=_ENDS.get(event.finish, "error"), usage=counted)
        return
    if event.reasoning:
        yield lm15.StreamDeltaEvent(lm15.ThinkingDelta(event.reasoning, part_index=0))
    if event.content:
        yield lm15.StreamDeltaEvent(lm15.TextDelta(event.content, part_index=1))
    for part in event.calls:
        named = (part.call.id, part.call.name) if part.begins else (None, None)
        yield lm15.StreamDeltaEvent(lm15.ToolCallDelta(part.arguments, 2 + part.call.index, *named))
