"""Requests that wait for the features of their images, and the encoder's steps.

Images are decoded on other threads. The encoder runs on the loop's thread, one image between two
steps, so streams keep flowing; on a GPU, a few images of equal size together. All state is changed
on the loop's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future

from sglang_lite.protocol import OverloadedError, SglError
from sglang_lite.runtime.core.encoder_step import (
    MediaEncoder,
    Preparer,
    encode,
    input_shapes,
    select_batch,
)
from sglang_lite.runtime.media.prepare import Pixels
from sglang_lite.runtime.media.store import Features, FeatureStore
from sglang_lite.runtime.requests.request import Request, State


class Encoding:
    """Requests that wait for their images to be encoded.

    Args:
        encoder: encoder of images.
        store: store of the encoder's features.
        preparer: decodes images.
        pool: threads that the preparer runs on; shut down by `close`.
        most_numbers: maximum number of pixel values that are encoded together, unless there is only
            one image.
        closed: function that releases the encoder's resources.

    Attributes:
        runs: number of images that were encoded.
        store: the argument of this name.
        wake: function that makes the loop run, called on any thread; set by the loop.
    """

    def __init__(
        self,
        encoder: MediaEncoder,
        store: FeatureStore,
        preparer: Preparer,
        pool: Executor,
        most_numbers: int = 0,
        closed: Callable[[], object] = lambda: None,
    ) -> None:
        self.store = store
        self.runs = 0
        self._most_numbers = most_numbers
        self.wake: Callable[[], None] = lambda: None
        self._encoder = encoder
        self._preparer = preparer
        self._pool = pool
        self._closed = closed
        # requests that wait for room in the store, in order
        self._waiting: deque[Request] = deque()
        # features of requests with reserved rows in the store
        self._claimed: dict[Request, list[Features]] = {}
        # by key, for images that are not encoded yet
        self._pixels: dict[bytes, Future[Pixels]] = {}
        self._lost: list[Features] = []  # features of running requests, to be encoded again

    def __iter__(self) -> Iterator[Request]:
        yield from self._waiting
        yield from self._claimed

    @property
    def has_work(self) -> bool:
        """Whether a step can make progress, such as starting a waiting request or encoding an
        image.
        """
        if self._waiting and (self._waiting[0].ended or self.store.has_room(self._waiting[0])):
            return True
        return any(map(self._has_pixels, self._lost)) or any(
            map(self._can_progress, self._claimed.values())
        )

    @property
    def blocks_steps(self) -> bool:
        """Whether features that running requests need are missing."""
        return bool(self._lost)

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`."""
        return {"images_encoded": self.runs, "images_stored": self.store.images}

    def requires_preparation(self, request: Request) -> bool:
        """Returns whether a request has images."""
        return request.media is not None

    def queue_request(self, request: Request) -> None:
        """Queues a request until its features are ready.

        Raises:
            OverloadedError: its images have more features than the store has room for.
        """
        assert request.media is not None
        needed = len(request.media.positions)
        room = len(self.store.table)
        if needed > room:
            raise OverloadedError(
                f"the images of the request take {needed:,} tokens; the engine has room for {room:,} at a time.",
                hint="Send fewer or smaller ones, or raise image_cache_mb.",
            )
        request.change_state(State.PREPARING)
        self._waiting.append(request)

    def claim_if_ready(self, request: Request) -> bool:
        """Claims the features of a request that starts without waiting. Returns False if some are
        missing.
        """
        if request.media is None:
            return True
        entries = self.store.reserve_rows(request)
        if entries is not None and all(entry.filled for entry in entries):
            return True
        for entry in entries or ():
            entry.users.discard(request)
            if not entry.filled and not entry.used:
                self.store.drop_entry(entry)
        return False

    def prepare_next(self, fail: Callable[[Request, SglError], None]) -> list[Request]:
        """Encodes an image that has been decoded, or several of equal size. Does nothing if none
        has been decoded. Returns the requests whose features are complete.

        Args:
            fail: function that ends a request whose image can't be encoded.
        """
        while self._waiting and self._reserve_and_decode(self._waiting[0]):
            self._waiting.popleft()
        for request in [each for each in self._claimed if each.ended]:
            del self._claimed[request]
        if batch := self._next_batch():
            self._encode(batch, fail)
        self._lost = [each for each in self._lost if each.used and not each.filled]
        complete = [
            request
            for request, entries in self._claimed.items()
            if all(each.filled for each in entries)
        ]
        for request in complete:
            del self._claimed[request]
        if self._pixels:  # some may belong to requests that have ended
            needed = {
                entry.item.key
                for entries in (self._lost, *self._claimed.values())
                for entry in entries
            }
            for key in self._pixels.keys() - needed:
                self._pixels.pop(key).cancel()
        return complete

    def redo_preparation(self) -> None:
        """Starts to encode images again if requests still need their features. Called after the
        features' memory was released or the encoder's weights changed.
        """
        self._lost = [*self._lost, *self.store.invalidate_features()]
        for entry in self._lost:
            self._start_decoding(entry)

    def close(self) -> None:
        """Shuts down the encoder. Also shuts down the decoding threads, each after its current
        image.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._closed()

    def _reserve_and_decode(self, request: Request) -> bool:
        """Reserves the rows of a request and starts decoding its images. Returns False if it has to
        wait.
        """
        if request.ended:
            return True
        entries = self.store.reserve_rows(request)
        if entries is None:
            return False
        self._claimed[request] = entries
        for entry in entries:
            if not entry.filled:
                self._start_decoding(entry)
        return True

    def _start_decoding(self, entry: Features) -> None:
        """Starts to decode an image, unless that has already begun."""
        if entry.item.key in self._pixels:
            return
        try:
            pixels = self._pool.submit(self._preparer.prepare, entry.item)
        except RuntimeError:  # the executor has been shut down: the loop is about to end
            pixels = Future()
        self._pixels[entry.item.key] = pixels
        pixels.add_done_callback(lambda _: self.wake())

    def _can_progress(self, entries: list[Features]) -> bool:
        return all(each.filled for each in entries) or any(map(self._has_pixels, entries))

    def _has_pixels(self, entry: Features) -> bool:
        pixels = self._pixels.get(entry.item.key)
        return not entry.filled and pixels is not None and pixels.done()

    def _next_batch(self) -> list[Features]:
        """Returns the images to encode next: the first decoded one, and other decoded ones of its
        size.
        """
        waiting = (self._lost, *self._claimed.values())
        decoded = dict.fromkeys(e for entries in waiting for e in entries if self._has_pixels(e))
        if not decoded or self._pixels[next(iter(decoded)).item.key].exception() is not None:
            return [*decoded][:1]
        ready = [entry for entry in decoded if self._pixels[entry.item.key].exception() is None]
        shapes = [input_shapes(self._pixels[entry.item.key].result()) for entry in ready]
        return [ready[i] for i in select_batch(shapes, self._most_numbers)]

    def _encode(self, batch: list[Features], fail: Callable[[Request, SglError], None]) -> None:
        """Encodes images of equal size. Fails the requests whose images can't be encoded."""
        pixels = [self._pixels[entry.item.key].result for entry in batch]
        for entry, features in zip(
            batch, encode(self._encoder, [entry.item for entry in batch], pixels), strict=True
        ):
            del self._pixels[entry.item.key]
            if isinstance(features, SglError):
                self._fail_waiting(entry, features, fail)
            else:
                self.store.write_features(entry, features)
                self.runs += 1

    def _fail_waiting(
        self, entry: Features, error: SglError, fail: Callable[[Request, SglError], None]
    ) -> None:
        """Fails all requests that wait for an image."""
        for request in [each for each in entry.users if not each.ended]:
            self._claimed.pop(request, None)
            fail(request, error)
        self.store.drop_entry(entry)
