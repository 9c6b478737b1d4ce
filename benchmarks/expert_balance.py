"""How even the work of ranks with experts of their own is, before and after they are placed by what
is chosen.

    python benchmarks/expert_balance.py [--experts 256] [--layers 58] [--groups 32] [--redundant 0
    32] [--exponent 1.0]

Rows that choose an expert fall off by Zipf's law, in an order of their own in each layer: half of
them are placed by, the other half is what the placement meets. Given is the busiest group's share
over the mean, of all layers; and the processor time of placing all of them, which happens beside
the steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe
from sglang_lite.runtime.parallel.placement import balance_experts, rows_of_heaviest_group

_ROWS = 20_000  # of a layer, for each half


def drawn(count: int, exponent: float, draw: random.Random) -> tuple[list[int], list[int]]:
    """Two independent counts of the same layer's experts."""
    weights = [(rank + 1) ** -exponent for rank in range(count)]
    draw.shuffle(weights)
    halves = (Counter(draw.choices(range(count), weights, k=_ROWS)) for _ in range(2))
    first, second = ([half[expert] for expert in range(count)] for half in halves)
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--groups", type=int, default=32, help="groups of ranks, ep_size")
    parser.add_argument("--redundant", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--exponent", type=float, default=1.0)
    options = parser.parse_args()
    print(describe())
    draw = random.Random(0)
    layers = [drawn(options.experts, options.exponent, draw) for _ in range(options.layers)]
    for redundant in options.redundant:
        slots, ep = options.experts + redundant, options.groups
        began = time.process_time()
        placed = [balance_experts(known, slots, ep) for known, _ in layers]
        seconds = time.process_time() - began
        even = balance_experts([1] * options.experts, slots, ep)
        before, after = (
            [
                rows_of_heaviest_group(met, each, ep) * ep / sum(met)
                for (_, met), each in zip(layers, places)
            ]
            for places in ([even] * options.layers, placed)
        )
        print(
            f"{redundant:3} copies: busiest over mean {fmean(before):.2f} (worst layer {max(before):.2f}) in order, "
            f"{fmean(after):.2f} ({max(after):.2f}) placed; placing takes {seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
