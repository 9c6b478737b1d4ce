"""Core of an engine whose model is an encoder: it reads texts and generates none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, NoReturn

from sglang_lite.protocol import CapabilityError, ParameterError
from sglang_lite.runtime.calls import CompileGrammar, EngineCall, FlushCache, R, Stats
from sglang_lite.runtime.config import Capacity, EngineConfig, Sizes
from sglang_lite.runtime.core.embedding_loop import EmbeddingLoop, Vectors
from sglang_lite.runtime.core.gate import CLOSED
from sglang_lite.runtime.core.open_requests import OpenRequests
from sglang_lite.runtime.embedding.load import LoadedEncoder
from sglang_lite.runtime.embedding.request import EncodeRequest, not_a_generator_error

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
        if config.enable_lora:
            raise ParameterError(
                "enable_lora", f"{loaded.name} generates no text, and only models that do take adapters.",
                hint="Merge the adapter into the weights with peft's merge_and_unload().",
            )  # fmt: skip
        self.thread = threading.current_thread()
        self.config, self.model_name, self.encoder = config, loaded.name, loaded.model.spec
        self.tokenizer, self.vocab_size = loaded.tokenizer, self.encoder.vocab_size
        self.device = loaded.model.device
        tokens = config.step_tokens or _STEP_TOKENS[self.device.type]
        limit = self.encoder.limit
        self.capacity = Capacity(Sizes(config.max_queued, tokens, 1), limit, 0, limit)
        kind = str(loaded.model.dtype).removeprefix("torch.")
        self.description = f"{loaded.name} on {self.device}, {kind}, reads texts of {limit:,} tokens"
        self.open_requests = OpenRequests(config.max_queued)
        self.loop = EmbeddingLoop(loaded.model, tokens)
        self.gate, self.call_soon = self.loop.inbox.gate, self.loop.inbox.post_lock_free

    @property
    def builder(self) -> NoReturn:
        """Raises CapabilityError, as the model generates no text; so do `submit` and `open_program`."""
        raise not_a_generator_error(self.model_name)

    def submit(self, *_: object) -> NoReturn:
        raise not_a_generator_error(self.model_name)

    open_program = submit

    def ask(self, call: EngineCall[R]) -> Future[R]:
        """Future of the answer to a call.

        Raises:
            OverloadedError: too many requests are waiting.
            EngineClosedError: the engine is closed.
            CapabilityError: the call is for a model that generates text.
        """
        self.gate.check_open()
        if type(call) is CompileGrammar:
            raise not_a_generator_error(self.model_name)
        if type(call) not in self._answers:
            raise CapabilityError("an engine of an embedding model can't do that.", hint="Start another engine.")
        return self._answers[type(call)](self, call)

    def _encode(self, request: EncodeRequest) -> Future[Vectors]:
        self.open_requests.acquire()
        try:
            found = self.loop.submit(request)
        except BaseException:
            self.open_requests.release()
            raise
        found.add_done_callback(lambda _: self.open_requests.release())
        return found

    def _flush_cache(self, _: FlushCache) -> Future[int]:
        return self.loop.inbox.ask(int)  # an encoder has no cache

    def _stats(self, _: Stats) -> Future[dict[str, Any]]:
        loop = self.loop
        return loop.inbox.ask(lambda: {
            "waiting": loop.waiting, "running": 0, "cached_tokens": 0, "free_tokens": 0, "total_tokens": 0,
            "steps": loop.steps, "requests_submitted": loop.requests, "texts": loop.texts, "tokens": loop.tokens,
        })  # fmt: skip

    _answers: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., Future[Any]]]] = {
        EncodeRequest: _encode,
        FlushCache: _flush_cache,
        Stats: _stats,
    }

    def close(self) -> None:
        """Ends the loop. In a forked copy it ends nothing, as the loop runs in the other process."""
        self.gate.reason = CLOSED
        if self.gate.is_copy:
            return
        self.loop.inbox.close()
        if threading.current_thread() is not self.thread:
            self.thread.join()
