"""Constrained and free generation on a GPU: Qwen3-0.6B's shape, its vocabulary, 128 tokens in and up to 1,024 out.

    python benchmarks/constrained_gpu.py --vocabulary FILE

Random weights, temperature 0.8, one schema (an object with an array of at least 12 objects of six fields, which takes
about 440 tokens), so few rows end early, and the others are closed at the limit. FILE is Qwen's `.tiktoken` file (in
the PyPI package `dashscope`). Each line is the median of three runs after one that warms up.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = tiktoken_tokenizer(options.vocabulary)
    eos = tokenizer.vocab_size
    tokenizer.backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    loaded = replace(load_shape("qwen3-0.6b"), tokenizer=tokenizer, vocab_size=PADDED, eos_ids=frozenset([eos]))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'rows':>6}{'constrained':>13}{'jump':>6}{'output tok/s':>14}{'of free':>9}")
    for jump in ("off", "safe"):
        with sgl.Engine.of(loaded, jump_forward=jump) as engine:
            for rows, some in ((256, (0, 128, 256)), (64, (0, 64)), (1, (0, 1))):
                free = 0.0
                for constrained in some:
                    run(engine, rows, constrained)
                    rate = median(run(engine, rows, constrained) for _ in range(3))
                    free = free or rate
                    print(f"{rows:6}{constrained:13}{jump:>6}{rate:14,.0f}{rate / free:9.2f}", flush=True)


if __name__ == "__main__":
    main()
