"""Core of an engine whose model is an encoder, which reads texts and generates none."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import BackendError, SglError
from sglang_lite.runtime.adapters.absent import raise_no_adapters, reject_adapter_name
from sglang_lite.runtime.adapters.engine_adapters import (
    EngineAdapters,
    make_encoder_adapters,
)
from sglang_lite.runtime.calls import (
    EngineCall,
    FlushCache,
    LoadLoraAdapter,
    Loras,
    Stats,
    UnloadLoraAdapter,
)
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.gate import CLOSED
from sglang_lite.runtime.core.reading_core import ReadingCore, ReadingLoop, fail_future
from sglang_lite.runtime.embedding.encoder import Encoder
from sglang_lite.runtime.embedding.load import LoadedEncoder
from sglang_lite.runtime.embedding.request import EncodeRequest
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.models.lora.adapter import Adapter
from sglang_lite.runtime.models.lora.cpu_step import CpuAdapters, CpuLoraStep

logger = logging.getLogger("sglang_lite")
Vectors: TypeAlias = NDArray[np.float32]


class _Open:
    """Request with texts that are not encoded yet."""

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
    space: PrefixSpace  # identifies its adapter, and the tokens that the adapter applies to


class EmbeddingLoop(ReadingLoop):
    """Loop that encodes texts.

    Args:
        encoder: model that encodes the texts.
        step_tokens: maximum number of tokens in a step; a longer text has its own step.
        adapters: adapters that texts can name; None if the engine has none.

    Attributes:
        requests, texts, tokens: counts so far.
    """

    def __init__(self, encoder: Encoder, step_tokens: int, adapters: EngineAdapters | None) -> None:
        super().__init__()
        self.requests = self.texts = self.tokens = 0
        self._encoder = encoder
        self._step_tokens = step_tokens
        self._adapters = adapters
        self._waiting: deque[_Text] = deque()

    def submit_texts(
        self, request: EncodeRequest, adapters: Sequence[Adapter | None], future: Future[Vectors]
    ) -> None:
        """Submits texts. Can be called on any thread.

        Args:
            request: the texts.
            adapters: adapter of each text, or None.
            future: gets float32 [N, width] once all texts are encoded; if it is cancelled, they are
                skipped.

        Raises:
            EngineClosedError: the loop has ended.
        """
        opened = _Open(request, self._encoder.spec.width, future)
        texts = [
            _Text(opened, index, ids, types, PrefixSpace(adapter=adapter).start_at_invocation(ids))
            for index, ((ids, types), adapter) in enumerate(zip(request.texts(), adapters))
        ]
        # Texts of similar length share a step.
        texts.sort(key=lambda text: len(text.ids))
        self.inbox.post(partial(self._queue_texts, texts))

    def _queue_texts(self, texts: list[_Text]) -> None:
        self.requests += 1
        self._waiting.extend(texts)

    def unload(self, adapters: Sequence[Adapter], done: Callable[[], object]) -> None:
        """Removes adapters from the device once no text uses them, then calls `done`. Only on the
        loop's thread.
        """
        assert self._adapters is not None, "who unloads has them"
        self._adapters.pool.remove_when_unused(adapters, done)
        self._free_unloaded_adapters()

    def _free_unloaded_adapters(self) -> None:
        if self._adapters is not None and self._adapters.pool.has_pending_removals:
            spaces = (text.space for text in self._waiting)
            self._adapters.pool.free_unused_slots(
                {each.adapter.generation for each in spaces if each.adapter is not None}
            )

    def _fail_all(self, error: SglError) -> None:
        for text in self._waiting:
            fail_future(text.of.future, error)
        if self._adapters is not None:
            self._adapters.pool.close()

    def _step(self) -> None:
        self._free_unloaded_adapters()
        texts = self._take_step_texts()
        if not texts:
            return
        try:
            with torch.inference_mode():
                vectors = (
                    self._encoder(
                        np.concatenate([text.ids for text in texts]),
                        np.concatenate([text.types for text in texts]),
                        [len(text.ids) for text in texts],
                        self._adapter_slots(texts),
                    )
                    .cpu()
                    .numpy()
                )
        except Exception as error:  # out of memory, for example: later steps may succeed
            logger.exception("a step of the encoder failed")
            for text in texts:
                fail_future(
                    text.of.future, BackendError(f"the model could not read the texts: {error}")
                )
            return
        except BaseException:  # a panic of a library, for example: `run` fails all waiting texts
            self._waiting.extendleft(texts)
            raise
        self.steps = self.steps + 1
        self.texts = self.texts + len(texts)
        self.tokens += sum(len(text.ids) for text in texts)
        for text, vector in zip(texts, vectors):
            text.of.vectors[text.index] = vector
            text.of.left -= 1
            if not text.of.left and text.of.future.set_running_or_notify_cancel():
                text.of.future.set_result(text.of.vectors)

    def _take_step_texts(self) -> list[_Text]:
        """Takes the texts of the next step from the queue, in order of arrival, and sorts them by
        length.
        """
        texts: list[_Text] = []
        in_use: set[int] = set()  # generations of their adapters
        tokens = 0
        while self._waiting and (
            not texts or tokens + len(self._waiting[0].ids) <= self._step_tokens
        ):
            text = self._waiting[0]
            if not text.of.future.done():
                if not self._assign_slot(text.space.adapter, in_use):
                    break
                texts.append(text)
                tokens += len(text.ids)
            self._waiting.popleft()
        return sorted(texts, key=lambda text: len(text.ids))

    def _assign_slot(self, adapter: Adapter | None, in_use: set[int]) -> bool:
        """Assigns a slot to an adapter without displacing adapters in use. Returns False if no slot
        is left in this step.
        """
        if adapter is None or self._adapters is None:
            return True
        found = self._adapters.pool.assign(adapter, in_use) is not None
        if found:
            in_use.add(adapter.generation)
        return found

    def _adapter_slots(self, texts: Sequence[_Text]) -> CpuLoraStep | None:
        """Returns the adapter slots of the texts' tokens, or None if the engine has no adapters."""
        if self._adapters is None:
            return None
        pool = self._adapters.pool
        memory = self._adapters.memory
        assert isinstance(memory, CpuAdapters), "decoders read texts on a CPU"
        of_tokens = []
        for text in texts:
            slot = None if text.space.adapter is None else pool.slot_of(text.space.adapter)
            of_tokens.append(np.full(len(text.ids), -1 if slot is None else slot, np.int32))
            of_tokens[-1][: text.space.start] = -1
        return memory.adapters_of_tokens(np.concatenate(of_tokens))


