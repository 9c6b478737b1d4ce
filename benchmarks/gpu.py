"""The runtime on one GPU: random weights of a real model's shape, and the workloads that issue 5 names.

python benchmarks/gpu.py --shape llama-3.1-8b [--workloads w1 decode1 fork64 fewshot prefix plain64] [--profile]
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from sglang_lite.protocol import Generation, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.engine import Engine
from sglang_lite.runtime.load import LoadedModel, precision
from sglang_lite.runtime.models.device_decoder import DeviceDecoder
from sglang_lite.runtime.models.spec import ModelSpec, RopeSpec
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.tokens.tokenizer import Tokenizer


def shape(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: object) -> ModelSpec:
    return ModelSpec(
        architecture="llama", vocab_size=vocab, hidden_size=hidden, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=128, intermediate_size=inner, max_positions=16384, rms_eps=1e-5,
        rope=RopeSpec(theta=5e5), scale=128**-0.5, windows=(None,) * layers, **more,
    )  # fmt: skip


SHAPES = {
    "llama-3.1-8b": shape(4096, 32, 32, 8, 14336, 128_256),
    "qwen3-0.6b": shape(1024, 28, 16, 8, 3072, 151_936, qk_norm=True, tied_embeddings=True),
    "qwen3-14b": shape(5120, 40, 40, 8, 17408, 151_936, qk_norm=True),
}


def load(name: str) -> LoadedModel:
    spec, device = SHAPES[name], torch.device("cuda:0")
    with torch.inference_mode():
        model = DeviceDecoder(spec, DummySource(device), precision("auto", device), device, spec.max_positions)
    words = [f"t{i} " for i in range(spec.vocab_size)]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer = Tokenizer(backend, [word.encode() for word in words], [], eos_ids=[])
    return LoadedModel(name, model, tokenizer, spec.vocab_size, frozenset(), spec.max_positions)


def run(engine: Engine, prompts: list[list[int]], new: list[int], temperature: float = 0.0) -> float:
    """Seconds until all are done."""
    done, left = threading.Event(), len(prompts)
    failed: list[object] = []

    def sink(event: object) -> None:
        nonlocal left
        if not isinstance(event, Generation):
            failed.append(event)
        left -= 1
        if not left:
            done.set()

    started = time.perf_counter()
    for i, (prompt, count) in enumerate(zip(prompts, new)):
        params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=i)
        engine.submit(prompt, params, sink=sink)
    done.wait()
    if failed:
        raise RuntimeError(f"{len(failed)} failed: {failed[0]!r}")
    return time.perf_counter() - started


def ids(count: int, draw: random.Random) -> list[int]:
    return [draw.randint(0, 10000) for _ in range(count)]


@dataclass(frozen=True)
class Result:
    name: str
    seconds: float
    tokens: int
    steps: int


def workload(name: str, engine: Engine) -> Result:
    draw = random.Random(1)
    before = engine.stats()["steps"]
    if name == "w1":
        random.seed(0)
        prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
        new = [random.randint(100, 1024) for _ in range(256)]
        seconds = run(engine, prompts, new, 0.6)
    elif name == "decode1":
        prompts, new = [ids(128, draw)], [256]
        seconds = run(engine, prompts, new)
    elif name == "fork64":
        prefix = ids(8192, draw)
        prompts, new = [[*prefix, *ids(1, draw)] for _ in range(64)], [256] * 64
        seconds = run(engine, prompts, new)
    elif name in ("fewshot", "prefix"):
        prefix = ids(2048, draw)
        run(engine, [prefix], [1])
        prompts = [prefix + ids(64, draw) for _ in range(256)]
        new = [128 if name == "fewshot" else 64] * 256
        seconds = run(engine, prompts, new)
    elif name == "plain64":
        prompts, new = [ids(128, draw) for _ in range(64)], [256] * 64
        seconds = run(engine, prompts, new)
    elif name == "prefill":
        prompts, new = [ids(8192, draw)], [1]
        seconds = run(engine, prompts, new)
    else:
        raise SystemExit(f"no workload {name}")
    return Result(name, seconds, sum(new), engine.stats()["steps"] - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument(
        "--workloads", nargs="+", default=["plain64", "decode1", "fork64", "fewshot", "prefix", "prefill", "w1"]
    )
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    options, rest = parser.parse_known_args()
    settings = dict(zip(rest[::2], rest[1::2]))
    config = {name.removeprefix("--"): eval(value) for name, value in settings.items()}
    started = time.perf_counter()
    loaded = load(options.shape)
    loading = time.perf_counter() - started
    with Engine.of(loaded, **config) as engine:
        ready = time.perf_counter() - started
        run(engine, [[1, 2, 3]], [4])
        first = time.perf_counter() - started
        print(f"{options.shape}: weights {loading:.1f} s, ready {ready:.1f} s, first token {first:.1f} s")
        print(engine.stats(), EngineConfig.make(**config).sized(gpu=True), flush=True)
        print(f"{'':10}{'seconds':>9}{'out tok/s':>11}{'steps':>7}{'ms/step':>9}")
        for name in options.workloads:
            for _ in range(options.repeat):
                engine.flush_cache()
                r = workload(name, engine)
                print(
                    f"{r.name:10}{r.seconds:9.3f}{r.tokens / r.seconds:11,.0f}{r.steps:7}"
                    f"{r.seconds / r.steps * 1e3:9.3f}",
                    flush=True,
                )
            if options.profile:
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    workload(name, engine)
                print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=50))


if __name__ == "__main__":
    main()
