"""Decoding steps of models in several formats on this CPU, over those of the first.

    python benchmarks/cpu_formats.py smollm2-135m out/gptq out/awq [--rows 1 32] [--new 32]
    [--rounds 7] [--threads 2]

The folders are those of `permuted.py OUT --formats gptq awq`. Engines take turns in one process, so
that a drift of the machine hits all alike; the least of the rounds, in ms a step.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import machine
from head import decode

import sglang_lite as sgl


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    print(machine.describe(options.threads), flush=True)
    settings = {
        "device": "cpu",
        "dtype": "bfloat16",
        "prefix_cache": False,
        "max_running": max(options.rows),
    }
    with contextlib.ExitStack() as stack:
        engines = {
            Path(name).name: stack.enter_context(
                sgl.Engine(
                    name,
                    threads=options.threads,
                    in_process=True,
                    max_total_tokens=4096,
                    **settings,
                )
            )
            for name in options.models
        }
        for rows in options.rows:
            least = dict.fromkeys(engines, float("inf"))
            for count in range(-1, options.rounds):  # the first warms up
                for name, engine in engines.items():
                    seconds = decode(engine, rows, options.new)
                    if count >= 0:
                        least[name] = min(least[name], seconds)
            first = next(iter(least.values()))
            line = "; ".join(
                f"{name} {each * 1e3:.2f} ms ({first / each:.2f}x)" for name, each in least.items()
            )
            print(f"{rows:4} rows: {line}", flush=True)


if __name__ == "__main__":
    main()
