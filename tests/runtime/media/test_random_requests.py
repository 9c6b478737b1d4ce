"""Requests with images at random, beside aborts, damaged images and a store that has to give
features up: each ends once, with the answer that it has alone.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import sglang_lite as sgl
from sglang_lite.protocol import Generation, ParameterError, RequestAbortedError, SamplingParams
from tests.runtime.media.seeing import engine_of, png, save_seeing, seen

ACTIONS = int(os.environ.get("SGLANG_LITE_IMAGES", "60"))  # each with a request: CONTRIBUTING.md
PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
IMAGES, ROOM = 24, 16  # of one size; room of the store


def test_requests_with_images_end_once_with_their_answers(tmp_path: Path) -> None:
    save_seeing("llava", tmp_path)
    chance = random.Random(0)
    exact: dict[str, Any] = {"device": "cpu", "deterministic": True}
    with (
        engine_of(tmp_path, **exact) as plenty,
        engine_of(tmp_path, max_total_tokens=4 * ROOM, **exact) as tight,
    ):

        @cache
        def alone(*numbers: int) -> tuple[int, ...]:
            return tuple(plenty.complete(prompt(numbers), PARAMS).token_ids)

        asked: list[tuple[tuple[int, ...], list[Any], Any]] = []
        for _ in range(ACTIONS):
            numbers = tuple(
                chance.choices(
                    range(-1, IMAGES), [4, *[1] * IMAGES], k=chance.choice((0, 1, 1, 2, 3))
                )
            )
            events: list[Any] = []
            asked.append(
                (numbers, events, tight.submit(prompt(numbers), PARAMS, sink=events.append))
            )
            match chance.randrange(6):
                case 0:
                    chance.choice(asked)[2].abort()
                case 1:
                    tight.flush_cache()
                case 2:
                    tight.complete(prompt(numbers[:1] if -1 not in numbers else ()), PARAMS)
        tight.complete("the last one", PARAMS)
        while any(not events for _, events, _ in asked):
            tight.complete("another", PARAMS)
        assert tight.stats()["images_stored"] <= ROOM < tight.stats()["images_encoded"]
        for numbers, events, _ in asked:
            (event,) = events
            if -1 in numbers:
                assert isinstance(event, ParameterError | RequestAbortedError)
            elif not isinstance(event, RequestAbortedError):
                assert isinstance(event, Generation)
                assert event.token_ids == alone(*numbers)


def prompt(numbers: tuple[int, ...]) -> sgl.protocol.Prompt:
    """Prompt with images of these numbers, of which -1 is damaged."""
    return seen("ab", *(png(28, 28, seed=n) if n >= 0 else png(28, 28)[:-60] for n in numbers), "c")
