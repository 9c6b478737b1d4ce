"""Time of a decode step with weights in 4 and 8 bits, beside 16: `python benchmarks/few_bits.py
--shape llama-3.1-8b`.

Rows of random tokens generate twice, 16 and 80 tokens; the difference is 64 steps. `--workloads w1
plain64` adds whole workloads of `sglang-lite bench`, in seconds. A format at a time, as their
weights may not fit together. "Loading" is the most memory that was taken while loading, beside the
weights.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time

import torch

from sglang_lite import Engine
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.bench.workloads import WORKLOADS, run_workload

GPU = torch.cuda.is_available()
FORMATS = ("bfloat16", "int4", "nf4", "gguf", "int8", "fp8")


def step_ms(engine: Engine, rows: int, prompt: int, vocabulary: int, repeat: int) -> float:
    """Milliseconds of a step: the median of as many pairs of runs."""
    drawn = random.Random(0)
    ids = [[drawn.randrange(10, vocabulary - 10) for _ in range(prompt)] for _ in range(rows)]

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        engine.generate(
            input_ids=ids,
            sampling_params={"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0},
        )
        return time.perf_counter() - began

    seconds(16)
    return statistics.median((seconds(80) - seconds(16)) / 64 * 1000 for _ in range(repeat))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS[:2]), choices=FORMATS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=[], choices=WORKLOADS)
    options = parser.parse_args()
    print(f"{options.shape}, {options.prompt} tokens before; ms a step", flush=True)
    for name in options.formats:
        model = load_shape(options.shape, quantization=None if name == "bfloat16" else name)
        weights, peak = (
            (torch.cuda.memory_allocated() / 1e9, torch.cuda.max_memory_allocated() / 1e9)
            if GPU
            else (0, 0)
        )
        with Engine.of(model) as engine:
            words = SHAPES[options.shape].vocab_size
            times = [
                step_ms(engine, rows, options.prompt, words, options.repeat)
                for rows in options.rows
            ]
            cells = "  ".join(f"{rows}: {each:.3f}" for rows, each in zip(options.rows, times))
            for work in options.workloads:
                seconds = [
                    run_workload(engine, WORKLOADS[work]()).seconds for _ in range(options.repeat)
                ]
                cells += f"  {work}: {' '.join(f'{each:.3f}' for each in seconds)} s"
            print(
                f"{name:9} {cells}  ({weights:.1f} GB, loading {peak - weights:.2f} GB)", flush=True
            )
        del model
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
