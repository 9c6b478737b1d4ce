"""A batch of programs on one GPU: handed over as they run, and node by node.

    python benchmarks/programs_gpu.py [--shape llama-3.1-8b] [--rows 256] [--tokens 16,128]
    [--repeat 3]

A program has 512 tokens of its own, then six generations with 32 tokens of text behind each, then a
selection among four. Weights are random. Programs/s, the median of some runs after one that warms
up; nothing of a run is cached from the last.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from engine_process import start

import sglang_lite as sgl
from sglang_lite.bench.shapes import text_from_ids, write_model

GENERATIONS = 6
_draw = random.Random(0)


def text(tokens: int) -> str:
    return text_from_ids([_draw.randrange(300, 10_000) for _ in range(tokens)])


BETWEEN = [text(32) for _ in range(GENERATIONS)]
CHOICES = [text(1) for _ in range(4)]


@sgl.function
def program(s: sgl.ProgramState, own: str, tokens: int) -> None:
    s += own
    for i, constant in enumerate(BETWEEN):
        s += sgl.gen(f"part {i}", max_tokens=tokens, ignore_eos=True) + constant
    s += sgl.select("verdict", CHOICES)


def seconds(kind: str, engine: sgl.Engine, rows: int, length: int, tokens: int) -> float:
    """Time of a batch whose texts are new."""
    named = program.bind(tokens=tokens)  # type: ignore[call-arg]  # some of them, which type checkers refuse
    given = [{"own": text(length)} for _ in range(rows)]
    begun = time.perf_counter()
    states = named.run_batch(
        given, backend=engine, push_down=kind != "node by node", num_threads=rows
    )
    assert {len(state["verdict"]) > 0 for state in states} == {True}
    return time.perf_counter() - begun


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--own", type=int, default=512, help="tokens of its own")
    parser.add_argument("--tokens", default="16,128", help="of each generation")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    kinds = ("handed over", "node by node")
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), options.shape)
        lengths = [int(tokens) for tokens in options.tokens.split(",")]
        room = options.rows * (options.own + GENERATIONS * (max(lengths) + 32) + 64)
        with start(Path(name), here=False, max_total_tokens=max(2 * room, 16_384)) as engine:
            for tokens in lengths:
                took: dict[str, list[float]] = {kind: [] for kind in kinds}
                for i in range(options.repeat + 1):
                    for kind in kinds:
                        found = seconds(kind, engine, options.rows, options.own, tokens)
                        if i:
                            took[kind].append(found)
                base = median(took["node by node"])
                for kind in kinds:
                    of = median(took[kind])
                    print(
                        f"{tokens:4} tokens, {kind:13} {options.rows / of:8.1f} programs/s  {base / of:.2f}x",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
