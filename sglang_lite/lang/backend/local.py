"""The engine in this process as a backend. The only file of the language that knows the runtime, and only when used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.loop import Mailbox
from sglang_lite.protocol import (
    Constraint,
    Delta,
    Generation,
    Prompt,
    SamplingParams,
    Selection,
    SglError,
    Unset,
)
from sglang_lite.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from sglang_lite.runtime.engine import Engine


class LocalBackend(BaseBackend):
    """
    Args:
        engine: the engine to run on.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        events: asyncio.Queue[tuple[int, Delta | Generation | SglError]] = asyncio.Queue()
        mailbox = Mailbox(asyncio.get_running_loop())

        def deliver(index: int, event: Delta | Generation | SglError) -> None:
            mailbox.post(events.put_nowait, (index, event))

        count = 1 if isinstance(params.n, Unset) else params.n
        tickets = []
        try:
            for index in range(count):
                sample = params if not index or isinstance(params.seed, Unset) else _reseeded(params, index)
                sink = partial(deliver, index)
                tickets.append(self.engine.submit(prompt, sample, constraint, sink=sink, stream=stream))
            while count:
                index, event = await events.get()
                if isinstance(event, SglError):
                    raise event
                if isinstance(event, Generation):
                    count -= 1
                yield replace(event, index=index) if index else event
        finally:
            if count:  # nobody is listening any more
                for ticket in tickets:
                    ticket.abort()

    async def aselect(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection:
        mailbox = Mailbox(asyncio.get_running_loop())
        future: asyncio.Future[Selection | SglError] = mailbox.loop.create_future()

        def settle(outcome: Selection | SglError) -> None:
            if not future.done():
                future.set_result(outcome)

        self.engine.submit_select(prompt, choices, sink=partial(mailbox.post, settle), unconditional=unconditional)
        outcome = await future
        if isinstance(outcome, SglError):
            raise outcome
        return outcome

    def get_model_name(self) -> str:
        return self.engine.model_name

    def get_chat_template(self) -> ChatTemplate | None:
        if self.chat_template is None:
            self.chat_template = self.engine.chat_template()
        return self.chat_template

    def flush_cache(self) -> bool:
        self.engine.flush_cache()
        return True

    def get_server_info(self) -> dict[str, Any]:
        return {"model": self.engine.model_name, **self.engine.stats()}

    def shutdown(self) -> None:
        self.engine.close()


def default_engine() -> LocalBackend:
    """An engine with the default model."""
    from sglang_lite.runtime.engine import Engine

    return LocalBackend(Engine())


def _reseeded(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of a further sample: another seed, made from the first one's."""
    assert isinstance(params.seed, int)
    return replace(params, seed=(params.seed + index * 0x9E3779B97F4A7C15) % 2**64)
