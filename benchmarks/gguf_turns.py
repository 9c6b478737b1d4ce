"""A GGUF file on this CPU, by turns with llama.cpp: start, memory, prefill of 600 words, and
decoding.

    python benchmarks/gguf_turns.py FILE [--repeat 3] [--threads 2] [--systems ours llama.cpp]

Every turn is a process of its own. "First token": from the start of Python until a token of a short
prompt has come. "Prefill": until the first token of 600 words that no cache has. "Rows": greedy
tokens behind prompts of 100 tokens, by the time that 64 take longer than 8. "Memory": PSS of the
process and its children after all of it. Medians, and in brackets the least and the largest.
llama.cpp comes with llama-cpp-python, which pip builds for this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

CACHE = 8192
ROWS = (1, 8)
QUESTION = "The capital of France is"
FIGURES = (
    "first token, s",
    "memory, GB",
    "prefill, tokens/s",
    *(f"{rows} rows, tokens/s" for rows in ROWS),
)


def words(start: int) -> str:
    """Returns 600 words; another start gives others from the first on."""
    names = (
        "river",
        "stone",
        "market",
        "winter",
        "letter",
        "garden",
        "silver",
        "bridge",
        "window",
        "teacher",
    )
    return " ".join(names[(start + 7 * i * i) % len(names)] for i in range(start, start + 600))


class Ours:
    def __init__(self, file: str, threads: int) -> None:
        import sglang_lite as sgl

        self.engine = sgl.Engine(file, device="cpu", max_total_tokens=CACHE)
        self.tokens = self.engine.tokenizer.encode

    def run(self, prompts: list[list[int]], new: int) -> None:
        """Generates greedily."""
        import threading

        from sglang_lite.protocol import SamplingParams

        left = len(prompts)
        done = threading.Event()
        errors: list[Exception] = []

        def sink(event: object) -> None:
            nonlocal left
            left -= 1
            if isinstance(event, Exception):
                errors.append(event)
            if not left:
                done.set()

        for prompt in prompts:
            self.engine.submit(
                prompt, SamplingParams(max_tokens=new, ignore_eos=True, temperature=0), sink=sink
            )
        done.wait()
        if errors:  # not raised in the sink, which would leave this thread waiting
            raise errors[0]


class LlamaCpp:
    def __init__(self, file: str, threads: int) -> None:
        from llama_batch import LlamaBatch

        self.batch = LlamaBatch(file, sequences=max(ROWS), tokens=CACHE, threads=threads)
        self.tokens, self.run = self.batch.tokens, self.batch.run


SYSTEMS = {"ours": Ours, "llama.cpp": LlamaCpp}


def measure(name: str, file: str, threads: int) -> None:
    """Prints "first" when the first token is there, and then the other figures."""
    system: Any = SYSTEMS[name](file, threads)
    system.run([system.tokens(QUESTION)], 1)
    print("first", flush=True)
    found: dict[str, float] = {}
    prefill = []
    for turn in range(4):
        prompt = system.tokens(words(turn))
        started = time.perf_counter()
        system.run([prompt], 1)
        prefill.append(len(prompt) / (time.perf_counter() - started))
    found["prefill, tokens/s"] = median(prefill[1:])
    found["tokens of a prompt"] = len(prompt)
    for rows in ROWS:
        prompts = [[1000 + (7 * row + at) % 5000 for at in range(100)] for row in range(rows)]
        system.run(prompts, 8)
        speeds = []
        for _ in range(3):
            started = time.perf_counter()
            system.run(prompts, 8)
            middle = time.perf_counter()
            system.run(prompts, 64)
            speeds.append(rows * 56 / (time.perf_counter() - middle - (middle - started)))
        found[f"{rows} rows, tokens/s"] = median(speeds)
    found["memory, GB"] = memory() / 1e9
    print(json.dumps(found), flush=True)
    os._exit(0)


def memory() -> int:
    """Returns the PSS of this process and its children, in bytes."""
    total, parents = 0, {os.getpid()}
    for process in sorted(int(each) for each in os.listdir("/proc") if each.isdigit()):
        try:
            parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            if process not in parents and parent not in parents:
                continue
            parents.add(process)
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def turn(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns what one process measures of a system."""
    root = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        __file__,
        options.file,
        "--threads",
        str(options.threads),
        "--child",
        name,
    ]
    started = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        first = time.perf_counter() - started
        if line != "first\n":
            raise RuntimeError(f"{name} printed {line!r}")
        return {"first token, s": first, **json.loads(process.stdout.readline())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="path of the GGUF file")
    parser.add_argument("--repeat", type=int, default=3, help="turns (default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each (default: 2)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child, options.file, options.threads)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.systems}
    for _ in range(options.repeat):
        for name in options.systems:
            found[name].append(turn(name, options))
            print(
                name,
                json.dumps({key: round(value, 2) for key, value in found[name][-1].items()}),
                flush=True,
            )
    for figure in FIGURES:
        for name, runs in found.items():
            values = [run[figure] for run in runs]
            print(
                f"{figure:22} {name:10} {median(values):9.2f} [{min(values):.2f}, {max(values):.2f}]"
            )


if __name__ == "__main__":
    main()
