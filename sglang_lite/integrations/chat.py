"""Conversations with an engine of this process, in the format of OpenAI's chat completions. Other
libraries know this format. Requests are read by the same code as in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from sglang_lite.engine.engine import Engine
from sglang_lite.lang.checks import check_limits
from sglang_lite.lang.concurrency.loop import executor, running_mailbox
from sglang_lite.lang.tools import forbid_extra_members
from sglang_lite.protocol import (
    Delta,
    Generation,
    ParameterError,
    RequestTimeoutError,
    SglError,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.conversation.sample_reader import (
    PartialToolCall,
    SampleDelta,
    SampleReader,
    encode_openai_logprobs,
    reported_logprobs,
)
from sglang_lite.server.openai.chat_answer import build_assistant_reply, chat_token_counts
from sglang_lite.server.openai.chat_request import CHAT, FunctionTool, RenderedChat, render_chat
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.settings import ServerSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Answer to a conversation. In a stream, it is the last event.

    Attributes:
        text: text of the answer, without reasoning and tool calls.
        reasoning: reasoning that the model wrote before the answer; "" for none.
        calls: tool calls, with arguments as JSON.
        finish: why the answer ends.
        usage: numbers of tokens, and times.
        reasoning_tokens: number of tokens of the reasoning.
        logprobs: log-probabilities of the answer's tokens in OpenAI's form, if the request asks for
            them.
    """

    text: str
    reasoning: str
    calls: Sequence[PartialToolCall]
    finish: Literal["stop", "length", "abort", "tool_calls"]
    usage: Usage
    reasoning_tokens: int
    logprobs: Sequence[Json] | None

    def as_completion(self, model: str) -> dict[str, Json]:
        """Returns the answer as an OpenAI chat completion."""
        message = build_assistant_reply(self.text, self.reasoning, self.calls)
        logprobs = None if self.logprobs is None else {"content": self.logprobs}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": self.finish,
            "logprobs": logprobs,
        }
        usage = chat_token_counts([self.usage], self.reasoning_tokens)
        return {"object": "chat.completion", "model": model, "choices": [choice], "usage": usage}


ChatEvent: TypeAlias = SampleDelta | ChatAnswer