_STEP_TOKENS = {"cpu": 4096, "cuda": 65_536}


class EmbeddingCore(ReadingCore):
    """Core of an engine with an encoder. Must be made on the thread that runs its loop.

    Args:
        config: configuration of the engine.
        loaded: loaded model.

    Attributes: see `Core` in engine/core.py.
    """

    _reads_media = False

    def __init__(self, config: EngineConfig, loaded: LoadedEncoder) -> None:
        self.encoder = loaded.model.spec
        self.device = loaded.model.device
        self.tokenizer = loaded.tokenizer
        self.vocab_size = self.encoder.vocab_size
        tokens = config.step_tokens or _STEP_TOKENS[self.device.type]
        limit = self.encoder.limit
        self.adapters = make_encoder_adapters(config, loaded)
        self.loop = EmbeddingLoop(loaded.model, tokens, self.adapters)
        super().__init__(config, loaded.name, limit, tokens, self.loop.inbox)
        kind = str(loaded.model.dtype).removeprefix("torch.")
        self.description = (
            f"{loaded.name} on {self.device}, {kind}, reads texts of {limit:,} tokens"
        )
        self._calls = ThreadPoolExecutor(1, "sglang_lite-calls")  # for calls that wait for files

    @property
    def builder(self) -> NoReturn:
        """Raises CapabilityError, like `submit`, because the model generates no text."""
        self.submit()

    def _encode(self, request: EncodeRequest) -> Future[Vectors]:
        self.open_requests.acquire()
        found: Future[Vectors] = Future()
        found.add_done_callback(lambda _: self.open_requests.release())
        if self.adapters is None or all(
            map(self.adapters.is_adapter_in_memory, {*request.adapters, None})
        ):
            self._submit(request, found)
        else:
            self._calls.submit(self._submit, request, found)
        return found

    def _submit(self, request: EncodeRequest, found: Future[Vectors]) -> None:
        get = reject_adapter_name if self.adapters is None else self.adapters.adapter_for
        try:
            by_name = {name: get(name) for name in {*request.adapters, None}}
            names = request.adapters or (None,) * len(request.lengths)
            self.loop.submit_texts(request, [by_name[name] for name in names], found)
        except BaseException as error:
            fail_future(found, error)

    def _load_lora(self, call: LoadLoraAdapter) -> Future[None]:
        load = raise_no_adapters if self.adapters is None else self.adapters.load_adapter
        return self._calls.submit(load, call.name, call.path, pinned=call.pinned)

    def _unload_lora(self, call: UnloadLoraAdapter) -> Future[None]:
        if self.adapters is None:
            return self._calls.submit(raise_no_adapters)
        return self.adapters.unload(call.name, self.loop.unload, self.loop.inbox.post)

    def _flush_cache(self, _: FlushCache) -> Future[int]:
        return self.loop.inbox.post_for_result(int)  # an encoder has no cache

    def _stats(self, _: Stats) -> Future[dict[str, Any]]:
        loop = self.loop
        return loop.inbox.post_for_result(
            lambda: {
                "waiting": loop.waiting,
                "running": 0,
                "cached_tokens": 0,
                "free_tokens": 0,
                "total_tokens": 0,
                "steps": loop.steps,
                "requests_submitted": loop.requests,
                "texts": loop.texts,
                "tokens": loop.tokens,
                **({} if self.adapters is None else self.adapters.stats()),
            }
        )

    _answers: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., Future[Any]]]] = {
        EncodeRequest: _encode,
        FlushCache: _flush_cache,
        LoadLoraAdapter: _load_lora,
        UnloadLoraAdapter: _unload_lora,
        Loras: lambda self, _: self._calls.submit(
            lambda: [] if self.adapters is None else self.adapters.list()
        ),
        Stats: _stats,
    }

    def close(self) -> None:
        self.gate.reason = CLOSED
        if not self.gate.is_forked_copy:
            self._calls.shutdown(wait=False)
        super().close()
