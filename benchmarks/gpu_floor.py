"""Floor of a GPU's engine whatever it is asked: how long it takes to be ready, that nothing is slow
at its first use after that, memory within its share, and streams that wait for no more than a piece
of a prompt.

    python benchmarks/gpu_floor.py [--shape SHAPE]

Llama-3.1-8B's shape with random weights, and a byte-level vocabulary of random words. Triton's
cache is empty at the start. Every use is run twice with other prompts, each time on an empty prefix
cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.protocol import Constraint, Delta, Generation, JsonSchema, Regex, SamplingParams
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
}


def words(count: int) -> Any:
    """A byte-level tokenizer of so many tokens: the characters, and random words of them."""
    dice = random.Random(0)
    characters = [chr(33 + i) for i in range(94)]
    found = dict.fromkeys([*characters, "\u0120", "\u010a"])
    while len(found) < count:
        found[
            dice.choice(["", "\u0120"]) + "".join(dice.choices(characters, k=dice.randint(2, 8)))
        ] = None
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(found)}, "merges": []},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(json.dumps(content))
        return tokenizer_from_folder(Path(folder))


def load(shape: str) -> LoadedModel:
    loaded = load_shape(shape)
    return replace(loaded, tokenizer=words(loaded.vocab_size), eos_ids=frozenset([0]))


def ask(
    engine: sgl.Engine,
    prompts: list[list[int]],
    params: SamplingParams,
    constraint: Constraint | None = None,
) -> float:
    """Seconds until all are done."""
    left, done, failed = [len(prompts)], threading.Event(), []

    def sink(event: Any) -> None:
        if not isinstance(event, Delta):
            if not isinstance(event, Generation):
                failed.append(event)
            left[0] -= 1
            if not left[0]:
                done.set()

    engine.flush_cache()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, params, constraint, sink=sink)
    done.wait()
    if failed:
        raise failed[0]
    return time.perf_counter() - began


def uses(vocab: int) -> dict[str, Callable[[sgl.Engine, int], float]]:
    """By name, something that takes an engine and a seed."""

    def prompts(seed: int, rows: int, own: int, shared: int = 0) -> list[list[int]]:
        dice = random.Random(seed)
        start = [dice.randrange(5, vocab) for _ in range(shared)]
        return [start + [dice.randrange(5, vocab) for _ in range(own)] for _ in range(rows)]

    def plain(**more: Any) -> SamplingParams:
        return SamplingParams(**{"temperature": 0, "max_tokens": 16, "ignore_eos": True, **more})

    logprobs = {"return_logprob": True, "top_logprobs_num": 5}
    schema = JsonSchema(json.dumps(SCHEMA))
    return {
        "1 row": lambda e, s: ask(e, prompts(s, 1, 30), plain()),
        "7 rows": lambda e, s: ask(e, prompts(s, 7, 30), plain()),
        "64 rows": lambda e, s: ask(e, prompts(s, 64, 30), plain()),
        "64 rows, 8,192 tokens shared": lambda e, s: ask(e, prompts(s, 64, 5, 8192), plain()),
        "200 rows, 1,000 shared": lambda e, s: ask(e, prompts(s, 200, 20, 1000), plain()),
        "200 rows of 1 to 32 tokens": lambda e, s: ask(e, [p[: 1 + i % 32] for i, p in enumerate(prompts(s, 200, 32))],
                                                       plain()),
        "8,000 prompt log-probabilities": lambda e, s: ask(
            e, prompts(s, 1, 8000), plain(**logprobs, logprob_start_len=0)
        ),
        "16 rows, log-probabilities": lambda e, s: ask(e, prompts(s, 16, 30), plain(**logprobs)),
        "16 rows, drawn, filtered": lambda e, s: ask(e, prompts(s, 16, 30), plain(temperature=1, top_p=0.9, top_k=50)),
        "16 rows, penalties": lambda e, s: ask(e, prompts(s, 16, 30), plain(frequency_penalty=0.5)),
        "a regex": lambda e, s: ask(e, prompts(s, 1, 30), plain(ignore_eos=False), Regex(f"[a-f]{{4,{9 + s}}}")),
        "a schema": lambda e, s: ask(e, prompts(s, 1, 30), plain(ignore_eos=False), msgspec.structs.replace(
            schema, schema=json.dumps({**SCHEMA, "title": str(s)}))),
        "64 rows, a regex": lambda e, s: ask(e, prompts(s, 64, 30), plain(), Regex(f"[a-z ]{{40,{90 + s}}}")),
    }  # fmt: skip


def longest_wait(engine: sgl.Engine, beside: Callable[[], object]) -> float:
    """The longest time between two tokens of a stream while something else runs."""
    times, done = [], threading.Event()

    def sink(event: Any) -> None:
        times.append(time.perf_counter())
        if not isinstance(event, Delta):
            done.set()

    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    engine.submit([7, 8, 9], params, sink=sink, stream=True)
    while len(times) < 20:
        time.sleep(0.001)
    beside()
    done.wait()
    return max(b - a for a, b in pairwise(times[10:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    shape = parser.parse_args().shape
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    vocab = SHAPES[shape].vocab_size
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {shape}")
    loaded = load(shape)
    total = torch.cuda.get_device_properties(0).total_memory
    for case, fraction in (("an empty cache of kernels", 0.88), ("kernels cached", 0.3)):
        began = time.perf_counter()
        with sgl.Engine.of(loaded, mem_fraction=fraction) as engine:
            ready = time.perf_counter() - began
            begun = (total - torch.cuda.mem_get_info()[0]) / 2**30
            print(
                f"ready after {ready:.1f} s with {case}; of {fraction * total / 2**30:.1f} GiB {begun:.1f} are taken"
            )
            if fraction == 0.88:
                print(f"{'use':34}{'first, s':>10}{'second':>10}{'ratio':>8}")
                for name, use in uses(vocab).items():
                    first, second = use(engine, 1), use(engine, 2)
                    print(f"{name:34}{first:10.4f}{second:10.4f}{first / second:8.2f}", flush=True)
                taken = (total - torch.cuda.mem_get_info()[0]) / 2**30
                print(f"after all that {taken:.1f} GiB are taken")
                continue
            dice = random.Random(3)
            prompt = [dice.randrange(5, vocab) for _ in range(7900)]
            waits = {}
            asks: list[tuple[str, dict[str, Any]]] = [
                ("a prompt of 7,900", {}),
                ("with its log-probabilities", {"return_logprob": True, "logprob_start_len": 0}),
                (
                    "and five others of each",
                    {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5},
                ),
            ]
            for name, more in asks:
                params = SamplingParams(temperature=0, max_tokens=1, **more)
                beside = partial(ask, engine, [prompt], params)
                waits[name] = sorted(longest_wait(engine, beside) for _ in range(5))
            taken = (total - torch.cuda.mem_get_info()[0]) / 2**30
            for name, wait in waits.items():
                print(
                    f"longest wait of a stream beside {name}: {', '.join(f'{1000 * w:.0f}' for w in wait)} ms"
                )
            print(f"after log-probabilities of 7,900 tokens {taken:.1f} GiB are taken")


if __name__ == "__main__":
    main()
