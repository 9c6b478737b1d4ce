"""Kernels of an engine's steps by time, on its first GPU: of steps that compute prompts, and of
steps that decode.

    python benchmarks/step_kernels.py [--shape llama-3.1-8b] [--tp 1] [--pp 1] [--rows 256]
    [--prompt 512] [--w1]

Random weights. By torch's profiler, which makes steps somewhat slower; "between" is the time in
which no kernel runs. `--w1` runs the workload of that name then, once, which is not profiled.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, hf_config
from sglang_lite.bench.workloads import WORKLOADS, generate_all, run_workload
from sglang_lite.protocol import SamplingParams

MOST = 14  # kernels of a table
PROFILE_S = 0.6  # of decoding
LONGEST = 1000  # tokens of an answer


def table(path: str, steps: str) -> None:
    """Prints the kernels of a trace by their time in a step.

    Args:
        path: the trace.
        steps: what the trace calls its steps.
    """
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    count = sum(
        each.get("cat") == "user_annotation" and steps in each["name"].split(" and ")
        for each in events
    )
    ran = sorted(
        (each["ts"], each["dur"], each["name"])
        for each in events
        if each.get("cat") in ("kernel", "gpu_memcpy")
    )
    if not ran or not count:
        print(f"{steps}: no steps, or no kernels", flush=True)
        return
    times, calls = Counter[str](), Counter[str]()
    between, end = 0.0, ran[0][0]
    for began, took, name in ran:
        between, end = between + max(began - end, 0.0), max(end, began + took)
        times[name], calls[name] = times[name] + took, calls[name] + 1
    span = end - ran[0][0]
    print(
        f"{steps}: {count} steps of {span / count:.1f} us, {between / count:.1f} between kernels",
        flush=True,
    )
    for name, total in times.most_common(MOST):
        each = f"{calls[name] / count:7.1f} x {total / calls[name]:8.1f} us"
        print(f"  {total / count:9.1f} us {total / span:4.0%} {each}  {name[:80]}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    for name, default in (("tp", 1), ("pp", 1), ("rows", 256), ("prompt", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--w1", action="store_true")
    options = parser.parse_args(arguments)
    dice = random.Random(0)
    prompts = [
        [dice.randrange(5, 9000) for _ in range(options.prompt)] for _ in range(options.rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(options.shape)))
        began = time.perf_counter()
        with sgl.Engine(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", tp_size=options.tp,
            pp_size=options.pp, max_total_tokens=300_000,
        ) as engine:  # fmt: skip
            print(
                f"{options.shape}, tp {options.tp}, pp {options.pp}: {time.perf_counter() - began:.1f} s",
                flush=True,
            )
            engine.generate(
                input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 8, "ignore_eos": True}
            )
            engine.start_profile(folder)
            generate_all(engine, prompts, (1,) * options.rows, 1.0)
            table(engine.stop_profile(), "prefill")
            params = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
            tickets = [engine.submit(prompt, params, sink=lambda _: None) for prompt in prompts]
            while engine.stats()["running"] < options.rows:
                time.sleep(0.01)
            engine.start_profile(folder)
            time.sleep(PROFILE_S)
            table(engine.stop_profile(), "decode")
            for ticket in tickets:
                ticket.abort()
            if options.w1:
                work = WORKLOADS["w1"]()
                found = run_workload(engine, work)
                rate = sum(work.output_lengths) / found.seconds
                print(
                    f"w1: {found.seconds:.2f} s, {found.steps} steps, {rate:.0f} tokens/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
