"""Start of an engine on a CPU, with the default model or `--model`, beside Python's `import torch`,
by turns: seconds on the clock and of the processor, which other work on the machine changes less.
`--other TREE` also starts another version's.

    python benchmarks/ready.py --repeat 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORT = "import torch"
START = """
import os
import sglang_lite as sgl

if __name__ == "__main__":
    sgl.Engine({model!r}, device="cpu")
    for process in sorted((int(each) for each in os.listdir("/proc") if each.isdigit()), key=os.getpid().__ne__):
        try:
            fields = open(f"/proc/{{process}}/stat").read().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if os.getpid() in (process, int(fields[1])):
            print((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    os._exit(0)
"""


def seconds(code: str, tree: Path) -> tuple[float, list[float]]:
    """Time until a program has ended, and what it printed: seconds of the processor, of itself and
    of its engine.
    """
    # With bytecode kept, as on most machines: torch's is there, too.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    before, started = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    wall, after = time.perf_counter() - started, os.times()
    spent = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return wall, [float(line) for line in done.stdout.split()] or [spent]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5, help="turns (default: 5)")
    parser.add_argument(
        "--model", default="smollm2-135m", help="name or path of the model (default: smollm2-135m)"
    )
    parser.add_argument(
        "--other", type=Path, metavar="TREE", help="the folder of another version (default: none)"
    )
    options = parser.parse_args()
    start = START.format(model=options.model)
    ways = {IMPORT: (IMPORT, ROOT), "engine": (start, ROOT)}
    if options.other is not None:
        ways["engine of the other version"] = (start, options.other)
    found: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in ways}
    for _ in range(options.repeat):
        for name, way in ways.items():
            found[name].append(seconds(*way))
    for name, runs in found.items():
        wall = statistics.median(run[0] for run in runs)
        times = statistics.median(run[0] / base[0] for run, base in zip(runs, found[IMPORT]))
        parts = [f"{statistics.median(part):.2f}" for part in zip(*(run[1] for run in runs))]
        print(
            f"{name:28} {wall:6.2f} s, {times:.2f} of `import torch`; processor {' + '.join(parts)} s"
        )


if __name__ == "__main__":
    main()
