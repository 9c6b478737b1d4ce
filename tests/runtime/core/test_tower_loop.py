"""A server that encodes holds a bounded number of decoded media, and ends while more of them wait
for room.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sglang_lite.protocol import EngineClosedError, Media
from sglang_lite.runtime.core import tower_core
from sglang_lite.runtime.core.tower_core import TowerLoop
from sglang_lite.runtime.tokens.image_span import MediaItem

MEDIA, THREADS = 30, 4
MOST = 3 + THREADS


class Loaded:
    """Encoder of as many media as it is allowed to, and the most that were decoded and not encoded."""

    def __init__(self) -> None:
        self.device, self.allowed, self._more = (
            torch.device("cpu"),
            threading.Semaphore(0),
            threading.Condition(),
        )
        self.media = self.preparer = self.tower = self
        self.decoded = self.encoded = self.most = 0

    def media_item(self, image: Media) -> MediaItem:
        return MediaItem(image, image.data, 1, 0)

    def prepare(self, item: MediaItem) -> dict[str, torch.Tensor]:
        with self._more:
            self.decoded += 1
            self._more.notify_all()
            self.most = max(self.most, self.decoded - self.encoded)
        return {"pixel_values": torch.zeros(250)}  # 1,000 bytes

    def encode(self, media: Sequence[Any]) -> list[torch.Tensor]:
        assert self.allowed.acquire(timeout=60)
        with self._more:
            # the others go on
            self._more.wait_for(lambda: self.decoded - self.encoded > MOST, 0.005)
            self.encoded += len(media)
        return [torch.zeros(1, 2) for _ in media]


@pytest.mark.parametrize("closed", [False, True])
def test_few_media_are_decoded_before_those_that_wait_are_encoded(
    monkeypatch: Any, closed: bool
) -> None:
    monkeypatch.setattr(tower_core, "_MAX_DECODED", 3500)
    monkeypatch.setattr("os.cpu_count", lambda: THREADS)
    loaded: Any = Loaded()
    loop, others = TowerLoop(loaded, 1 << 20), {*threading.enumerate()}
    thread = threading.Thread(target=loop.run)
    thread.start()
    answer = loop.submit_media([Media(bytes([i]), "image/png") for i in range(MEDIA)])
    if closed:
        loaded.allowed.release(MEDIA // 2)
        loop.inbox.post(loop.inbox.close)
    loaded.allowed.release(MEDIA)
    if closed:
        assert isinstance(answer.exception(60), EngineClosedError)
    else:
        answer.result(60)
        loop.inbox.close()
        assert (loaded.decoded, loaded.encoded) == (MEDIA, MEDIA)
    assert loaded.most <= MOST
    for each in {*threading.enumerate()} - others:
        each.join(60)
        assert not each.is_alive()
