"""Core of an engine whose model is an encoder: it reads texts and generates none."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import BackendError, CapabilityError, ParameterError, SglError
from sglang_lite.runtime.calls import CompileGrammar, EngineCall, FlushCache, R, Stats
from sglang_lite.runtime.capacity import Capacity, Sizes
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.gate import CLOSED
from sglang_lite.runtime.core.inbox import Inbox
from sglang_lite.runtime.core.open_requests import OpenRequests
from sglang_lite.runtime.core.step_turns import run_turns
from sglang_lite.runtime.embedding.encoder import Encoder
from sglang_lite.runtime.embedding.load import LoadedEncoder
from sglang_lite.runtime.embedding.request import EncodeRequest, not_a_generator_error

logger = logging.getLogger("sglang_lite")
Vectors: TypeAlias = NDArray[np.float32]


class _Open:
    """A request with texts that are not encoded yet."""

    def __init__(self, request: EncodeRequest, width: int, future: Future[Vectors]) -> None:
        self.future = future
        self.vectors = np.empty((len(request.lengths), width), np.float32)
        self.left = len(request.lengths)


@dataclass(frozen=True, slots=True)
class _Text:
    of: _Open
    index: int
    ids: NDArray[np.int32]
    types: NDArray[np.int32]


class EmbeddingLoop:
    """Loop that encodes texts.

    Args:
        encoder: model that encodes the texts.
        step_tokens: maximum number of tokens in a step; a longer text has a step of its own.

    Attributes:
        stepping_since: start of the running step on the monotonic clock, or None.
        steps, requests, texts, tokens: counts so far.
    """

    def __init__(self, encoder: Encoder, step_tokens: int) -> None:
        self.inbox = Inbox()
        self.stepping_since: float | None = None
        self.steps = self.requests = self.texts = self.tokens = 0
        self._encoder, self._step_tokens = encoder, step_tokens
        self._waiting: deque[_Text] = deque()

    def submit(self, request: EncodeRequest) -> Future[Vectors]:
        """Submits texts. The future's result is float32 [N, width], set once all texts are encoded; texts of a
        cancelled future are skipped. May be called on any thread.

        Raises:
            EngineClosedError: the loop has ended.
        """
        future: Future[Vectors] = Future()
        opened = _Open(request, self._encoder.spec.width, future)
        texts = [_Text(opened, index, *each) for index, each in enumerate(request.texts())]
        # Texts of similar length share a step.
        texts.sort(key=lambda text: len(text.ids))
        self.inbox.post(partial(self._receive, texts))
        return future

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _receive(self, texts: list[_Text]) -> None:
        self.requests += 1
        self._waiting.extend(texts)

    def run(self) -> None:
        """Runs the loop until its inbox is closed. Must be called once, on the thread that the encoder was loaded
        on."""

        def fail(error: SglError) -> None:
            for text in self._waiting:
                _fail(text.of.future, error)

        run_turns(self.inbox, lambda: not self._waiting, self._step, fail)

    def _step(self) -> None:
        texts = self._planned()
        if not texts:
            return
        self.stepping_since = time.monotonic()
        try:
            with torch.inference_mode():
                vectors = self._encoder(
                    np.concatenate([text.ids for text in texts]), np.concatenate([text.types for text in texts]),
                    [len(text.ids) for text in texts],
                ).cpu().numpy()  # fmt: skip
        except Exception as error:  # out of memory, for example: later steps may succeed
            logger.exception("a step of the encoder failed")
            for text in texts:
                _fail(text.of.future, BackendError(f"the model could not read the texts: {error}"))
            return
        except BaseException:  # a panic of a library, for example: `run` fails all waiting texts
            self._waiting.extendleft(texts)
            raise
        finally:
            self.stepping_since = None
        self.steps, self.texts = self.steps + 1, self.texts + len(texts)
        self.tokens += sum(len(text.ids) for text in texts)
        for text, vector in zip(texts, vectors):
            text.of.vectors[text.index] = vector
            text.of.left -= 1
            if not text.of.left and text.of.future.set_running_or_notify_cancel():
                text.of.future.set_result(text.of.vectors)

    def _planned(self) -> list[_Text]:
        """Takes the texts of the next step from the queue, in order of arrival, and sorts them by length."""
        texts: list[_Text] = []
        tokens = 0
        while self._waiting and (not texts or tokens + len(self._waiting[0].ids) <= self._step_tokens):
            text = self._waiting.popleft()
            if not text.of.future.cancelled() and not text.of.future.done():
                texts.append(text)
                tokens += len(text.ids)
        return sorted(texts, key=lambda text: len(text.ids))


def _fail(future: Future[Vectors], error: SglError) -> None:
    with contextlib.suppress(InvalidStateError):  # another text of the request has failed, or the future was cancelled
        future.set_exception(error)


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
    generates = False

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
