"""Loading of a checkpoint of random weights from files in the page cache, by one thread and by
several, by turns.

python benchmarks/loading.py --shape llama-3.1-8b --threads 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_lite.bench.shapes import SHAPES, hf_config
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.parameters import parameters
from sglang_lite.runtime.models.read_config import spec_from_config

SHARD = 4 << 30  # bytes


def write(folder: Path, shape: str) -> int:
    """Writes a checkpoint of random numbers, and returns its size in bytes."""
    config = json.loads(json.dumps(hf_config(shape)))
    (folder / "config.json").write_text(json.dumps(config))
    files: dict[str, str] = {}
    state: dict[str, torch.Tensor] = {}
    total = size = 0

    def put() -> None:
        name = f"model-{len(set(files.values())):05}.safetensors"
        save_file(state, folder / name)
        files.update(dict.fromkeys(state, name))
        state.clear()

    for each in parameters(spec_from_config(config, "config.json")):
        tensor = torch.empty(each.slices[0].shape, dtype=torch.bfloat16).fill_(0.01)
        state[each.slices[0].name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
        if size >= SHARD:
            put()
            size = 0
    put()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return total


def load_s(folder: Path, threads: int) -> float:
    """Seconds of loading the model; it is freed after it."""
    config = EngineConfig.make(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        load_threads=threads,
        compile_processes=0,
    )
    began = time.perf_counter()
    load_model(config, folder, iter)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        total = write(folder, args.shape)
        load_s(folder, 1)  # makes the context of a device
        found: dict[int, list[float]] = {1: [], args.threads: []}
        for _ in range(args.repeat):
            for threads, seconds in found.items():
                seconds.append(load_s(folder, threads))
    for threads, seconds in found.items():
        median = statistics.median(seconds)
        print(
            f"{threads:3} threads: {median:7.3f} s, {total / median / 1e9:6.2f} GB/s of {total / 1e9:.1f} GB"
        )
    ratio = statistics.median(found[1]) / statistics.median(found[args.threads])
    print(f"{args.threads} threads over one: {ratio:.2f}x (>= 2.5)")


if __name__ == "__main__":
    main()
