"""SGLang's interface for backends: blocking hooks (`generate`, `generate_stream`, `select`) and
hooks that are notified of a program's events. A backend that overrides one runs programs through
`HookBackend`, which calls it on a bounded pool of threads.
"""

from __future__ import annotations

import asyncio
from abc import ABCMeta
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from sglang_lite.compat.sglang.stream_executor import StreamExecutor
from sglang_lite.lang.backend.base import (
    EVENTS,
    Backend,
    DelegatingBackend,
    Listener,
    ProgramAtBackend,
    unsupported_feature_error,
)
from sglang_lite.lang.backend.capabilities import Capabilities, Demands
from sglang_lite.lang.backend.planning import Planner, RunFacts
from sglang_lite.lang.concurrency.loop import running_mailbox
from sglang_lite.lang.concurrency.pool import ThreadPool, run_in_pool
from sglang_lite.lang.execution.operations import SelectOp, asked
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.push_down import priority_keywords
from sglang_lite.lang.expressions import SglSamplingParams, SglSelect
from sglang_lite.lang.results import DeltaWithMeta
from sglang_lite.program.choosing import ChoicesDecision, ChoicesSamplingMethod, check_decision
from sglang_lite.protocol import (
    CapabilityError,
    Constraint,
    Delta,
    Generation,
    Location,
    ProgramError,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    Usage,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.sampling import given_values, parameters_for
from sglang_lite.text.chat_template import TurnTemplate

_GENERATE = ("generate", "generate_stream")
_KNOWN_TO_HOOKS = parameters_for("hooks").keys()


class BaseBackend(Backend, metaclass=ABCMeta):
    """Base class of users' backends, as in SGLang. A subclass defines SGLang's blocking hooks or
    the coroutines of Backend (`agenerate`, `aselect`). If both are defined, the definitions in the
    more derived class are used. `isinstance` is True for every backend.

    Attributes:
        support_concate_and_append: SGLang's flag for joining KV caches. Has no effect: texts are
            joined in any case.
        max_threads: maximum number of threads that run hooks.
    """

    support_concate_and_append = False
    max_threads = 64

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return True if cls is BaseBackend and issubclass(kind, Backend) else NotImplemented

    def get_chat_template(self) -> TurnTemplate | None:
        if self.chat_template is None and not hooks_of(self).isdisjoint(("generate", "select")):
            from sglang_lite.lang.chat_template import get_chat_template

            return get_chat_template("default")  # the default of SGLang's BaseBackend
        return self.chat_template

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[Json, Json]:
        """Generates the continuation of `s.text_`. Returns its text (a list if n > 1) and metadata."""
        raise CapabilityError(f"{type(self).__name__} has no generate.")

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Json]]]:
        """Yields the continuation of `s.text_` in pieces, with metadata. The default yields a
        single piece.
        """
        text, meta = self.generate(s, sampling_params)
        yield text, meta

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        """Decides which choice continues `s.text_`."""
        raise CapabilityError(f"{type(self).__name__} has no select.")

    def cache_prefix(self, prefix_str: str) -> None:
        """Receives the hint that many prompts will start with this text."""

    def uncache_prefix(self, rid: str) -> None:
        """Receives the hint that a prefix need not be cached any longer."""

    def end_request(self, rid: str | list[str]) -> None:
        """Reacts to the end of a request."""

    def begin_program(self, s: StreamExecutor) -> None:
        """Reacts to the start of a program."""

    def end_program(self, s: StreamExecutor | list[StreamExecutor]) -> None:
        """Reacts to the end of a program."""

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Receives the hint, before a fork, that several continuations of `s.text_` will follow."""

    def fork_program(
        self, src: StreamExecutor, dst: list[StreamExecutor], position_ids_offset: object = None
    ) -> None:
        """Reacts to the fork of a state."""

    def fill_image(self, s: StreamExecutor) -> None:
        """Reacts to an added image."""

    def concatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        """Joins KV caches. Never called, because texts are joined instead."""


def hooks_of(backend: Backend) -> frozenset[str]:
    """Returns the names of the SGLang hooks that a backend's class defines. Omits `generate` or
    `select` if the same class or a more derived one overrides the corresponding `Backend` method,
    such as `agenerate`.
    """
    kind: Any = type(backend)  # mypy takes no type for hashable
    return _hooks_of(kind)


@lru_cache(maxsize=1024)
def _hooks_of(kind: type) -> frozenset[str]:
    found = {hook for hook in EVENTS if _override_depth(kind, hook)}
    if _override_depth(kind, *_GENERATE) > _override_depth(
        kind, "agenerate", "answer_now", "open_program"
    ):
        found.add("generate")
    if _override_depth(kind, "select") > _override_depth(
        kind, "aselect", "select_now", "open_program"
    ):
        found.add("select")
    return frozenset(found)


def _override_depth(kind: type, *methods: str) -> int:
    """Finds the most derived class that defines one of the methods, and returns its distance from
    the end of the method resolution order. Returns 0 if only the interfaces define them.
    """
    line = kind.__mro__
    ours = (Backend, BaseBackend)
    defining = (
        i
        for i, each in enumerate(line)
        if each not in ours and not vars(each).keys().isdisjoint(methods)
    )
    return len(line) - next(defining, len(line))


def adapt_hooks(backend: Backend) -> Backend:
    """Returns the backend that programs run on: the backend itself, or an adapter if it has
    SGLang's hooks.
    """
    return HookBackend(backend) if hooks_of(backend) else backend


def _pool_of(backend: Backend) -> ThreadPool:
    """Returns the thread pool for a backend's hooks. It is created on first use and shared by all
    runs.
    """
    if backend.answer_pool is None:
        size = getattr(backend, "max_threads", BaseBackend.max_threads)
        # the first thread wins
        vars(backend).setdefault("answer_pool", ThreadPool(size, "sglang_lite-hooks"))
    assert backend.answer_pool is not None
    return backend.answer_pool


@lru_cache(maxsize=64)
def _not_reading(capabilities: Capabilities) -> Capabilities:
    return replace(capabilities, reads_prompts=False)


class HookBackend(DelegatingBackend, Listener):
    """Wraps a backend that has SGLang's hooks: calls the hooks for answers, and for events such as
    a fork. Where a hook is missing, the backend's own methods do the work.

    Args:
        backend: backend with hooks.

    Attributes:
        hooked: that backend.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        hooks = hooks_of(backend)
        self.hooked = backend
        self._generates = "generate" in hooks
        self._selects = "select" in hooks
        self.events = hooks & {*EVENTS}
        self.event_listener = self if self.events else None
        self.on_run = backend.on_run
        self.answer_pool = self.threads = _pool_of(backend)
        if self._generates or self._selects:
            self.answers_now = True
            self.plays_programs = False
            self.capabilities = _not_reading(backend.capabilities)
        else:
            self.answers_now = backend.answers_now
            self.plays_programs = backend.plays_programs

    def notify_event(self, event: str, branch: Player, children: Sequence[Player]) -> None:
        more = (
            ([StreamExecutor(child) for child in children], None) if event == "fork_program" else ()
        )
        getattr(self.backend, event)(StreamExecutor(branch), *more)

    def planner(self, run: RunFacts) -> Planner | None:
        return self.backend.planner(run)

    def check(self, node: object, demands: Demands, where: Location | None) -> None:
        if demands.kind == "select":
            if self._selects and isinstance(node, SglSelect) and node.multi:
                raise unsupported_feature_error(
                    self,
                    node,
                    "select(multi=True)",
                    "It picks without scores: select one by one.",
                    where,
                )
        elif self._generates:
            for name in given_values(demands.params):
                if name not in _KNOWN_TO_HOOKS:
                    raise unsupported_feature_error(
                        self, node, name, "SGLang's blocking hooks have no such parameter.", where
                    )
        self.backend.check(node, demands, where)

    # -------------------------------------------------------------------------------------- answers

    def answer_now(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Sequence[Generation] | None:
        if not self._generates:
            return self.backend.answer_now(prompt, params, constraint)
        generate = self.backend.generate  # type: ignore[attr-defined] # a hook
        text, meta = generate(_current_branch(), SglSamplingParams.from_params(params, constraint))
        texts = text if isinstance(text, list) else [text]
        metas = meta if isinstance(meta, list) else [meta] * len(texts)
        return [_generation(t, m, i) for i, (t, m) in enumerate(zip(texts, metas))]

    def select_now(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection | None:
        if not self._selects:
            return self.backend.select_now(prompt, choices, unconditional=unconditional)
        _, op = asked.get()
        assert isinstance(op, SelectOp)
        select, texts = self.backend.select, list(choices)  # type: ignore[attr-defined] # a hook
        decision = check_decision(
            select(_current_branch(), texts, op.node.temperature, op.expression.choices_method),
            choices,
        )
        return Selection((), picked=decision.decision, meta=decision.meta_info or {})

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        if not self._generates:
            async for event in self.backend.agenerate(prompt, params, constraint, stream=stream):
                yield event
        elif stream and params.samples == 1:
            async for event in self._stream_from_hook(
                _current_branch(), SglSamplingParams.from_params(params, constraint)
            ):
                yield event
        else:
            for sample in await run_in_pool(
                self.threads, partial(self.answer_now, prompt, params, constraint)
            ):
                yield sample

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        select = partial(self.select_now, prompt, choices, unconditional=unconditional)
        if not self._selects:
            return await self.backend.aselect(prompt, choices, unconditional=unconditional)
        selection: Selection = await run_in_pool(self.threads, select)
        return selection

    async def _stream_from_hook(
        self, s: StreamExecutor, params: SglSamplingParams
    ) -> AsyncIterator[Delta | Generation]:
        """Yields the pieces of the hook `generate_stream`, then the whole text with the last
        piece's metadata.
        """
        pieces: asyncio.Queue[Delta | None] = asyncio.Queue()
        post = running_mailbox().post

        def generate() -> Generation:
            texts = list[str]()
            meta = None
            for text, meta in self.backend.generate_stream(s, params):  # type: ignore[attr-defined] # a hook
                texts.append(text)
                post(pieces.put_nowait, DeltaWithMeta(text, meta=meta or {}))
            return _generation("".join(texts), meta, 0)

        running = asyncio.ensure_future(run_in_pool(self.threads, generate))
        running.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            yield await running
        finally:
            running.cancel()  # the hook itself keeps running

    def open_program(
        self, sink: ProgramSink, *, stream: bool, priority: int = 0
    ) -> ProgramAtBackend:
        return self.backend.open_program(sink, stream=stream, **priority_keywords(priority))


def _current_branch() -> StreamExecutor:
    """Returns the branch that the current hook call answers for."""
    player, _ = asked.get()
    assert isinstance(player, Player)
    return StreamExecutor(player)


def _generation(text: Any, meta: dict[str, Any] | None, index: int) -> Generation:
    if not isinstance(text, str):
        raise ProgramError(f"the backend returned {text!r:.60}, which is not a string.")
    meta = dict(meta or {})
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    usage = Usage(
        prompt_tokens=meta.get("prompt_tokens") or 0,
        cached_tokens=meta.get("cached_tokens") or 0,
        completion_tokens=meta.get("completion_tokens") or 0,
    )
    return Generation(
        text,
        finish_reason="length" if kind == "length" else "stop",
        usage=usage,
        index=index,
        meta=meta,
    )
