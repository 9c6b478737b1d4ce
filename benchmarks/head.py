"""Cost of logits that are summed in float32 on a CPU in 16 bits: decoding steps with that head, and
with a plain one.

    python benchmarks/head.py [--rows 1 16] [--new 32] [--rounds 5] [--threads 4]

The plain head is made as every other product of the model is. Rounds alternate between the two, so
that a drift of the machine hits both alike; medians over the rounds, in ms a step.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import machine

import sglang_lite as sgl
from sglang_lite.runtime.models.layers.linear import Bf16Linear, Linear


def decode(engine: sgl.Engine, rows: int, new: int) -> float:
    """Seconds of a step, without prefill and set-up."""
    seconds = []
    for tokens in (1, new + 1):
        started = time.perf_counter()
        engine.generate(
            input_ids=[[5 + i % 50, *range(10, 30)] for i in range(rows)],
            sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        )
        seconds.append(time.perf_counter() - started)
    return (seconds[1] - seconds[0]) / new


def measure(
    engine: sgl.Engine, heads: dict[str, Linear], rows: int, new: int, rounds: int
) -> dict[str, float]:
    model = engine.core.runner.model
    found: dict[str, list[float]] = {name: [] for name in heads}
    for count in range(-1, rounds):  # the first warms up
        for name in list(heads)[:: 1 if count % 2 else -1]:
            model.head = heads[name]
            seconds = decode(engine, rows, new)
            if count >= 0:
                found[name].append(seconds)
    return {name: median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    settings = {
        "device": "cpu",
        "dtype": "bfloat16",
        "prefix_cache": False,
        "max_running": max(options.rows),
    }
    with sgl.Engine(threads=options.threads, in_process=True, **settings) as engine:
        print(f"{machine.describe(options.threads)}; {engine.model_name}", flush=True)
        model = engine.core.runner.model
        plain = Bf16Linear([model.embedding], None)  # the model's head is its table of embeddings
        heads = {"float32 sums": model.head, "plain": plain}
        for rows in options.rows:
            found = measure(engine, heads, rows, options.new, options.rounds)
            ours, other = found.values()
            line = "; ".join(
                f"{name} {seconds * 1e3:.2f} ms a step" for name, seconds in found.items()
            )
            print(f"{rows:4} rows: {line}; float32 costs {ours / other - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
