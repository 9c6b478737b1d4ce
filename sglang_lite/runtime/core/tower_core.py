"""Core of an engine with `encoder_only`: the encoder of a model's images, videos and sounds,
without its decoder.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from sglang_lite.protocol import (
    BackendError,
    EngineClosedError,
    Media,
    ParameterError,
    SglError,
)
from sglang_lite.runtime.calls import EncodeMedia, EngineCall, FlushCache, Stats
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.encoder_step import (
    NUMBERS_TOGETHER,
    encode,
    input_shapes,
    select_batch,
)
from sglang_lite.runtime.core.gate import CLOSED
from sglang_lite.runtime.core.reading_core import ReadingCore, ReadingLoop, fail_future
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.loading.load_model import LoadedTower
from sglang_lite.runtime.media.prepare import Pixels
from sglang_lite.runtime.tokens.image_span import MediaItem

_THREADS = 16  # maximum number of media decoded concurrently
_MAX_DECODED = 1 << 29  # bytes of waiting decoded media above which decoding pauses
# maximum bytes of features in one answer, so that it fits into a message of the engine's process
_MAX_BYTES = 240 << 20


@dataclass(eq=False, slots=True)
class _Asked:
    """Call with media that are not encoded yet."""

    answer: Future[bytes]
    left: int
    found: dict[str, torch.Tensor] = field(default_factory=dict)  # features by hash


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    of: _Asked
    item: MediaItem
    pixels: Pixels
    size: int  # bytes of the pixels


class TowerLoop(ReadingLoop):
    """Encodes media, and keeps their features by hash. Media of equal size are encoded together.

    Args:
        loaded: encoder, and its preparer.
        most_bytes: maximum size of the kept features; the least recently used are dropped first.

    Attributes:
        runs: number of encoded media.
    """

    def __init__(self, loaded: LoadedTower, most_bytes: int) -> None:
        super().__init__()
        self.runs = 0
        self._loaded = loaded
        self._most_bytes = most_bytes
        self._together = NUMBERS_TOGETHER if loaded.device.type == "cuda" else 0
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, _THREADS), "sglang_lite-images")
        self._asked: set[_Asked] = set()  # calls that are not answered yet
        self._waiting: list[_Waiting] = []
        self._room = threading.Condition()  # guards the two below
        # waiting bytes, including media on their way to the loop
        self._decoded = 0
        self._ended = False
        # features by hash, in the host's memory
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def submit_media(self, media: Sequence[Media]) -> Future[bytes]:
        """Returns a future of the answer to `EncodeMedia`. Can be called on any thread.

        Raises:
            ParameterError: there are no media.
        """
        if not media:
            raise ParameterError("media", "are none.", hint="Give an image, a video or a sound.")
        asked = _Asked(Future(), len(media))
        self._asked.add(asked)
        asked.answer.add_done_callback(lambda _: self._asked.discard(asked))
        for each in media:
            try:
                self._pool.submit(self._decode_medium, asked, each)
            except RuntimeError:  # the executor has been shut down
                fail_future(asked.answer, EngineClosedError(CLOSED))
        return asked.answer

    @property
    def kept(self) -> int:
        return len(self._kept)

    def drop_kept_features(self) -> None:
        """Drops all kept features. Called on the loop's thread."""
        self._kept.clear()

    def _fail_all(self, error: SglError) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._room:
            self._ended = True
            self._room.notify_all()
        for each in list(self._asked):
            fail_future(each.answer, error)

    def _decode_medium(self, asked: _Asked, medium: Media) -> None:
        """Decodes a medium on a thread of the pool. Does not decode it if its features are kept."""
        with self._room:
            self._room.wait_for(lambda: self._decoded < _MAX_DECODED or self._ended)
        if asked.answer.done():  # another medium has failed, or nobody waits
            return
        try:
            item = self._loaded.media.media_item(medium)
            if self.inbox.call_and_wait(partial(self._add_kept_features, asked, item)):
                return
            pixels = self._loaded.preparer.prepare(item)
            size = sum(each.nbytes for each in pixels.values())
            with self._room:
                self._decoded += size
            self.inbox.post(partial(self._queue_medium, _Waiting(asked, item, pixels, size)))
        except SglError as error:
            fail_future(asked.answer, error)
        except Exception as error:  # transformers' code can raise anything
            fail_future(
                asked.answer, BackendError(f"the {medium.kind} can't be prepared: {error!r}")
            )

    def _queue_medium(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)

    def _add_kept_features(self, asked: _Asked, item: MediaItem) -> bool:
        """Adds the features of a medium to an answer. Returns False if they are not kept."""
        features = self._kept.get(item.key)
        if features is None:
            return False
        self._kept.move_to_end(item.key)
        asked.found[item.key.hex()] = features
        asked.left -= 1
        if not asked.left and not asked.answer.done():
            _answer_with_features(asked)
        return True

    def _step(self) -> None:
        """Encodes the first waiting medium, and others of its size. Frees room to decode others."""
        before = self._waiting
        self._waiting = [
            each
            for each in before
            if not each.of.answer.done() and not self._add_kept_features(each.of, each.item)
        ]
        if self._waiting:
            together = select_batch(
                [input_shapes(each.pixels) for each in self._waiting], self._together
            )
            batch = [self._waiting[i] for i in together]
            self._encode_media(batch)
            self._waiting = [each for each in self._waiting if each not in batch]
        if freed := sum(each.size for each in before) - sum(each.size for each in self._waiting):
            with self._room:
                self._decoded -= freed
                self._room.notify_all()

    def _encode_media(self, batch: Sequence[_Waiting]) -> None:
        """Encodes media of equal size together."""
        items = [each.item for each in batch]
        pixels = [lambda each=each: each.pixels for each in batch]
        found = encode(self._loaded.tower, items, pixels, fetch=True)
        self.steps += 1
        for each, features in zip(batch, found, strict=True):
            if isinstance(features, SglError):
                fail_future(each.of.answer, features)
                continue
            self.runs += 1
            self._kept[each.item.key] = features
            self._add_kept_features(each.of, each.item)
        while (
            len(self._kept) > 1
            and sum(each.nbytes for each in self._kept.values()) > self._most_bytes
        ):
            self._kept.popitem(last=False)


