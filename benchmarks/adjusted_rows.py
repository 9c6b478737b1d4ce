"""Time of a decode step whose rows' logits are adjusted: penalties, biases, an end that may not
come yet.

    python benchmarks/adjusted_rows.py [--shape qwen3-0.6b] [--rows 256] [--prompt 512] [--new 128]
    [--repeat 3]

Random weights, prompts of `--prompt` tokens that differ, `--new` tokens each, sampled at
temperature 0.8; medians of `--repeat` runs after one that warms up. All rows of a run have the same
adjustment. Decode time is what the whole run takes more than one of a single token.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import describe

import sglang_lite as sgl
from sglang_lite.bench.shapes import ON_CPUS, SHAPES, load_shape
from sglang_lite.protocol import SamplingParams

ADJUSTED: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 0.3},
    "all penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    "logit_bias": {"logit_bias": tuple((token, 1.0) for token in range(5, 15))},
}


def seconds(
    engine: sgl.Engine, prompts: list[list[int]], new: int, options: dict[str, Any]
) -> float:
    left, done = len(prompts), threading.Event()

    def sink(event: object) -> None:
        nonlocal left
        if isinstance(event, Exception):
            raise event
        left -= 1
        if not left:
            done.set()

    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.8, max_tokens=new, ignore_eos=True, seed=i, **options)
        engine.submit(prompt, params, sink=sink)
    done.wait()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    dice = random.Random(0)
    prompts = [[dice.randrange(10_000) for _ in range(options.prompt)] for _ in range(options.rows)]
    device = "cpu" if options.shape in ON_CPUS else "auto"
    with sgl.Engine.of(
        load_shape(options.shape), device=device, max_running=options.rows
    ) as engine:
        print(f"{describe()}; {engine.core.description}")
        print(f"{options.rows} rows: {'adjustment':24}{'ms a step':>10}{'of none':>9}")
        plain = 0.0
        for name, adjusted in ADJUSTED.items():
            seconds(engine, prompts, 2, adjusted)
            first = median(seconds(engine, prompts, 1, adjusted) for _ in range(options.repeat))
            whole = median(
                seconds(engine, prompts, options.new, adjusted) for _ in range(options.repeat)
            )
            step = 1e3 * (whole - first) / (options.new - 1)
            plain = plain or step
            print(f"{'':10}{name:24}{step:10.2f}{step / plain:9.2f}", flush=True)


if __name__ == "__main__":
    main()
