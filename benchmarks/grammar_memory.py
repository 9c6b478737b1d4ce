"""Memory that an engine and its processes that compile keep of constraints that are meant to break
them.

    python benchmarks/grammar_memory.py [--constraints N] [--seconds S]

The hostile set of the tests (tests/constraints/hostile.py), one request each, through an engine of
the default model; resident memory of the caller and its processes at the start, at the end, and so
many seconds later.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import machine

import sglang_lite as sgl
from sglang_lite.constraints.coerce import as_constraint
from tests.constraints.hostile import AMBIGUOUS, KEPT, REFUSED

STARTS = [sgl.Regex("[ab]+"), sgl.Grammar('root ::= "a"{2} root | "b"'), {"type": "object"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--constraints", type=int)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    print(machine.describe())
    hostile = [
        constraint
        for constraint, *_ in (*KEPT.values(), *REFUSED.values())
        if constraint is not None
    ]
    hostile += [sgl.Grammar(grammar) for grammar, _ in AMBIGUOUS.values()]
    with sgl.Engine(in_process=True) as engine:
        for constraint in STARTS:  # the engines and a process are there
            ask(engine, constraint)
        start = told("start", 0)
        kept = sum(ask(engine, constraint) for constraint in islice(hostile, options.constraints))
        told(f"{kept} of {len(hostile)} answered", start)
        time.sleep(options.seconds)
        told(f"{options.seconds:g} s later", start)


def ask(engine: sgl.Engine, constraint: object) -> bool:
    try:
        engine.complete("a", sgl.SamplingParams(max_tokens=4), as_constraint(constraint))
    except sgl.ParameterError:  # its shortest text is longer: it was compiled all the same
        return True
    except sgl.SglError:
        return False
    return True


def told(when: str, start: float) -> float:
    """Prints the megabytes of now; gives their sum."""
    caller, *processes = (resident(pid) for pid in (os.getpid(), *children()))
    total = caller + sum(processes)
    print(
        f"{when}: caller {caller:.0f} MB, processes {[round(each) for each in processes]}, {total - start:+.0f} MB"
    )
    return total


def children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        if int(parent) == os.getpid():
            found.append(int(stat.parent.name))
    return found


def resident(pid: int) -> float:
    return (
        int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    )


if __name__ == "__main__":
    main()
