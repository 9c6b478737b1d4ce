"""Kernels as they are compiled, without a GPU: `python -m tests.runtime.kernels.compiled 8` compiles all of
them in eight processes (an hour of processor time) and writes compiled.tsv. Words select cases: `… compiled 8 A10 256`.

In a process of its own, as Triton's interpreter, which other tests run, stays in what the compiler calls.
"""

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton

from sglang_lite.runtime.kernels.variants import Variant, telling
from tests.runtime.kernels.launches import Case, cases

TABLE = Path(__file__).with_name("compiled.tsv")
_READ = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(case: Case, only: str = "") -> tuple[int, int, str]:
    """Compiles a case's kernels, or the first that is called `only`.

    Returns:
        Bytes of shared memory that a program takes and bytes that a thread spills, of the worst of them, and PTX of
        all.
    """
    shared = spilled = 0
    ptx = []

    def compile_one(variant: Variant) -> None:
        nonlocal shared, spilled
        if only and (variant.name != only or ptx):
            return
        kernel = variant.compile()
        shared = max(shared, kernel.metadata.shared)
        spilled = max(spilled, _spilled(kernel.asm["cubin"]))
        ptx.append(kernel.asm["ptx"])

    with telling(case.card, compile_one):
        case.launch()
    assert ptx, f"{case} launches nothing"
    return shared, spilled, "\n".join(ptx)


def told(of: list[Case]) -> set[str]:
    """Names of the kernels that cases launch; none is compiled."""
    names: set[str] = set()
    for case in of:
        with telling(case.card, lambda variant: names.add(variant.name)):
            case.launch()
    return names


def _spilled(cubin: bytes) -> int:
    """Bytes of a thread's stack: where registers overflow."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ran = subprocess.run([_READ, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return max(int(size) for size in re.findall(r"STACK:(\d+)", ran.stdout))


def read_table() -> dict[str, tuple[int, int]]:
    """Bytes of shared memory and bytes spilled, by case."""
    rows = (line.split("\t") for line in TABLE.read_text().splitlines() if line[:1] != "#")
    return {name: (int(shared), int(spilled)) for name, shared, spilled in rows}


def main(jobs: str, *words: str) -> None:
    known = [case for case in cases() if all(word in re.split(r"[ ,]+", str(case)) for word in words)]
    table = read_table() if TABLE.exists() else {}
    with ProcessPoolExecutor(int(jobs), mp_context=get_context("spawn")) as pool:
        for case, (shared, spilled, _) in zip(known, pool.map(compiled, known)):
            table[str(case)] = shared, spilled
            print(case, shared, spilled, flush=True)
    lines = [f"{case}\t{table[str(case)][0]}\t{table[str(case)][1]}" for case in cases() if str(case) in table]
    head = f"# Triton {triton.__version__}: bytes of shared memory that a program takes, bytes that a thread spills"
    TABLE.write_text("\n".join([head, *lines]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
