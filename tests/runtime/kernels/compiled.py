"""Kernels as they are compiled, without a GPU: `python -m tests.runtime.kernels.compiled 8`
compiles in eight processes what is missing in compiled.tsv or has changed since (all of it: half an
hour of processor time), and writes it there. Words select cases: `… compiled 8 A10 256`.

The table has a row for each version of Triton that compiled a case: that of the tests, and those
that machines with a GPU have. Another version than the installed one is a folder before it: `pip
download --no-deps triton==3.6.0`, unzip the wheel, and `PYTHONPATH=folder python -m
tests.runtime.kernels.compiled 8`.

Of 57 cases that both have compiled (2026-11-28), 3.9.0 takes as much shared memory as 3.6.0 in 48
and 11 % more in the adapters' (40,960 bytes for 36,864); `invariant 1` with heads of 256 takes
137,216 for 86,016, and spills nothing. Most cases differ by up to 150 spilled bytes; the most
outside float32 are 568 with 3.6.0 and 776 with 3.9.0 (`invariant 256`, heads of 256). All are
within the limits.

In a process of its own, as Triton's interpreter, which other tests run, stays in what the compiler
calls.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path

import triton

from sglang_lite.runtime.kernels.variants import KernelVariant, intercept_launches
from tests.runtime.kernels.launches import Case, cases

TABLE = Path(__file__).with_name("compiled.tsv")
_READ = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a case's kernels.

    Attributes:
        triton: version that compiled them.
        shared: bytes of shared memory that a program takes, of the worst of them.
        spilled: bytes that a thread spills, of the worst.
        digest: of Triton's version and all that they were compiled from.
    """

    triton: str
    shared: int
    spilled: int
    digest: str


def compiled(case: Case) -> Compiled:
    """Compiles a case's kernels."""
    variants = variants_of(case)
    kernels = [variant.compile() for variant in variants]
    shared = max(kernel.metadata.shared for kernel in kernels)
    spilled = max(_spilled(kernel.asm["cubin"]) for kernel in kernels)
    return Compiled(triton.__version__, shared, spilled, _digest(variants))


def ptx(case: Case, name: str) -> str:
    """Code of the first of a case's kernels that is called `name`."""
    variant = next(variant for variant in variants_of(case) if variant.name == name)
    return str(variant.compile().asm["ptx"])


def is_current(case: Case, row: Compiled | None) -> bool:
    """True where a result is of what the case's kernels are compiled from now."""
    return row is not None and row.digest == _digest(variants_of(case))


def _digest(variants: list[KernelVariant]) -> str:
    """Short name of sources, arguments and options, and of Triton's version."""
    contents = sorted(variant.content for variant in variants)
    return hashlib.sha256(f"{triton.__version__} {contents}".encode()).hexdigest()[:12]


def variants_of(case: Case) -> list[KernelVariant]:
    """Variants of kernels that a case launches."""
    variants: list[KernelVariant] = []
    with intercept_launches(case.properties, variants.append):
        case.launch()
    assert variants, f"{case} launches nothing"
    return variants


def told(of: list[Case]) -> set[str]:
    """Names of the kernels that cases launch; none is compiled."""
    return {variant.name for case in of for variant in variants_of(case)}


def _spilled(cubin: bytes) -> int:
    """Bytes of a thread's stack: where registers overflow."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ran = subprocess.run(
            [_READ, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return max(int(size) for size in re.findall(r"STACK:(\d+)", ran.stdout))


def read_table() -> dict[tuple[str, str], Compiled]:
    """The last results, by case and version of Triton."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = (line.split("\t") for line in lines if line[:1] != "#")
    return {
        (name, by): Compiled(by, int(shared), int(spilled), digest)
        for name, by, shared, spilled, digest in rows
    }


def write_table(table: dict[tuple[str, str], Compiled]) -> None:
    """Leaves results in the order of the cases, without those that are none any more."""
    head = "# Triton's version, bytes of shared memory that a program takes, bytes that a thread spills, digest of all"
    versions = sorted({version for _, version in table})
    rows = [
        (str(case), version)
        for case in cases()
        for version in versions
        if (str(case), version) in table
    ]
    lines = ["\t".join(map(str, (name, *astuple(table[name, version])))) for name, version in rows]
    TABLE.write_text("\n".join([head, *lines]) + "\n")


def update(pool: Executor, *words: str) -> list[str]:
    """Compiles what the table lacks of this version of Triton, or has of other kernels.

    Args:
        pool: of processes that do it.
        words: all of which are in the names of the cases that are looked at.

    Returns:
        Names of the cases that were compiled.
    """
    asked = [
        case for case in cases() if all(word in re.split(r"[ ,]+", str(case)) for word in words)
    ]
    table = read_table()
    rows = [table.get((str(case), triton.__version__)) for case in asked]
    stale = [
        case
        for case, current in zip(asked, pool.map(is_current, asked, rows, chunksize=8))
        if not current
    ]
    # what was never compiled comes first
    stale.sort(key=lambda case: (str(case), triton.__version__) in table)
    print(f"{len(stale)} of {len(asked)} cases are to be compiled", flush=True)
    for case, row in zip(stale, pool.map(compiled, stale)):
        table[str(case), row.triton] = row
        print(case, row.shared, row.spilled, flush=True)
        write_table(table)  # at once, so that nothing is lost when it is interrupted
    return [str(case) for case in stale]


def main(jobs: str, *words: str) -> None:
    with ProcessPoolExecutor(int(jobs), mp_context=get_context("spawn")) as pool:
        print(f"{len(update(pool, *words))} cases were compiled")


if __name__ == "__main__":
    main(*sys.argv[1:])
