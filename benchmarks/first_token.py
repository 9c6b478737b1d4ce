"""Time to the first token on a GPU: of prompts alone, several at once, behind cached ones, and
beside rows that decode.

    python benchmarks/first_token.py [--shape SHAPE] [--repeat 15]

From the submission of token ids to the result with one token, in the process of the engine; random
weights, prompts of which nothing is cached but where it says so. Medians, after two runs that are
not counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading

import torch

from sglang_lite import Engine
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.bench.workloads import generate_all

# Cached tokens, new ones a prompt, prompts.
ASKED = [
    *((0, new, 1) for new in (64, 128, 256, 400, 512, 768, 1000, 1500, 2000, 3000, 4000)),
    *((0, new, rows) for new, rows in ((128, 8), (256, 8), (500, 4))),
    *((cached, new, 1) for cached in (500, 2000, 8000) for new in (32, 128, 400)),
    (500, 100, 4), (2000, 100, 4),
]  # fmt: skip
dice = random.Random(0)


def ids(count: int) -> list[int]:
    return [dice.randint(0, 9999) for _ in range(count)]


def first(engine: Engine, cached: list[int], new: int, rows: int) -> float:
    """Seconds until all of these prompts have a token."""
    return generate_all(engine, [cached + ids(new) for _ in range(rows)], (1,) * rows, 0.0)


def beside(engine: Engine, rows: int, new: int) -> tuple[float, int, float]:
    """Median seconds to the first token of prompts that come one after another while rows decode
    300 tokens each; how many came; and seconds that the rows took.
    """
    took: list[float] = []
    decoding = threading.Thread(
        target=lambda: took.append(
            generate_all(engine, [ids(100) for _ in range(rows)], (300,) * rows, 0.0)
        )
    )
    decoding.start()
    times = []
    while decoding.is_alive():
        times.append(first(engine, [], new, 1))
    return statistics.median(times), len(times), took[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--repeat", type=int, default=15)
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.shape}")
    with Engine.of(load_shape(asked.shape)) as engine:
        print(f"{'cached':>8}{'new':>8}{'rows':>6}{'ms':>9}{'least':>9}")
        for cached, new, rows in ASKED:
            prefix = ids(cached)
            if prefix:
                generate_all(engine, [prefix], (1,), 0.0)
            times = [first(engine, prefix, new, rows) for _ in range(asked.repeat + 2)][2:]
            print(
                f"{cached:8}{new:8}{rows:6}{1e3 * statistics.median(times):9.2f}{1e3 * min(times):9.2f}",
                flush=True,
            )
        for _ in range(3):
            time, count, took = beside(engine, 32, 600)
            print(
                f"beside 32 rows of 300 tokens, {took:.3f} s: {count} prompts of 600, {1e3 * time:.2f} ms each"
            )


if __name__ == "__main__":
    main()
