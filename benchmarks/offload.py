"""Decoding with weights in the host's memory (`cpu_offload_gb`): the share of the link's rate that
a step reaches, and whether tokens are those of an engine with all weights on the GPU. Random
weights of a shape.

python benchmarks/offload.py --shape llama-3.1-8b --gigabytes 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, hf_config
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.kernels.pinned_memory import pin_memory, unpin_memory

GIB = 1 << 30
PROMPT = list(range(100, 228))


def link_rate(repeat: int = 8) -> float:
    """Bytes a second from pinned memory of the host to the GPU, in copies of a GiB."""
    host, device = pin_memory(GIB), torch.empty(GIB, dtype=torch.uint8, device="cuda")
    rates = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(GIB / (time.perf_counter() - began))
    unpin_memory(host.data_ptr())
    return statistics.median(rates)


def generated(engine: sgl.Engine, count: int) -> tuple[tuple[int, ...], float]:
    """Tokens of a greedy answer, and its seconds."""
    began = time.perf_counter()
    answer = engine.complete(
        PROMPT, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)
    )
    return answer.token_ids, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--gigabytes", type=int, nargs="+", default=[7], help="cpu_offload_gb")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2], help="offload_group_size")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--quantization", choices=["fp8", "int8", "int4"], help="weights of all engines"
    )
    args = parser.parse_args()
    rate = link_rate()
    weights = args.quantization or "16 bits"
    print(
        f"{torch.cuda.get_device_name()}, {args.shape}, {weights}: the link copies {rate / 1e9:.1f} GB/s"
    )
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_running": 8,
        "max_total_tokens": 20_000,
        "quantization": args.quantization,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(args.shape)))
        with sgl.Engine(folder, in_process=True, **settings) as engine:
            expected, _ = generated(engine, args.tokens)
        for gigabytes in args.gigabytes:
            for group in args.groups:
                offload: dict[str, Any] = {"cpu_offload_gb": gigabytes, "offload_group_size": group}
                with sgl.Engine(folder, in_process=True, **settings, **offload) as engine:
                    tokens, _ = generated(engine, args.tokens)
                    short, long = (
                        min(generated(engine, n)[1] for _ in range(3)) for n in (4, 4 + args.tokens)
                    )
                    step = (long - short) / args.tokens
                    size = engine.core.runner.model.offload.nbytes  # type: ignore[attr-defined] # of this process
                print(
                    f"{size / GIB:6.2f} GiB in groups of {group}: {step * 1e3:8.2f} ms a token, "
                    f"{size / step / rate:6.1%} of the link (bar 85 %); the same tokens: {tokens == expected}"
                )


if __name__ == "__main__":
    main()
