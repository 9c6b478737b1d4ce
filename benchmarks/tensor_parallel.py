"""Workloads of `sglang-lite bench` on engines of one GPU and of several that share the layers, one
after the other.

    python benchmarks/tensor_parallel.py [--tp 1 2] [--shape llama-3.1-8b] [--workload decode1 w1]
    [--repeat 3] python benchmarks/tensor_parallel.py --tp 2 --ep --shape qwen3-30b-a3b
    [--attention-dp] --workload w1

Random weights, as `load_format="dummy"` makes them: the same of one GPU and of several. Greedy
answers are compared with those of the first engine: the share of rows, and of tokens before the
first that differs; so are the first engine's own, one by one, with those that ran together: what
rounding alone does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, hf_config
from sglang_lite.bench.workloads import WORKLOADS, run_workload
from sglang_lite.protocol import Generation, SamplingParams

ROWS, TOKENS = 8, 64  # answers that are compared


def greedy(engine: sgl.Engine, rows: Sequence[int] = range(ROWS)) -> list[tuple[int, ...]]:
    """Token ids of greedy answers to random prompts, which run together."""
    engine.flush_cache()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    futures: list[Future[Any]] = [Future() for _ in rows]
    for i, future in zip(rows, futures):
        engine.submit(
            [(i + 1) * 7919 * j % 9973 for j in range(1, 100)], params, sink=future.set_result
        )
    found = [future.result() for future in futures]
    assert all(isinstance(each, Generation) for each in found), found
    return [each.token_ids for each in found]


def agreement(found: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> str:
    same = [
        next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), TOKENS)
        for pair in zip(found, expected)
    ]
    return f"{same.count(TOKENS)} of {ROWS} rows alike, {sum(same) / ROWS / TOKENS:.0%} of tokens"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--workload", nargs="+", default=["decode1", "w1"], choices=WORKLOADS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--tokens", type=int, default=300_000, help="size of each engine's cache (default: 300000)"
    )
    parser.add_argument(
        "--share", action="store_true", help="put all ranks on the first GPU, whose time they share"
    )
    parser.add_argument("--ep", action="store_true", help="share out experts by number")
    parser.add_argument(
        "--attention-dp", action="store_true", help="rows and attention of each GPU's own"
    )
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    expected: list[tuple[int, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(options.shape)))
        for tp in options.tp:
            settings: dict[str, Any] = {"gpu_id_step": 0} if options.share else {}
            if options.ep:
                settings["ep_size"] = tp
            if options.attention_dp and tp > 1:
                settings |= {"dp_size": tp, "enable_dp_attention": True}
            began = time.perf_counter()
            with sgl.Engine(
                model=folder, load_format="dummy", skip_tokenizer_init=True, tp_size=tp, dtype=options.dtype,
                device=options.device, max_total_tokens=options.tokens, **settings,
            ) as engine:  # fmt: skip
                engine.generate(
                    input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 1, "ignore_eos": True}
                )
                started = time.perf_counter() - began
                found = greedy(engine)
                if not expected:
                    expected, alone = found, [greedy(engine, [row])[0] for row in range(ROWS)]
                    print(f"tp {tp} by rows that run alone: {agreement(alone, found)}", flush=True)
                print(
                    f"tp {tp}, {options.dtype}: first token {started:.1f} s after the start, "
                    f"{agreement(found, expected)}",
                    flush=True,
                )
                for name in options.workload:
                    work = (
                        WORKLOADS[name]()
                        if options.device == "cuda"
                        else WORKLOADS[name]().scaled_down(64)
                    )
                    seconds = [
                        run_workload(engine, work).seconds for _ in range(options.repeat + 1)
                    ][1:]
                    tokens = sum(work.output_lengths)
                    each = statistics.median(seconds)
                    print(
                        f"tp {tp} {name:8} {each:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
                        f"{tokens / each:.0f} tokens/s, {1000 * each / max(work.output_lengths):.3f} ms a step",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
