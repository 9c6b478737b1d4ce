"""Engine part that reads images, videos and sounds, for engines that generate text. "Image" stands
for any of the three.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.encoder_step import NUMBERS_TOGETHER
from sglang_lite.runtime.core.encoding import Encoding
from sglang_lite.runtime.core.engine_part import Counts, EnginePart
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.media.media_rows import MediaRows
from sglang_lite.runtime.media.placeholders import MediaFormat
from sglang_lite.runtime.media.prepare import MediaPreparer
from sglang_lite.runtime.media.store import FeatureStore
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.whisper import WhisperDecoder
from sglang_lite.runtime.scheduler.queues import Queues

IMAGE_THREADS = 16  # maximum number of images decoded at the same time
_FEATURES_PER_TOKEN = 4  # per token of the KV pool; more features are not worth their memory


class MediaPart(EnginePart):
    """Feature of an engine that reads images in prompts.

    Args:
        config: configuration of the engine.
        loaded: its model.
        media: format of images in the model's prompts.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel, media: MediaFormat) -> None:
        self._config = config
        self._loaded = loaded
        self._media = media
        self._encoding: Encoding | None = None

    def join_scheduler(self, store: PrefixCache, queues: Queues, capacity: Capacity) -> None:
        """Creates the handler of requests with images (`MediaRows`) and, if there is an encoder,
        the encoder's queue.

        Raises:
            ParameterError: layers with a window have too few pages for an image that one step must
                compute as a whole.
        """
        room = store.limit_chunk(self._media.block)
        if room < self._media.block:
            problem = (
                f"a step has room for {room} tokens, and an image has {self._media.block} at once."
            )
            raise ParameterError("max_total_tokens", problem, hint="Raise it.")
        self._rows = MediaRows(store.table)
        self.resource = self._rows
        self.replacer = self._rows
        self._encoding = _make_encoding(self._loaded, self._media, capacity, self._config)
        self.preparation = self._encoding

    def join_builder(self, builder: RequestBuilder) -> None:
        """Tells the request builder the format of images in prompts."""
        builder.media = self._media

    def stats(self) -> Counts:
        """Counts images that were encoded, and those in the store."""
        return {} if self._encoding is None else self._encoding.stats()

    def close(self) -> None:
        """Ends the threads that decode images."""
        if self._encoding is not None:
            self._encoding.close()


def _make_encoding(
    loaded: LoadedModel, media: MediaFormat, capacity: Capacity, config: EngineConfig
) -> Encoding | None:
    """Creates the queue of images for an encoder, and the store of their features. Returns None
    without an encoder.
    """
    if loaded.tower is None or loaded.path is None:
        return None
    assert isinstance(loaded.model, Decoder | WhisperDecoder), (
        "transformers' models read no images here"
    )
    width = loaded.tower.width
    dtype = loaded.model.precision.compute
    rows = max(config.image_cache_mb * 2**20 // (width * dtype.itemsize), 1)
    store = FeatureStore(
        loaded.model.zeros((min(rows, _FEATURES_PER_TOKEN * capacity.tokens), width), dtype)
    )
    loaded.model.features = store.table
    on_gpu = loaded.model.device.type == "cuda"
    together = NUMBERS_TOGETHER if on_gpu and not config.deterministic else 0
    if config.language_only:
        from sglang_lite.runtime.media.encoder_client import EncoderClient  # imports an HTTP client

        assert isinstance(loaded.tower, EncoderClient), "no encoder is loaded"
        # waits for other machines
        fetching = ThreadPoolExecutor(IMAGE_THREADS, "sglang_lite-images")
        return Encoding(loaded.tower, store, loaded.tower, fetching, together, loaded.tower.close)
    threads = ThreadPoolExecutor(min(os.cpu_count() or 1, IMAGE_THREADS), "sglang_lite-images")
    preparer = MediaPreparer(loaded.path, media, config.image_options, pinned=on_gpu)
    return Encoding(loaded.tower, store, preparer, threads, together)
