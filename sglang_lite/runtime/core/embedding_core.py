"""Core of an engine whose model is an encoder: it reads texts and generates none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from sglang_lite.protocol import CapabilityError, OverloadedError
from sglang_lite.runtime.config import Capacity, EngineConfig, Sizes
from sglang_lite.runtime.core.embedding_loop import EmbeddingLoop, Vectors
from sglang_lite.runtime.embedding.load import LoadedEncoder
from sglang_lite.runtime.embedding.request import EncodeRequest, not_a_generator_error

E = TypeVar("E")
_STEP_TOKENS = {"cpu": 4096, "cuda": 65_536}


class EmbeddingCore:
    """Core of an engine with an encoder. Must be made on the thread that runs its loop.

    Args:
        config: configuration of the engine.
        loaded: loaded model.

    Attributes: see `Core` in engine/core.py.
    """

    eos_ids: frozenset[int] = frozenset()
    responds = True  # unlike a process that is stopped

    def __init__(self, config: EngineConfig, loaded: LoadedEncoder) -> None:
        self.thread = threading.current_thread()
        self.config, self.model_name, self.encoder = config, loaded.name, loaded.model.spec
        self.tokenizer, self.vocab_size = loaded.tokenizer, self.encoder.vocab_size
        self.device = loaded.model.device
        tokens = config.step_tokens or _STEP_TOKENS[self.device.type]
        limit = self.encoder.limit
        self.capacity = Capacity(Sizes(config.max_queued, tokens, 1), limit, 0, limit)
        kind = str(loaded.model.dtype).removeprefix("torch.")
        self.description = f"{loaded.name} on {self.device}, {kind}, reads texts of {limit:,} tokens"
        self.loop = EmbeddingLoop(loaded.model, tokens)
        self._lock = threading.Lock()
        self._requests = 0  # number that have not ended; guarded by the lock

    def encode(self, request: EncodeRequest) -> Future[Vectors]:
        """Encodes texts. The future's result is float32 [N, width].

        Raises:
            OverloadedError: too many requests are waiting.
            EngineClosedError: the engine is closed.
        """
        self.check_open()
        with self._lock:
            if self._requests >= self.config.max_queued:
                raise OverloadedError(f"{self._requests:,} requests wait.", hint="Try again later.")
            self._requests += 1
        try:
            found = self.loop.submit(request)
        except BaseException:
            self._ended()
            raise
        found.add_done_callback(self._ended)
        return found

    def _ended(self, _: object = None) -> None:
        with self._lock:
            self._requests -= 1

    def with_flush(self, sink: Callable[[E], object], flush: Callable[[], object] | None) -> Callable[[E], None]:
        """Sink that calls `flush` after each event."""

        def send(event: E) -> None:
            sink(event)
            if flush is not None:
                flush()

        return send

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise not_a_generator_error(self.model_name)

    submit = submit_select = open_program = run_program = compile_grammar = validated_prompt_ids = _refuse
    wait_for_room = cancel_wait = submit_when_room = abort = _refuse

    def _refuse_here(self, *_: object, **__: object) -> NoReturn:
        raise CapabilityError("an engine of an embedding model can't do that.", hint="Start another engine.")

    update_weights = start_profile = stop_profile = _refuse_here

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedules a call on the loop's thread; drops it if the loop has ended. Takes no lock."""
        self.loop.inbox.post_lock_free(call)

    def check_open(self) -> None:
        """Raises EngineClosedError if the engine is closed, or belongs to another process (after a fork)."""
        self.loop.inbox.check_open()

    def check_wait(self, name: str) -> None:
        """Raises BackendError if `name` is called on the loop's own thread, which it would wait for; EngineClosedError
        as `check_open`."""
        self.loop.inbox.check_wait(name)

    def flush_cache(self) -> int:
        """Number of freed tokens: always 0, as an encoder has no cache."""
        self.check_open()
        return 0

    def stats(self) -> dict[str, Any]:  # counts are int, seconds float
        """Counters, read between two steps; see `Engine.stats`."""
        self.check_wait("stats")
        return self.loop.inbox.call(self._count)

    def _count(self) -> dict[str, Any]:
        loop = self.loop
        return {
            "waiting": loop.waiting, "running": 0, "cached_tokens": 0, "free_tokens": 0, "total_tokens": 0,
            "steps": loop.steps, "requests_submitted": loop.requests, "texts": loop.texts, "tokens": loop.tokens,
        }  # fmt: skip

    def close(self) -> None:
        """Ends the loop. In a forked copy it ends nothing, as the loop runs in the other process."""
        self.loop.inbox.shut()
        if self.loop.inbox.is_copy:
            return
        self.loop.inbox.close()
        if threading.current_thread() is not self.thread:
            self.thread.join()
