"""How much later rows that decode get their tokens because of another program's text.

    python benchmarks/fresh_text.py [--rows 32] [--characters 6000] [--trials 200]

The rows decode with a model that computes nothing and waits 2 ms a step, as the host of a GPU does,
and the default model's tokenizer. Meanwhile comes text that nobody has seen before: posted as a
request, posted as a program's first text, or as the text behind its generation, known beforehand or
not. For each trial there are two figures: how late the first token of a small request is that is
submitted just before ("first"), and the longest time from one step to the next ("step"). "nothing"
is without any such text; "hashing" is what a thread costs that computes about as long without
Python's lock, which is the machine's share.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.host_step import Nothing, no_draw
from benchmarks.machine import describe
from sglang_lite import Engine
from sglang_lite.program.nodes import Gen, Text
from sglang_lite.protocol import Played, SamplingParams
from sglang_lite.runtime.executor import cpu_runner as runner_module
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.weights.gguf_file import GgufFile
from sglang_lite.runtime.tokens.from_gguf import tokenizer_from_gguf

STEP = 0.002  # seconds
SHORT = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Waits(Nothing):
    """Takes its time, in which others can run, and remembers when it was asked."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def forward(self, ids: Any, positions: Any, plan: Any, cache: Any) -> torch.Tensor:
        self.asked.append(time.perf_counter())
        time.sleep(STEP)
        return torch.zeros(len(ids), 1)


def engine_of(model: Waits, rows: int) -> Engine:
    tokenizer = tokenizer_from_gguf(
        GgufFile(resolve("smollm2-135m", None)).metadata, "smollm2-135m"
    )
    loaded = LoadedModel(
        "nothing", model, tokenizer, tokenizer.vocab_size, tokenizer.eos_ids, 1 << 16
    )  # type: ignore[arg-type] # a model that only waits
    return Engine.of(loaded, max_running=rows + 8, max_total_tokens=1 << 20, prefix_cache=False)


def fresh(characters: int, draw: random.Random) -> str:
    words = (
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
        for _ in range(characters // 3)
    )
    return " ".join(words)[:characters]


class Texts:
    """The ways in which text comes."""

    def __init__(self, engine: Engine, characters: int) -> None:
        self._engine, self._characters, self._draw = engine, characters, random.Random(1)

    def nothing(self) -> Callable[[], None]:
        return lambda: None

    def hashing(self) -> Callable[[], None]:
        """Work of another thread that takes about as long, and nothing from the engine but its
        core.
        """
        return lambda: _done(hashlib.sha256(bytes(5_000_000)))

    def request(self) -> Callable[[], None]:
        text = fresh(self._characters, self._draw)
        return lambda: _done(self._engine.submit(text, SHORT, sink=lambda event: None))

    def program(self) -> Callable[[], None]:
        text = fresh(self._characters, self._draw)
        program = self._engine.open_program(sink=lambda event: None)

        def post() -> None:
            program.extend((), (Text(text), Gen("a", SHORT)))
            program.close()

        return post

    def behind(self) -> Callable[[], None]:
        """As a whole: the text is behind a generation of one token."""
        text = fresh(self._characters, self._draw)
        program = self._engine.open_program(sink=lambda event: None)

        def post() -> None:
            program.extend((), (Text("a"), Gen("a", SHORT), Text(text), Gen("b", SHORT)))
            program.close()

        return post

    def extended(self) -> Callable[[], None]:
        """Request that has generated already, with further text."""
        text = fresh(self._characters, self._draw)
        played = threading.Event()
        program = self._engine.open_program(
            sink=lambda event: played.set() if isinstance(event, Played) else None
        )
        program.extend((), (Text("a"), Gen("a", SHORT)))
        played.wait()

        def post() -> None:
            program.extend((), (Text(text), Gen("b", SHORT)))
            program.close()

        return post


def _done(_: object) -> None:
    """Nothing more is wanted of it."""


def first_token(engine: Engine, model: Waits, post: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds until the first token of a request that comes together with `post`, and of the
    longest step.
    """
    done, go = threading.Event(), threading.Event()

    def poster() -> None:
        go.wait()
        post()

    def sink(event: object) -> None:
        nonlocal took
        took = time.perf_counter() - began
        done.set()

    took = 0.0
    thread = threading.Thread(target=poster)
    thread.start()
    time.sleep(2 * STEP)
    before = len(model.asked)
    began = time.perf_counter()
    engine.submit([5, 6, 7], SHORT, sink=sink)
    go.set()
    done.wait()
    thread.join()
    time.sleep(20 * STEP)  # whatever it is has come
    asked = model.asked[before - 1 :]
    return took * 1e3, max((b - a for a, b in pairwise(asked)), default=0.0) * 1e3


def report(rows: int, characters: int, trials: int) -> None:
    print(describe())
    model = Waits()
    with engine_of(model, rows) as engine:
        texts = Texts(engine, characters)
        kinds = {
            kind: getattr(texts, kind)
            for kind in ("nothing", "hashing", "request", "program", "behind", "extended")
        }
        endless = SamplingParams(temperature=0, max_tokens=60_000, ignore_eos=True)
        for i in range(rows):
            engine.submit([1, i], endless, sink=lambda event: None)
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(trials):
            for kind, make in kinds.items():  # in turns: what else the machine does harms all alike
                found[kind].append(first_token(engine, model, make()))
    print(
        f"{'text':>9}  {'first, ms: median, p90, largest':>34}  {'step, ms: median, p90, largest':>34}"
    )
    for kind, times in found.items():
        print(f"{kind:>9}  {'  '.join(f'{_summary(values):>34}' for values in zip(*times))}")


def _summary(values: Sequence[float]) -> str:
    p90 = statistics.quantiles(values, n=10)[-1] if len(values) > 1 else values[0]
    return f"{statistics.median(values):10.2f}{p90:10.2f}{max(values):10.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--characters", type=int, default=6_000)
    parser.add_argument("--trials", type=int, default=200)
    options = parser.parse_args()
    draw, runner_module.sample = runner_module.sample, no_draw
    try:
        report(options.rows, options.characters, options.trials)
    finally:
        runner_module.sample = draw


if __name__ == "__main__":
    main()
