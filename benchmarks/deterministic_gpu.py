"""Speed of a deterministic engine on a GPU, beside a normal one.

    python benchmarks/deterministic_gpu.py [--shape llama-3.1-8b] [--workload decode1 …] [--repeat
    3]

Workloads of `sglang-lite bench`, by turns in one process; seconds, the median of some runs after
one that warms up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from sglang_lite import Engine
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.bench.workloads import WORKLOADS, run_workload


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument(
        "--workload", nargs="+", default=["decode1", "plain64", "fork64"], choices=WORKLOADS
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--tokens", type=int, default=60_000, help="size of each engine's cache (default: 60000)"
    )
    options = parser.parse_args(arguments)
    engines = [
        Engine.of(
            load_shape(options.shape, deterministic=deterministic), deterministic=deterministic,
            max_total_tokens=options.tokens,
        )
        for deterministic in (False, True)
    ]  # fmt: skip
    print(
        f"{options.shape}: seconds normally, deterministic, and the share of the normal speed",
        flush=True,
    )
    for name in options.workload:
        work = WORKLOADS[name]()
        runs = [
            [run_workload(engine, work).seconds for engine in engines]
            for _ in range(options.repeat + 1)
        ]
        normal, deterministic = (statistics.median(each) for each in zip(*runs[1:]))
        print(f"{name:8} {normal:.3f} {deterministic:.3f} {normal / deterministic:.2f}", flush=True)
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main()
