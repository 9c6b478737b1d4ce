"""Greedy decoding on this CPU: ours, and transformers' on the same file, in one run.

    python benchmarks/cpu_decode.py [--batches 1 8 32] [--new 64] [--dtypes auto int8] [--skip-peers]

Prompts of about 100 tokens, `--new` tokens each, medians of three runs. Decode time is what a longer generation takes
more than a short one, so that prefill and set-up cancel out.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import machine
import torch

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.models.resolve import resolve

TEXT = (
    "The lighthouse stood at the end of the long stone pier, and every evening the keeper climbed its two hundred and "
    "twelve steps to light the lamp. On clear nights the beam could be seen from the hills behind the town; on foggy "
    "nights nobody saw it at all, and the keeper rang a bell instead, once every minute, until the morning came. "
)
SHORT = 8


class Ours:
    def __init__(self, dtype: str) -> None:
        self.engine = sgl.Engine(dtype=dtype, prefix_cache=False, max_running=32)
        self.name = f"sglang_lite, {dtype}"

    def run(self, prompts: list[list[int]], new: int) -> None:
        import threading

        left, done = len(prompts), threading.Event()

        def sink(event: object) -> None:
            nonlocal left
            left -= 1
            if isinstance(event, Exception):
                raise event
            if not left:
                done.set()

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        for prompt in prompts:
            self.engine.submit(prompt, params, sink=sink)
        done.wait()

    def close(self) -> None:
        self.engine.close()


class Transformers:
    def __init__(self, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        path = resolve("smollm2-135m")
        self.model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype).eval()
        self.name = f"transformers, {str(dtype).removeprefix('torch.')}"

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=2,
        )  # fmt: skip

    def close(self) -> None:
        del self.model


def measure(system: Ours | Transformers, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """Seconds of prefill, and of one decode step."""
    system.run(prompts, SHORT)
    prefill, step = [], []
    for _ in range(3):
        started = time.perf_counter()
        system.run(prompts, 1)
        first = time.perf_counter() - started
        started = time.perf_counter()
        system.run(prompts, new)
        step.append((time.perf_counter() - started - first) / (new - 1))
        prefill.append(first)
    return median(prefill), median(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["auto", "int8"])
    parser.add_argument("--skip-peers", action="store_true")
    options = parser.parse_args()

    with sgl.Engine(max_running=1) as engine:
        ids = engine.tokenizer.encode(TEXT * 3)[:100]
    prompts = [[*ids[i % 50 :], *ids[: i % 50]] for i in range(max(options.batches))]
    bandwidth, rate = machine.read_bandwidth(), machine.matmul_rate()
    weights = 134.5e6
    print(machine.describe())
    print(f"memory reads {bandwidth / 1e9:.0f} GB/s, bf16 products {rate / 1e9:.0f} GFLOP/s")
    print(f"{'':30}{'batch':>6}{'prefill tok/s':>15}{'decode ms':>11}{'tok/s':>8}{'weights GB/s':>14}{'of reads':>10}")
    makers = [lambda dtype=dtype: Ours(dtype) for dtype in options.dtypes]
    if not options.skip_peers:
        makers += [lambda: Transformers(torch.bfloat16), lambda: Transformers(torch.float32)]
    sizes = {"auto": 0.625, "int8": 1.0, "bfloat16": 0.625, "float32": 4.0}  # bytes a weight at few rows
    for make in makers:
        system = make()
        name = system.name.split(", ")[1]
        size = (sizes if isinstance(system, Ours) else {"bfloat16": 2.0, "float32": 4.0})[name]
        for batch in options.batches:
            prefill, step = measure(system, prompts[:batch], options.new)
            per_weight = 2.0 if isinstance(system, Ours) and name in ("auto", "bfloat16") and batch > 3 else size
            moved = weights * per_weight / step
            print(
                f"{system.name:30}{batch:6}{batch * len(prompts[0]) / prefill:15,.0f}{step * 1e3:11.1f}"
                f"{batch / step:8,.0f}{moved / 1e9:14.1f}{moved / bandwidth:10.0%}",
                flush=True,
            )
        system.close()


if __name__ == "__main__":
    main()
