"""Workloads: prompts of random token ids, with output generated greedily or at temperature 0.6,
without an early end.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from sglang_lite import Engine
from sglang_lite.protocol import Generation, SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of a benchmark and the tokens to generate for them.

    Attributes:
        prefix_length: number of tokens that all prompts begin with.
        suffix_lengths: number of additional tokens of each prompt.
        output_lengths: number of tokens to generate for each prompt.
        cached: True if the shared tokens are in the cache at the start.
        temperature: sampling temperature.
    """

    prefix_length: int
    suffix_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    cached: bool = False
    temperature: float = 0.0

    def scaled_down(self, factor: int) -> Workload:
        """Returns a workload with the same number of prompts, and token counts divided by `factor`."""

        def less(counts: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(max(count // factor, 1) for count in counts)

        return replace(
            self,
            prefix_length=self.prefix_length // factor,
            suffix_lengths=less(self.suffix_lengths),
            output_lengths=less(self.output_lengths),
        )

    def draw_prompts(self, draw: random.Random) -> list[list[int]]:
        prefix = [draw.randint(0, 10000) for _ in range(self.prefix_length)]
        return [
            prefix + [draw.randint(0, 10000) for _ in range(count)] for count in self.suffix_lengths
        ]


def _build_random_length_workload() -> Workload:
    draw = random.Random(0)
    own: list[int] = []
    for _ in range(256):
        own.append(draw.randint(100, 1024))
        # draws the token ids, which are not used, to advance the generator
        for _ in range(own[-1]):
            draw.randint(0, 10000)
    return Workload(
        0, tuple(own), tuple(draw.randint(100, 1024) for _ in range(256)), temperature=0.6
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "w1": _build_random_length_workload,
    "decode1": lambda: Workload(0, (128,), (256,)),
    "fork64": lambda: Workload(8192, (1,) * 64, (256,) * 64),
    "fewshot": lambda: Workload(2048, (64,) * 256, (128,) * 256, cached=True),
    "prefix": lambda: Workload(2048, (64,) * 256, (64,) * 256, cached=True),
    "plain64": lambda: Workload(0, (128,) * 64, (256,) * 64),
    "prefill": lambda: Workload(0, (8192,), (1,)),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds from the first submission to the last result, and the number of steps."""

    seconds: float
    steps: int


def prepare_workload(
    work: Workload,
    generate: Callable[[list[list[int]], tuple[int, ...], float], object],
    flush: Callable[[], object],
) -> list[list[int]]:
    """Prepares the engine's cache for a workload and returns the prompts. If the workload is
    `cached`, the cache then holds only the shared tokens. Otherwise the cache is empty.

    Args:
        generate: function of prompts, tokens to generate for each, and a temperature.
        flush: function that empties the cache.
    """
    prompts = work.draw_prompts(random.Random(1))
    flush()
    if work.cached:
        generate([prompts[0][: work.prefix_length]], (1,), 0.0)
    return prompts


def run_workload(engine: Engine, work: Workload) -> Measured:
    """Runs a workload. The cache is empty at the start, except for the shared tokens if the
    workload is `cached`.
    """
    prompts = prepare_workload(work, partial(generate_all, engine), engine.flush_cache)
    before = engine.stats()["steps"]
    seconds = generate_all(engine, prompts, work.output_lengths, work.temperature)
    return Measured(seconds, engine.stats()["steps"] - before)


def generate_all(
    engine: Engine, prompts: list[list[int]], new: tuple[int, ...], temperature: float
) -> float:
    """Submits one request for each prompt. Returns the seconds until the last one has ended."""
    done = threading.Event()
    remaining = len(prompts)
    failed: list[object] = []

    def sink(event: object) -> None:
        nonlocal remaining
        if not isinstance(event, Generation):
            failed.append(event)
        remaining -= 1
        if not remaining:
            done.set()

    started = time.perf_counter()
    for i, (prompt, count) in enumerate(zip(prompts, new)):
        params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=i)
        engine.submit(prompt, params, sink=sink)
    done.wait()
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(prompts)} failed: {failed[0]!r}")
    return time.perf_counter() - started
