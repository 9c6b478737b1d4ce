"""Cost of text between the generations of a program, in an engine of its own process.

    python benchmarks/appending.py [--shape qwen3-0.6b] [--rows 256] [--tokens 128] [--repeat 5]

A batch of programs, each with 32 tokens of its own and then one generation, or the same number of
tokens in 4 and 16 generations with two words behind each. "equal": all generations are of one
length, so that all programs append in the same step; "different": of 0.5 to 1.5 times that, so that
some append in each step. Seconds are medians of runs after one that warms up; "us an append" is
what the generations take more than one, over their number. Weights are random.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from engine_process import start

import sglang_lite as sgl
from benchmarks.machine import describe
from sglang_lite.bench.shapes import text_from_ids, write_model
from sglang_lite.program.nodes import Gen, Node, Text
from sglang_lite.protocol import ProgramResult, SamplingParams

COUNTS = (1, 4, 16)
BETWEEN = Text(text_from_ids([5, 6]))


def lengths_of(count: int, tokens: int, draw: random.Random, *, equal: bool) -> list[int]:
    """Tokens of each generation."""
    if equal:
        return [tokens // count] * count
    return [max(1, round(tokens / count * draw.uniform(0.5, 1.5))) for _ in range(count)]


def nodes_of(lengths: list[int], draw: random.Random) -> list[Node]:
    nodes: list[Node] = [Text(text_from_ids([draw.randrange(300, 10_000) for _ in range(32)]))]
    for i, count in enumerate(lengths):
        nodes += [
            Gen(f"part {i}", SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)),
            BETWEEN,
        ]
    return nodes


def seconds(engine: sgl.Engine, programs: list[list[Node]]) -> float:
    """Time of programs whose texts are new."""
    engine.flush_cache()
    done, left = threading.Event(), len(programs)

    def sink(event: object) -> None:
        nonlocal left
        left -= isinstance(event, ProgramResult | sgl.SglError)
        if not left:
            done.set()

    begun = time.perf_counter()
    for nodes in programs:
        program = engine.open_program(sink=sink)
        program.extend((), nodes)
        program.close()
    done.wait()
    return time.perf_counter() - begun


def measure(engine: sgl.Engine, rows: int, tokens: int, repeat: int, *, equal: bool) -> None:
    label = "equal" if equal else "different"
    for count in COUNTS[1:]:
        took: dict[str, list[float]] = {"one": [], "parts": []}
        for i in range(repeat + 1):
            draw = random.Random(i)
            lengths = [lengths_of(count, tokens, draw, equal=equal) for _ in range(rows)]
            for kind in took:
                each = lengths if kind == "parts" else [[sum(parts)] for parts in lengths]
                found = seconds(engine, [nodes_of(parts, draw) for parts in each])
                if i:
                    took[kind].append(found)
        one, parts = median(took["one"]), median(took["parts"])
        print(
            f"{label:9} {count:3} x {tokens // count:3}: {parts:7.4f} s, in one generation {one:7.4f} s: "
            f"{parts / one:5.2f}x, {(parts - one) / rows / (count - 1) * 1e6:6.0f} us an append",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(arguments)
    print(describe())
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), options.shape)
        with start(
            Path(name), here=False, max_total_tokens=options.rows * (2 * options.tokens + 128)
        ) as engine:
            for equal in (True, False):
                measure(engine, options.rows, options.tokens, options.repeat, equal=equal)


if __name__ == "__main__":
    main()
