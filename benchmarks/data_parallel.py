"""Workloads on one engine and on replicas of it behind one handle (`dp_size`), one after the other.

    python benchmarks/data_parallel.py [--dp 1 4] [--shape llama-3.1-8b] [--requests 256]
    [--programs 16] [--repeat 1]

w1        `requests` requests of W1 for each replica: tokens/s
fork64    `programs` programs in all, each with a prompt of its own that forks into 64 branches: tokens/s

Random weights. Each run has prompts of its own; the first one, of each workload, warms up. "start"
is the time of the engine's start to its first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))


import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, text_from_ids, write_model
from sglang_lite.bench.workloads import WORKLOADS, Workload, generate_all


@sgl.function
def forked(s: Any, shared: str, own: list[str], new: tuple[int, ...]) -> None:
    s += shared
    branches = s.fork(len(own))
    branches += [
        text + sgl.gen("answer", max_tokens=count, ignore_eos=True) for text, count in zip(own, new)
    ]
    branches.join()


def w1(engine: sgl.Engine, work: Workload, replicas: int, seed: int) -> float:
    """Tokens/s of the workload's requests, as many times as there are replicas."""
    draw = random.Random(seed)
    prompts = [prompt for _ in range(replicas) for prompt in work.draw_prompts(draw)]
    engine.flush_cache()
    return replicas * sum(work.output_lengths) / generate_all(
        engine, prompts, work.output_lengths * replicas, work.temperature
    )  # fmt: skip


def fork64(engine: sgl.Engine, work: Workload, programs: int, seed: int) -> float:
    """Tokens/s of programs, each of which is the workload with other tokens."""
    draw, given = random.Random(seed), []
    for _ in range(programs):
        prompts = work.draw_prompts(draw)
        shared, own = (
            prompts[0][: work.prefix_length],
            [prompt[work.prefix_length :] for prompt in prompts],
        )
        given.append(
            {
                "shared": text_from_ids(shared),
                "own": list(map(text_from_ids, own)),
                "new": work.output_lengths,
            }
        )
    engine.flush_cache()
    began = time.perf_counter()
    states = forked.run_batch(
        given, backend=engine, temperature=work.temperature, num_threads=programs
    )
    made = sum(state.usage().completion_tokens for state in states)
    seconds, tokens = time.perf_counter() - began, programs * sum(work.output_lengths)
    assert made == tokens, f"{made} tokens, not {tokens}"
    opened = [each["programs_opened"] for each in engine.stats().get("replicas", ())]
    print(f"programs opened so far, by replica: {opened}", flush=True)
    return tokens / seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--programs", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--share",
        action="store_true",
        help="put all replicas on the first GPU: parts of its memory",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="how many times shorter all texts are")
    options = parser.parse_args(arguments)
    work, forking = (WORKLOADS[name]().scaled_down(options.scale) for name in ("w1", "fork64"))
    work = Workload(
        0,
        work.suffix_lengths[: options.requests],
        work.output_lengths[: options.requests],
        temperature=0.6,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.shape)
        base: dict[str, float] = {}
        for dp in options.dp:
            settings: dict[str, Any] = (
                {} if options.device == "cuda" else {"max_total_tokens": 16_384}
            )
            if options.share:
                settings |= {"gpu_id_step": 0}
            began = time.perf_counter()
            with sgl.Engine(
                folder, load_format="dummy", device=options.device, dp_size=dp, seed=0, **settings
            ) as engine:
                engine.generate(
                    input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 1, "ignore_eos": True}
                )
                print(f"dp {dp} start {time.perf_counter() - began:.1f} s", flush=True)
                for name in ("w1", "fork64"):
                    seeds = range(1000 * dp, 1000 * dp + options.repeat + 1)
                    rates = [
                        w1(engine, work, dp, seed)
                        if name == "w1"
                        else fork64(engine, forking, options.programs, seed)
                        for seed in seeds
                    ][1:]
                    rate = statistics.median(rates)
                    base.setdefault(name, rate)
                    print(
                        f"dp {dp} {name:7} {rate:9,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f}), "
                        f"{rate / base[name]:.2f}x",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
