"""Copies of the KV cache to the host and back, and the first token of a prompt that is there.

    python benchmarks/cache_tiers.py [--shape llama-3.1-8b] [--tokens 8192] [--folder /tmp/kv]

"rate": pages of the shape's cache, scattered on both sides, as a share of a plain copy between pinned memory and the
device of as many bytes; events around ten copies. "first token": a prompt of random tokens computed, found on the
device, on the host (after other prompts have taken its place), and in files (after `flush_cache`, which empties the
host); medians of `--repeat` prompts after one that warms up, in a process of its own thread. Weights are random.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe
from sglang_lite import Engine
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.runtime.executor.page_memory import GpuPageMemory, page_bytes
from sglang_lite.runtime.kernels import blocks
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane

PAGE, COPIES = 16, 10


def seconds(copy: Callable[[], object]) -> float:
    """Time of a copy on the device: ten between two events."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    copy()
    torch.cuda.synchronize()
    began.record()
    for _ in range(COPIES):
        copy()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1000 / COPIES


def rates(layers: int, heads: int, size: int, tokens: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    pages = tokens // PAGE
    layout = KVLayout(((Plane(heads, size), Plane(heads, size)),) * layers)
    cache = KVCache.allocate(layout, 2 * pages * PAGE, dtype, device)
    for plane in cache.planes:
        plane.normal_()
    memory = GpuPageMemory(cache.planes, PAGE, 2 * pages)
    total = pages * page_bytes(cache.planes, PAGE)
    plain = torch.empty(total, dtype=torch.uint8, device=device)
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    down = seconds(lambda: pinned.copy_(plain, non_blocking=True))
    up = seconds(lambda: plain.copy_(pinned, non_blocking=True))
    gb = total / 1e9
    print(f"plain copy of {gb:.2f} GB: to the host {gb / down:.1f} GB/s, back {gb / up:.1f}", flush=True)
    draw = np.random.default_rng(0)
    drawn = [draw.permutation(2 * pages)[:pages].astype(np.int32) for _ in range(2)]
    at, slots = (torch.from_numpy(each).to(device) for each in drawn)
    copy = blocks.BlockCopy(cache.planes, torch.from_numpy(memory.rows.reshape(-1)), PAGE)
    for programs in PROGRAMS:
        blocks.PROGRAMS = blocks.PROGRAMS_TO_HOST = programs
        read, write = (seconds(partial(copy, at, slots, to_host=way)) for way in (True, False))
        print(
            f"{programs} programs: to the host {gb / read:.1f} GB/s ({down / read:.2f}), back {gb / write:.1f} "
            f"({up / write:.2f})", flush=True,
        )  # fmt: skip
    before = [plane.clone() for plane in cache.planes]
    copy(at, slots, to_host=True)
    for plane in cache.planes:
        plane.view(plane.shape[0], -1, PAGE * plane.shape[2])[:, at.long()] = 0
    copy(at, slots, to_host=False)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(before, cache.planes))
    print("bit for bit", flush=True)


PROGRAMS = (16, 32, 64, 128, 264)


def first_tokens(shape: str, tokens: int, folder: str | None, repeat: int) -> None:
    files = {} if folder is None else {"hicache_storage_backend": "file", "hicache_storage_dir": folder}
    config: dict[str, Any] = {
        "max_total_tokens": 2 * tokens + 2048,
        "context_length": tokens + 1024,
        "max_running": 4,
        "cuda_graphs": False,
    }
    tiers: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, **files}
    with Engine.of(load_shape(shape), **config, **tiers) as engine:
        vocabulary = SHAPES[shape].vocab_size

        def asked(seed: int) -> tuple[float, int]:
            drawn = random.Random(seed)
            ids = [drawn.randrange(10, vocabulary - 10) for _ in range(tokens)]
            began = time.perf_counter()
            params = {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0}
            answer: Any = engine.generate(input_ids=ids, sampling_params=params)
            return time.perf_counter() - began, answer["meta_info"]["cached_tokens"]

        found: dict[str, list[tuple[float, int]]] = {}
        for i in range(repeat + 1):
            one: dict[str, tuple[float, int]] = {"computed": asked(10 * i), "device": asked(10 * i)}
            asked(10 * i + 1), asked(10 * i + 2)
            one["host"] = asked(10 * i)
            if folder is not None:
                time.sleep(1.0)
                engine.flush_cache()
                one["files"] = asked(10 * i)
            if i:
                for name, value in one.items():
                    found.setdefault(name, []).append(value)
        base = statistics.median(x for x, _ in found["computed"])
        for name, values in found.items():
            took = statistics.median(x for x, _ in values)
            print(f"{name:9} {1000 * took:8.1f} ms  {took / base:.3f} of computing  cached {values[-1][1]}", flush=True)
        print({k: v for k, v in engine.stats().items() if "token" in k}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--folder")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(describe())
    if torch.cuda.is_available():
        rates(32, 8, 128, options.tokens)
    first_tokens(options.shape, options.tokens, options.folder, options.repeat)


if __name__ == "__main__":
    main()
