"""Decoding on this CPU: ours, and transformers' on the same file, in one run.

    python benchmarks/cpu_decode.py [--batches 1 8 32] [--new 64] [--systems "sglang_lite auto" …]
    [--sampling top_p …]

Greedy, and for our engine also drawn at temperature 1, with each filter.

Prompts of 100 tokens, `--new` tokens each, medians of three runs. Decode time is what a long
generation takes more than a short one, so that prefill and set-up cancel out. Each system has a
process of its own: with two teams of OpenMP threads in one process both are slow.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import machine
import torch
from llama_batch import LlamaBatch

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.models.resolve import resolve


class Ours:
    def __init__(self, **settings: Any) -> None:
        self.engine = sgl.Engine(device="cpu", max_running=32, **settings)

    def run(self, prompts: list[list[int]], new: int, sampling: str = "greedy") -> None:
        left, done = len(prompts), threading.Event()

        def sink(event: object) -> None:
            nonlocal left
            left -= 1
            if isinstance(event, Exception):
                raise event
            if not left:
                done.set()

        params = SamplingParams(max_tokens=new, ignore_eos=True, **SAMPLING[sampling])
        for prompt in prompts:
            self.engine.submit(prompt, params, sink=sink)
        done.wait()


class Transformers:
    def __init__(self, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        path = resolve("smollm2-135m")
        self.model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=dtype
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=2,
        )  # fmt: skip


class LlamaCpp:
    def __init__(self) -> None:
        self.model = LlamaBatch(str(resolve("smollm2-135m")), 32, 32 * 192, torch.get_num_threads())

    def run(self, prompts: list[list[int]], new: int) -> None:
        self.model.run(prompts, new)


# name: how to make it, and how many bytes of a weight it reads for one row and for many
SYSTEMS: dict[str, tuple[Callable[[], Any], float, float]] = {
    "sglang_lite auto": (lambda: Ours(dtype="auto", prefix_cache=False), 0.85, 2.0),
    "sglang_lite int8": (lambda: Ours(dtype="int8", prefix_cache=False), 1.0, 1.0),
    "sglang_lite float32": (lambda: Ours(dtype="float32", prefix_cache=False), 4.0, 4.0),
    "transformers bfloat16": (lambda: Transformers(torch.bfloat16), 2.0, 2.0),
    "transformers float32": (lambda: Transformers(torch.float32), 4.0, 4.0),
    "llama.cpp Q4_1": (LlamaCpp, 0.73, 0.73),
}
WEIGHTS = 134.5e6
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1},
    "top_p": {"temperature": 1, "top_p": 0.9},
    "top_k": {"temperature": 1, "top_k": 50},
    "min_p": {"temperature": 1, "min_p": 0.05},
}


def measure(
    name: str, batches: list[int], new: int, samplings: list[str]
) -> list[tuple[int, str, float, float]]:
    """For each batch size and way to draw: seconds of prefill, and of one decode step."""
    make, _, _ = SYSTEMS[name]
    system = make()
    rows = []
    for batch in batches:
        prompts = [[1000 + (7 * i + j) % 5000 for j in range(100)] for i in range(batch)]
        for sampling in samplings if isinstance(system, Ours) else ["greedy"]:
            run = partial(
                system.run, prompts, **({"sampling": sampling} if isinstance(system, Ours) else {})
            )
            run(new=8)
            prefill, step = [], []
            for _ in range(3):
                started = time.perf_counter()
                run(new=1)
                first = time.perf_counter() - started
                started = time.perf_counter()
                run(new=new)
                step.append((time.perf_counter() - started - first) / (new - 1))
                prefill.append(first)
            rows.append((batch, sampling, median(prefill), median(step)))
    return rows


def available(name: str) -> bool:
    return not name.startswith("llama.cpp") or importlib.util.find_spec("llama_cpp") is not None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument(
        "--systems", nargs="+", default=[name for name in SYSTEMS if available(name)]
    )
    parser.add_argument("--sampling", nargs="+", choices=SAMPLING, default=list(SAMPLING))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.batches, options.new, options.sampling)))
        return
    bandwidth, rate = machine.read_bandwidth(), machine.matmul_rate()
    print(machine.describe())
    print(f"memory reads {bandwidth / 1e9:.0f} GB/s, products {rate / 1e9:.0f} GFLOP/s")
    head = f"{'':24}{'batch':>6} {'draws':12}{'prefill tok/s':>15}{'decode ms':>11}{'tok/s':>8}"
    print(f"{head}{'weights GB/s':>14}{'of reads':>10}")
    for name in options.systems:
        arguments = [
            "--child",
            name,
            "--new",
            str(options.new),
            "--batches",
            *map(str, options.batches),
        ]
        arguments += ["--sampling", *options.sampling]
        done = subprocess.run(
            [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True
        )
        for batch, sampling, prefill, step in json.loads(done.stdout.splitlines()[-1]):
            _, few, many = SYSTEMS[name]
            moved = WEIGHTS * (few if batch <= 5 else many) / step
            print(
                f"{name:24}{batch:6} {sampling:12}{batch * 100 / prefill:15,.0f}{step * 1e3:11.1f}{batch / step:8,.0f}"
                f"{moved / 1e9:14.1f}{moved / bandwidth:10.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
