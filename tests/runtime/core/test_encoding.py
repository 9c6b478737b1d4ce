"""Images that are decoded are encoded together if they have equal sizes and fit; a bad one fails
alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite.protocol import BackendError, Media, OverloadedError, ParameterError, SglError
from sglang_lite.runtime.core.encoding import Encoding
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.media.prepare import MediaPreparer
from sglang_lite.runtime.media.store import FeatureStore
from sglang_lite.runtime.models.vision_tower import VisionTower
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.requests.request_media import RequestMedia
from sglang_lite.runtime.tokens.image_options import ImageOptions
from sglang_lite.runtime.tokens.image_span import MediaItem
from tests.runtime.media.seeing import FAMILIES, png, save_seeing


class Now(Executor):
    """Runs what is submitted at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(fn(*args))
        except SglError as error:
            done.set_exception(error)
        return done


class Tower:
    """Encoder whose features are the pixels; it has memory for a number of images."""

    def __init__(self, room: int = 100) -> None:
        self.batches, self.room = list[list[int]](), room

    def encode(self, images: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        self.batches.append([int(each["pixel_values"][0, 0]) for each in images])
        if len(images) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")
        return [each["pixel_values"] for each in images]


def pixels_of(item: MediaItem) -> dict[str, torch.Tensor]:
    number, count = item.medium.data
    if number == 9:
        raise ParameterError("image", "is damaged")
    return {"pixel_values": torch.full((count, 4), float(number))}


@dataclass(eq=False)
class Asked:
    """As much of a request as waits."""

    number: int
    media: RequestMedia
    ended: bool = False

    def change_state(self, state: object) -> None:
        self.state = state


def asked(number: int, count: int) -> Asked:
    item = MediaItem(Media(bytes([number, count])), bytes([number]), count, 0)
    return Asked(number, RequestMedia((item,), np.arange(count, dtype=np.int32)))


def run(
    requests: Sequence[Asked], tower: Tower, most: int
) -> tuple[list[int], dict[int, SglError], FeatureStore]:
    """Numbers of the requests that are complete, in order, and the errors of others."""
    store = FeatureStore(torch.zeros(64, 4))
    waiting: Any = Encoding(tower, store, SimpleNamespace(prepare=pixels_of), Now(), most)
    failed: dict[int, SglError] = {}
    complete: list[int] = []
    for request in requests:
        waiting.queue_request(request)
    while waiting.has_work:
        complete += [
            each.number
            for each in waiting.prepare_next(
                lambda each, error: failed.setdefault(each.number, error)
            )
        ]
    assert not list(waiting)
    return complete, failed, store


def test_images_of_equal_size_are_encoded_together_as_far_as_they_fit() -> None:
    requests, tower = [asked(1, 2), asked(2, 3), asked(3, 2), asked(4, 2), asked(5, 3)], Tower()
    complete, failed, store = run(requests, tower, most=16)
    assert tower.batches == [[1, 3], [2], [4], [5]]
    assert sorted(complete) == [1, 2, 3, 4, 5]
    assert not failed
    for request in requests:
        assert store.table[request.media.rows].eq(request.number).all()


def test_a_cpu_encodes_one_image_between_two_steps() -> None:
    tower = Tower()
    run([asked(1, 2), asked(2, 2)], tower, most=0)
    assert tower.batches == [[1], [2]]


def test_a_damaged_image_fails_alone() -> None:
    complete, failed, _ = run([asked(9, 2), asked(1, 2), asked(2, 2)], Tower(), most=16)
    assert complete == [1, 2]
    assert isinstance(failed[9], ParameterError)


def test_a_batch_without_memory_is_encoded_one_by_one() -> None:
    tower = Tower(room=1)
    assert run([asked(1, 2), asked(2, 2)], tower, most=64)[:2] == ([1, 2], {})
    complete, failed, _ = run([asked(1, 2)], Tower(room=0), most=64)
    assert (complete, type(failed[1])) == ([], OverloadedError)


def test_what_is_decoded_of_an_image_that_nobody_waits_for_is_given_up() -> None:
    made, done = list[Future[Any]](), list[int]()

    class Later(Now):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            made.append(Future())
            return made[-1]

    waiting: Any = Encoding(
        Tower(), FeatureStore(torch.zeros(64, 4)), SimpleNamespace(prepare=pixels_of), Later(), 0
    )
    left, kept = asked(1, 2), asked(2, 2)
    for request in (left, kept):
        waiting.queue_request(request)
    waiting.prepare_next(lambda *_: None)
    left.ended = True
    pixels = weakref.ref(found := torch.ones(2, 4))
    made[0].set_result({"pixel_values": found})
    made[1].set_result(pixels_of(kept.media.items[0]))
    del found, made[:]
    while waiting.has_work:
        done += [each.number for each in waiting.prepare_next(lambda *_: None)]
    assert done == [2]
    assert pixels() is None
    waiting.queue_request(asked(1, 2))  # the image is decoded again
    waiting.prepare_next(lambda *_: None)
    assert len(made) == 1


def test_features_that_are_too_few_are_an_error() -> None:
    request = asked(1, 2)
    request.media.items = (MediaItem(Media(bytes([1, 3])), b"1", 2, 0),)
    assert isinstance(run([request], Tower(), most=64)[1][1], BackendError)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_gives_each_image_of_a_batch_its_features(family: str, tmp_path: Any) -> None:
    save_seeing(family, tmp_path)
    tower = VisionTower(
        tmp_path, DummySource(torch.device("cpu")), torch.float32, torch.device("cpu")
    )
    media = open_model_files(tmp_path).media
    assert media is not None
    preparer = MediaPreparer(tmp_path, media, ImageOptions())
    images = [
        preparer.prepare(media.media_item(Media(png(40, 20, seed), "image/png")))
        for seed in range(3)
    ]
    together = tower.encode(images)
    for image, found in zip(images, together, strict=True):
        assert torch.allclose(found, tower.encode([image])[0], atol=1e-5)
