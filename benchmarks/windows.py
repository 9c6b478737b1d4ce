"""Memory of a KV cache whose layers with a window have pages of their own, and its answers, beside
one that keeps all tokens: `python benchmarks/windows.py`, on a GPU.

Attention has the shape of gpt-oss-20b; experts are four of 32, the vocabulary is small, and weights
are random.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from dataclasses import replace

import torch

from sglang_lite import Engine
from sglang_lite.bench.shapes import make_tokenizer
from sglang_lite.runtime.executor.kv_pool_size import pool_bytes
from sglang_lite.runtime.loading.load_model import LoadedModel, precision
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)
from sglang_lite.runtime.models.weights.dummy import DummySource


def gpt_oss(layers: int, vocabulary: int = 32_000) -> ModelSpec:
    """Shape in which every second layer has a window of 128 tokens."""
    attention = AttentionSpec(
        64,
        8,
        64,
        64,
        64**-0.5,
        RopeSpec(theta=150_000.0),
        sinks=True,
        qkv_bias=True,
        output_bias=True,
    )
    experts = ExpertsSpec(
        4, 4, 2880, activation="clamped", router_bias=True, bias=True, alpha=1.702, limit=7.0
    )
    kinds = [LayerSpec(replace(attention, window=window), experts) for window in (128, None)]
    return ModelSpec(
        architecture="gpt_oss", vocab_size=vocabulary, hidden_size=2880, max_positions=131_072, rms_eps=1e-5,
        layers=tuple(kinds[i % 2] for i in range(layers)),
    )  # fmt: skip


def load(spec: ModelSpec) -> LoadedModel:
    device, kind = torch.device("cpu"), Decoder
    if torch.cuda.is_available():
        from sglang_lite.runtime.models.gpu_decoder import GpuDecoder  # needs Triton

        device, kind = torch.device("cuda:0"), GpuDecoder
    torch.manual_seed(0)
    with torch.inference_mode():
        model = kind(
            spec, DummySource(device), precision("auto", device), device, spec.max_positions
        )
    size = spec.vocab_size
    return LoadedModel(
        "gpt-oss", model, make_tokenizer(size), size, frozenset(), spec.max_positions
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    spec, drawn = gpt_oss(options.layers), random.Random(0)
    prompt = [drawn.randrange(10, spec.vocab_size) for _ in range(options.tokens - 32)]
    memory, logprobs = [], []
    # with which layers keep all tokens
    for tiers in ({}, {"enable_hierarchical_cache": True, "hicache_size": 1}):
        loaded = load(spec)
        sizes = {
            "context_length": options.tokens,
            "max_total_tokens": options.tokens,
            "step_tokens": 512,
        }
        with Engine.of(loaded, **sizes, **tiers) as engine:
            capacity = engine.core.capacity
            page, own = capacity.sizes.page_size, capacity.window_pages or capacity.pages
            memory.append(pool_bytes(loaded.model, capacity.pages, capacity.window_pages, page))
            began = time.perf_counter()
            answer = engine.generate(
                input_ids=prompt, sampling_params={"max_new_tokens": 31, "temperature": 0, "ignore_eos": True},
                return_logprob=True, top_logprobs_num=20,
            )  # fmt: skip
            took = time.perf_counter() - began
            found = answer["meta_info"]["output_top_logprobs"]
            logprobs.append(torch.tensor([[entry[0] for entry in each] for each in found]))
            print(
                f"{capacity.tokens:,} tokens, {own * page:,} in layers with a window: {memory[-1] / 2**20:.1f} MiB; "
                f"31 tokens after {len(prompt):,}: {took:.1f} s",
                flush=True,
            )
        del engine, loaded
        gc.collect()
    apart = float((logprobs[0] - logprobs[1]).abs().max())
    print(
        f"memory {memory[0] / memory[1]:.3f}; largest difference of 31 x 20 log-probabilities {apart:.1e}"
    )


if __name__ == "__main__":
    main()
