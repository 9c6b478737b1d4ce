"""Requests that share a prefix, on this CPU: ours, transformers' and llama.cpp's, in one run.

    python benchmarks/shared_prefix.py [--requests 32] [--new 32] [--prefix 512] [--systems …]

Each request has 32 tokens of its own after the prefix and generates `--new` tokens, greedily;
medians of three runs, each from an empty cache. llama.cpp runs twice: with its own prompt cache,
one request after the other as its Python interface does it ("prompt cache"), and with all requests
in one batch whose prefix is copied from one sequence to the others, which takes its C interface
("copied sequences").
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import machine
import torch
from cpu_decode import Ours, Transformers, available
from llama_batch import LlamaBatch

from sglang_lite.runtime.models.resolve import resolve

OWN = 32


class Emptied(Ours):
    def run(self, prompts: list[list[int]], new: int) -> None:
        self.engine.flush_cache()
        super().run(prompts, new)


class PromptCache:
    """llama-cpp-python keeps what the last request and this one share."""

    def __init__(self, prefix: int) -> None:
        from llama_cpp import Llama

        path, threads = str(resolve("smollm2-135m")), torch.get_num_threads()
        self.model = Llama(
            path, n_threads=threads, n_threads_batch=threads, n_ctx=1024, n_batch=512, verbose=False
        )

    def run(self, prompts: list[list[int]], new: int) -> None:
        self.model.reset()
        for prompt in prompts:
            for count, _ in enumerate(self.model.generate(prompt, temp=0.0), 1):
                if count == new:
                    break


class CopiedSequences:
    def __init__(self, prefix: int) -> None:
        self.prefix, self.model = (
            prefix,
            LlamaBatch(
                str(resolve("smollm2-135m")), 33, prefix + 33 * (OWN + 128), torch.get_num_threads()
            ),
        )

    def run(self, prompts: list[list[int]], new: int) -> None:
        self.model.run(prompts, new, shared=self.prefix)


SYSTEMS: dict[str, Callable[[int], Any]] = {
    "sglang_lite auto": lambda _: Emptied(),
    "transformers bfloat16": lambda _: Transformers(torch.bfloat16),
    "llama.cpp prompt cache": PromptCache,
    "llama.cpp copied sequences": CopiedSequences,
}


def measure(name: str, requests: int, new: int, prefix: int) -> float:
    """Seconds for all requests."""
    system = SYSTEMS[name](prefix)
    shared = [1000 + (7 * i) % 5000 for i in range(prefix)]
    prompts = [shared + [2000 + (31 * i + j) % 5000 for j in range(OWN)] for i in range(requests)]
    system.run(prompts[:2], 2)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        system.run(prompts, new)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=512, help="tokens that all share")
    parser.add_argument(
        "--systems", nargs="+", default=[name for name in SYSTEMS if available(name)]
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.requests, options.new, options.prefix)))
        return
    print(machine.describe())
    print(f"{'':28}{'seconds':>9}{'output tok/s':>14}{'ours is':>9}")
    ours = None
    for name in options.systems:
        sizes = [
            "--new",
            str(options.new),
            "--requests",
            str(options.requests),
            "--prefix",
            str(options.prefix),
        ]
        arguments = ["--child", name, *sizes]
        done = subprocess.run(
            [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True
        )
        seconds = json.loads(done.stdout.splitlines()[-1])
        ours = ours or seconds
        print(
            f"{name:28}{seconds:9.2f}{options.requests * options.new / seconds:14,.0f}{seconds / ours:8.1f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