class EngineChat:
    """Conversations with an engine.

    Methods take the fields of a chat completion (docs/server.md: `messages`, `tools`,
    `response_format` …) and `timeout`, the number of seconds after which the request is aborted.
    Tool arguments that the schemas don't name are rejected, unless a schema says which others are
    allowed. `answer` and `stream` block the calling thread; their `_async` variants belong to the
    event loop that calls them. All raise

    - ParameterError for a field that is unknown, not supported or invalid, and CapabilityError for
      content that the model can't read. Fields and names that the chat template does not show are
      reported in a UserWarning;
    - RequestTimeoutError after the timeout;
    - what `Engine.submit` raises, except OverloadedError: requests wait for room instead.

    Args:
        engine: the engine, which stays open.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reader = RequestReader.from_engine(engine, ServerSettings())

    def answer(self, **fields: Json) -> ChatAnswer:
        """Returns the answer to a conversation. Blocks until it is complete."""
        self.engine.core.gate.check_blocking_call("chat")
        return _run_on_executor(self.answer_async(**fields))

    async def answer_async(self, **fields: Json) -> ChatAnswer:
        """Returns the answer to a conversation once it is complete."""
        async with contextlib.aclosing(self.stream_async(False, **fields)) as events:
            async for event in events:
                if isinstance(event, ChatAnswer):
                    return event
        raise AssertionError("a stream ends with its answer")

    def stream(self, parts: bool = True, /, **fields: Json) -> Iterator[ChatEvent]:
        """Yields the pieces of an answer as they arrive, and finally the complete ChatAnswer. If
        `parts` is False, the text comes as one piece at the end. Closing the iterator aborts the
        request.
        """
        self.engine.core.gate.check_blocking_call("chat")
        events = self.stream_async(parts, **fields)
        try:
            while (event := _run_on_executor(anext(events, None))) is not None:
                yield event
        finally:
            _run_on_executor(events.aclose())

    async def stream_async(
        self, parts: bool = True, /, **fields: Json
    ) -> AsyncGenerator[ChatEvent, None]:
        """Yields the pieces of an answer as they arrive, and finally the complete ChatAnswer. If
        `parts` is False, the text comes as one piece at the end.
        """
        timeout = fields.get("timeout")
        check_limits(timeout, None)
        if "stream" in fields:
            raise ParameterError(
                "stream", "is not a field here.", hint="Call the method that streams."
            )
        if (model := fields.get("model", self.engine.model_name)) != self.engine.model_name:
            raise ParameterError(
                "model", f"{model!r:.60} is not the engine's, {self.engine.model_name!r}."
            )
        asked = {name: value for name, value in fields.items() if name != "timeout"}
        chat = self._render_fields({**asked, "stream": parts})
        request = replace(chat.engine_request(self.engine.context_length), timeout=timeout)
        sample = chat.new_sample_reader()
        text = ""
        async with contextlib.aclosing(
            _stream_request_events(self.engine, request, timeout)
        ) as events:
            async for event in events:
                new = sample.read_event(event)
                text += new.content
                if new:
                    yield new
                if isinstance(event, Generation):
                    yield self._to_answer(chat, sample, text, event)

    def _to_answer(
        self, chat: RenderedChat, sample: SampleReader, text: str, generation: Generation
    ) -> ChatAnswer:
        tokenizer = self.engine.tokenizer
        logprobs = (
            encode_openai_logprobs(tokenizer.token_bytes, reported_logprobs(generation))
            if chat.body.logprobs
            else None
        )
        reasoning = len(tokenizer.encode(sample.reasoning, first=False))
        finish = sample.openai_finish_reason(generation)
        return ChatAnswer(
            text, sample.reasoning, sample.calls, finish, generation.usage, reasoning, logprobs
        )

    def _render_fields(self, fields: dict[str, Json]) -> RenderedChat:
        unused: list[str] = []
        body = CHAT.parse_record(fields)
        for name in _OF_SERVERS:
            if getattr(body, name) is not None:
                raise ParameterError(
                    name, "is a field of the server's answers only.", hint="Leave it out."
                )
        for tool in body.tools or ():
            if isinstance(tool, FunctionTool) and tool.function.parameters is not None:
                tool.function.parameters = forbid_extra_members(tool.function.parameters)
        chat = render_chat(self._reader, body, unused)
        if chat.body.n not in (None, 1):
            raise ParameterError(
                "n", f"{chat.body.n} is not 1.", hint="Ask several times: equal prompts are shared."
            )
        if unused:
            warnings.warn(
                f"the model's chat template doesn't show {', '.join(unused)}.", stacklevel=4
            )
        return chat


# Fields that change the JSON of an answer, or name an adapter as a server does.
_OF_SERVERS = (
    "echo", "include_reasoning", "lora_path", "prompt_logprobs", "return_tokens_as_token_ids",
)  # fmt: skip


def _run_on_executor(asked: Awaitable[T]) -> T:
    """Runs an awaitable on the executor's event loop. Blocks until it is done and returns its
    result.
    """

    async def wait() -> T:
        return await asked

    running = asyncio.run_coroutine_threadsafe(wait(), executor().loop)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


async def _stream_request_events(
    engine: Engine, request: GenerateRequest, timeout: float | None
) -> AsyncGenerator[Delta | Generation, None]:
    """Submits a request once the engine has room, and yields its events. The timeout includes the
    wait for room.
    """
    deadline = None if timeout is None else time.monotonic() + timeout

    async def await_until_deadline(awaited: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(
                awaited, None if deadline is None else deadline - time.monotonic()
            )
        except TimeoutError:
            raise RequestTimeoutError(f"the answer took more than {timeout:g} seconds.") from None

    mailbox = running_mailbox()
    events = asyncio.Queue[Delta | Generation | SglError]()
    sink = partial(mailbox.enqueue, events.put_nowait)
    ticket = await await_until_deadline(
        engine.submit_when_room(partial(engine.core.submit, request, sink, mailbox.wake), 1)
    )
    try:
        while True:
            event = await await_until_deadline(events.get())
            if isinstance(event, SglError):
                raise event
            yield event
            if isinstance(event, Generation):
                return
    finally:
        ticket.abort()
