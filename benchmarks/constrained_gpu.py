"""Constrained and free generation on a GPU: Qwen3-0.6B's shape, its vocabulary, 128 tokens in and
up to 1,024 out.

    python benchmarks/constrained_gpu.py --vocabulary FILE [--jump off safe]

Random weights, temperature 0.8, one schema (an object with an array of at least 12 objects of six
fields, which takes about 440 tokens), so few rows end early, and the others are closed at the
limit. FILE is Qwen's `.tiktoken` file (in the PyPI package `dashscope`). Each line is the median of
five runs after one that warms up, free and constrained by turns.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from masks import SCHEMA
from tokenizers import AddedToken
from vocabulary import PADDED, tiktoken_tokenizer

import sglang_lite as sgl
from sglang_lite.bench.shapes import load_shape
from sglang_lite.protocol import Generation, JsonSchema, SamplingParams

PROMPT, NEW = 128, 1_024
ITEMS = {**SCHEMA["properties"]["items"], "minItems": 12}
CONSTRAINT = JsonSchema(json.dumps({**SCHEMA, "properties": {"items": ITEMS}}))


def run(engine: sgl.Engine, rows: int, constrained: int) -> float:
    """Output tokens a second of `rows` requests, of which the first so many are constrained."""
    dice = random.Random(1)
    prompts = [[dice.randrange(10_000) for _ in range(PROMPT)] for _ in range(rows)]
    engine.flush_cache()
    done, results = threading.Event(), []

    def sink(event: Any) -> None:
        results.append(event)
        if len(results) == rows:
            done.set()

    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.8, max_tokens=NEW, ignore_eos=True, seed=i)
        engine.submit(prompt, params, CONSTRAINT if i < constrained else None, sink=sink)
    done.wait()
    seconds = time.perf_counter() - started
    failed = [event for event in results if not isinstance(event, Generation)]
    if failed:
        raise RuntimeError(f"{len(failed)} failed, the first with {failed[0]!r}")
    return sum(event.usage.completion_tokens for event in results) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=Path, required=True)
    parser.add_argument(
        "--jump", nargs="*", default=["off", "safe"], help="settings of jump_forward"
    )
    options = parser.parse_args()
    tokenizer = tiktoken_tokenizer(options.vocabulary)
    eos = tokenizer.vocab_size
    tokenizer.backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    loaded = replace(
        load_shape("qwen3-0.6b"), tokenizer=tokenizer, vocab_size=PADDED, eos_ids=frozenset([eos])
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'rows':>6}{'constrained':>13}{'jump':>6}{'output tok/s':>14}{'of free':>9}")
    for jump in options.jump:
        with sgl.Engine.of(loaded, jump_forward=jump) as engine:
            for rows, some in ((1, (0, 1)), (256, (0, 128, 256)), (64, (0, 64))):
                turns = [[run(engine, rows, constrained) for constrained in some] for _ in range(6)]
                rates = [median(each) for each in zip(*turns[1:])]
                for constrained, rate in zip(some, rates):
                    print(
                        f"{rows:6}{constrained:13}{jump:>6}{rate:14,.0f}{rate / rates[0]:9.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