def _answer_with_features(asked: _Asked) -> None:
    from safetensors.torch import save

    size = sum(each.nbytes for each in asked.found.values())
    if size > _MAX_BYTES:
        problem = f"have {size:,} bytes of features; the limit is {_MAX_BYTES:,}."
        fail_future(
            asked.answer,
            ParameterError("media", problem, hint="Ask for fewer at once, or for smaller ones."),
        )
    elif asked.answer.set_running_or_notify_cancel():
        asked.answer.set_result(save(asked.found))


class TowerCore(ReadingCore):
    """Core of an engine with only an encoder of media. Must be created on the thread that runs its
    loop.

    Args:
        config: configuration of the engine.
        loaded: its encoder.

    Attributes: see `Core` in engine/core.py.
    """

    encoder = None  # encoder of texts
    _reads_media = True

    def __init__(self, config: EngineConfig, loaded: LoadedTower) -> None:
        self.loop = TowerLoop(loaded, config.image_cache_mb << 20)
        super().__init__(config, loaded.name, loaded.longest, loaded.longest, self.loop.inbox)
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.media.vocab_size
        self.device = loaded.device
        size = sum(each.nbytes for each in loaded.tower.parameters.values()) >> 20
        self.description = (
            f"{loaded.name} on {self.device}, its encoder of media alone, {size:,} MB"
        )
        self.builder = RequestBuilder(
            loaded.name,
            loaded.tokenizer,
            self.vocab_size,
            self.eos_ids,
            loaded.longest,
            None,
            media=loaded.media,
        )

    def _encode(self, call: EncodeMedia) -> Future[bytes]:
        self.open_requests.acquire()
        try:
            found = self.loop.submit_media(call.media)
        except BaseException:
            self.open_requests.release()
            raise
        self.open_requests.count("requests_submitted")
        found.add_done_callback(lambda _: self.open_requests.release())
        return found

    def _flush_cache(self, _: FlushCache) -> Future[int]:
        self.loop.inbox.post(self.loop.drop_kept_features)
        return self.loop.inbox.post_for_result(int)  # no tokens to count

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
                "images_encoded": loop.runs,
                "images_stored": loop.kept,
                **self.open_requests.counts(),
            }
        )

    _answers: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., Future[Any]]]] = {
        EncodeMedia: _encode,
        FlushCache: _flush_cache,
        Stats: _stats,
    }
