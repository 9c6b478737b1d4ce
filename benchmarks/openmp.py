"""How torch's threads wait for work: decoding on a quiet machine, and beside a busy process.

    python benchmarks/openmp.py [--rounds 3] [--settings ours OMP_WAIT_POLICY=passive …] [--new 64]

Each setting is measured once a round, in a process of its own, and the rounds alternate between all
of them, so that a drift of the machine hits all alike. Medians over the rounds, in ms a token (one
row) or a step (several). "ours" is what the engine does by itself, "torch's" its library's default.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

ROWS = 16
SETTINGS = {
    "ours": {},
    "torch's": {"GOMP_SPINCOUNT": "300000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    **{
        f"GOMP_SPINCOUNT={count}": {"GOMP_SPINCOUNT": str(count)}
        for count in (500, 1000, 2000, 4000, 10_000, 30_000)
    },
}
COLUMNS = ("one row", f"{ROWS} rows", "one row, busy")


def measure(model: str | None, new: int) -> list[float]:
    """One row and `ROWS` rows on the machine as it is, one row beside a process that computes: ms a
    step each.
    """
    import sglang_lite as sgl

    def decode(rows: int, count: int) -> float:
        """A step, without prefill and set-up."""
        seconds = []
        for tokens in (1, count + 1):
            started = time.perf_counter()
            engine.generate(
                input_ids=[[5 + i % 50, *range(10, 30)] for i in range(rows)],
                sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            )
            seconds.append(time.perf_counter() - started)
        return (seconds[1] - seconds[0]) / count * 1e3

    settings = {} if model is None else {"model": model}
    with sgl.Engine(
        device="cpu", prefix_cache=False, max_running=ROWS, in_process=True, **settings
    ) as engine:
        decode(1, 2)
        one = median(decode(1, new) for _ in range(3))
        many = median(decode(ROWS, max(1, new // 2)) for _ in range(3))
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            busy = median(decode(1, max(1, new // 8)) for _ in range(3))
        finally:
            other.kill()
            other.wait()
    return [one, many, busy]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--model")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.model, options.new)))
        return
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    model = [] if options.model is None else ["--model", options.model]
    command = [sys.executable, __file__, "--child", "--new", str(options.new), *model]
    found: dict[str, list[list[float]]] = {name: [] for name in options.settings}
    for _ in range(options.rounds):
        for name in options.settings:
            done = subprocess.run(
                command,
                env={**plain, **SETTINGS[name]},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':26}" + "".join(f"{column:>15}" for column in COLUMNS))
    for name, rounds in found.items():
        print(f"{name:26}" + "".join(f"{median(column):15.1f}" for column in zip(*rounds)))


if __name__ == "__main__":
    main()
