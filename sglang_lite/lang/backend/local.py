"""Backend for an engine in this process. This is the only file of the language that imports the
runtime, and it does so only when used.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.backend.base import (
    ALL_CONSTRAINTS,
    Backend,
    KeepsPrefixes,
    ProgramAtBackend,
    asked_adapter,
)
from sglang_lite.lang.backend.capabilities import Capabilities
from sglang_lite.lang.backend.rendering import with_tools
from sglang_lite.lang.backend.token_counts import TokenUsage
from sglang_lite.lang.chat_template import get_chat_template_by_model_path
from sglang_lite.lang.concurrency.loop import (
    current_deadline,
    executor,
    running_mailbox,
    winds_down_at,
)
from sglang_lite.protocol import (
    Constraint,
    Delta,
    Generation,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    TemplateError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.text.chat_template import JinjaTemplate, TurnTemplate
from sglang_lite.text.tool_formats import detect_tool_family

if TYPE_CHECKING:
    from sglang_lite.engine.engine import Engine


class LocalBackend(Backend):
    """Backend that runs programs on an engine.

    Args:
        engine: engine to run on.

    Attributes:
        token_usage: tokens used so far, as `prompt_tokens` and `completion_tokens`; `reset()` sets
            them to 0.
    """

    capabilities = Capabilities(
        ALL_CONSTRAINTS,
        fetches_images=False,
        priority=True,
        adapters=True,
        sizes_answers=True,
        winds_down=True,
    )
    enforces = True
    template_cure = 'start the engine with one: sgl.Engine(…, chat_template="template.jinja").'

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.token_usage = TokenUsage()
        kinds = engine.media_kinds
        self.capabilities = replace(
            self.capabilities,
            images="image" in kinds,
            videos="video" in kinds,
            sounds="audio" in kinds,
        )

    @property
    def endpoint(self) -> LocalBackend:
        """The backend itself. SGLang's `Runtime` has an attribute of this name, which some code
        reads.
        """
        return self

    def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        if prompt.tools is not None:
            prompt = with_tools(
                prompt, self.get_chat_template(), self.engine.tokenizer.control_texts
            )
        deadline = current_deadline.get()
        now = time.monotonic()
        late = winds_down_at.get()
        submit = partial(
            self.engine.submit,
            prompt,
            params,
            constraint,
            stream=stream,
            timeout=None if deadline is None else deadline - now,
            winds_down=late is not None and late <= now,
        )
        return self._iterate_events(submit, params.samples)

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        adapter = asked_adapter.get()
        submit = partial(
            self.engine.submit_select,
            prompt,
            choices,
            unconditional=unconditional,
            lora_path=adapter,
        )
        selection: Selection
        (selection,) = [event async for event in self._iterate_events(submit, 1)]
        return selection

    async def _iterate_events(
        self, submit: Callable[..., Any], count: int
    ) -> AsyncGenerator[Any, None]:
        """Yields the events of a request until all of its `count` answers have arrived."""
        events: asyncio.Queue[Delta | Generation | Selection | SglError] = asyncio.Queue()
        mailbox = running_mailbox()
        heard = partial(
            submit, sink=partial(mailbox.enqueue, events.put_nowait), flush=mailbox.wake
        )
        ticket = await self.engine.submit_when_room(heard, count)
        timer = schedule_wind_down(ticket.wind_down)
        try:
            while count:
                event = await events.get()
                if isinstance(event, SglError):
                    raise event
                if not isinstance(event, Delta):
                    count -= 1
                    self.token_usage.add_usage(event.usage)
                yield event
        finally:
            if timer is not None:
                timer.cancel()
            if count:  # the consumer has stopped listening
                ticket.abort()

    def open_program(
        self, sink: ProgramSink, *, stream: bool, priority: int = 0
    ) -> ProgramAtBackend:
        sink = partial(self.token_usage.count_and_forward, sink)
        flush = None
        if self.engine.config.in_process:  # the thread that calls the sinks is busy computing
            sink = partial(executor().enqueue, sink)
            flush = executor().wake
        return self.engine.open_program(sink=sink, flush=flush, stream=stream, priority=priority)

    @property
    def prefix_files(self) -> KeepsPrefixes:
        return self.engine

    def get_model_name(self) -> str:
        return self.engine.model_name

    def identity(self) -> tuple[Json, ...]:
        config = self.engine.config
        model = (str(config.model), config.revision, config.load_format, config.quantization)
        return (
            *super().identity(),
            *model,
            config.device,
            config.dtype,
            config.kv_dtype,
            config.seed,
        )

    def get_chat_template(self) -> TurnTemplate | None:
        if self.chat_template is None:
            self.chat_template = self.engine.chat_template()
        if self.chat_template is None:
            with contextlib.suppress(TemplateError):
                self.chat_template = get_chat_template_by_model_path(self.engine.model_name)
        return self.chat_template

    @property
    def token_text(self) -> Callable[[int], str]:
        decode = self.engine.tokenizer.decode
        return lambda token: str(decode((token,), skip_special=False))

    @property
    def count_tokens(self) -> Callable[[str], int]:
        encode = self.engine.tokenizer.encode
        return lambda text: len(encode(text, first=False))

    @property
    def control_texts(self) -> Sequence[str]:
        found: list[str] = self.engine.tokenizer.control_texts
        return found

    @property
    def tokenizer_digest(self) -> str:
        return self.engine.tokenizer.digest

    def tool_family(self) -> str | None:
        template = self.get_chat_template()
        return detect_tool_family(template.source) if isinstance(template, JinjaTemplate) else None

    def flush_cache(self) -> bool:
        self.engine.flush_cache()
        return True

    def get_server_info(self) -> dict[str, Json]:
        return {"model": self.engine.model_name, **self.engine.stats()}

    def shutdown(self) -> None:
        self.engine.close()


def schedule_wind_down(wind_down: Callable[[], None]) -> asyncio.TimerHandle | None:
    """Schedules `wind_down` for the time at which the current run starts to wind down. If that time
    has passed, calls it immediately. Returns the timer, or None if there is none.
    """
    at = winds_down_at.get()
    if at is None:
        return None
    remaining = at - time.monotonic()
    if remaining <= 0:
        wind_down()
        return None
    return asyncio.get_running_loop().call_later(remaining, wind_down)


def default_identity() -> tuple[Json, ...]:
    """Returns the identity of the backend for the default engine. Reads it from the model's files
    and starts no engine.
    """
    from sglang_lite import Engine

    return LocalBackend(Engine.from_default_model_files()).identity()


def default_engine() -> LocalBackend:
    """Starts an engine with the default model and returns a backend for it."""
    from sglang_lite import Engine

    return LocalBackend(Engine())
