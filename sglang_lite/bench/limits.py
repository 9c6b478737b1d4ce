"""Lower bound on the time that one or several GPUs need. All weights, keys and values are read once
per step, all matrix products run at the measured rate, and sums across GPUs run at the rate of
their links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sglang_lite.bench.workloads import Workload
from sglang_lite.runtime.models.spec import DenseSpec, FeedForwardSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of GPUs that share each layer.

    Attributes:
        bytes_per_s: bytes per second that a large copy on the device reads and writes, summed over
            all GPUs.
        flops_per_s: floating-point operations per second of a large bfloat16 product, of all GPUs
            together.
        gpus: number of GPUs.
        link_bytes_per_s: bytes per second of a large copy from one GPU to another.
    """

    bytes_per_s: float
    flops_per_s: float
    gpus: int = 1
    link_bytes_per_s: float = math.inf


def measure_rates(gpus: int = 1) -> Rates:
    """Measures the rates on the first GPU and, if there are several, on its link to the second."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _time_on_gpu(lambda: target.copy_(source))
    link = math.inf
    if gpus > 1:
        there = torch.empty_like(source, device="cuda:1")
        link = source.nbytes / _time_on_gpu(lambda: there.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return Rates(gpus * copy, gpus * 2 * 8192**3 / _time_on_gpu(lambda: a @ b), gpus, link)


def _time_on_gpu(run: object) -> float:
    assert callable(run)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch leaves it untyped
    for _ in range(5):
        run()
    begin.record()
    for _ in range(10):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e4


def estimate_minimum_seconds(
    spec: ModelSpec, work: Workload, rates: Rates, *, bits: int = 16
) -> float:
    """Returns the minimum seconds for a workload. First all prompts are computed, then each step
    generates one token per row. A step reads each row's keys and values once, and a shared prefix
    once for all rows. With several GPUs, each layer sums the hidden states of all tokens across
    GPUs twice. For each sum, a GPU sends its terms to the others, and then its share of the result.

    Args:
        bits: width of weights, keys and values; latents have 16 bits, as in the benchmarks.
    """
    layers = spec.layers
    hidden = spec.hidden_size
    pair = sum(attention.products_per_pair for attention in spec.attentions)
    seeing = 2 * sum(attention.absorbed_products_per_pair for attention in spec.attentions)
    active = sum(layer.active_weight_elements(hidden) for layer in layers)
    head = spec.vocab_size * hidden
    # Products of narrower numbers are faster by the same factor.
    size = bits // 8
    matmul = rates.flops_per_s * 16 / bits
    flops = 2 * (active + head)

    def weights(rows: int) -> float:
        read = sum(
            sum(mixer.weight_elements(hidden) for mixer in layer.mixers)
            + _feed_forward_weights(layer.feed_forward, hidden, rows)
            for layer in layers
        )
        return size * read + 2 * head

    # Seconds that the sums of one token take, with 16 bits per number.
    sums = 2 * len(layers) * 2 * hidden * 2 * (1 - 1 / rates.gpus) / rates.link_bytes_per_s

    token = (2 if spec.latent else size) * spec.kv_layout.numbers
    own = np.array(work.suffix_lengths)
    new = np.array(work.output_lengths)
    shared = 0 if work.cached else work.prefix_length
    seen = np.concatenate(
        ([shared * shared], own * (own + 2 * work.prefix_length))
    )  # pairs of tokens, halved because attention is causal
    attention = pair * float(seen.sum())
    tokens = int(shared + own.sum())
    prompts = max(
        2 * active * tokens / matmul + attention / rates.flops_per_s,
        weights(tokens) / rates.bytes_per_s,
    )
    steps = tokens * sums
    for step in range(1, int(new.max())):
        alive = new > step
        rows = int(alive.sum())
        read = (own[alive] + step).sum() + work.prefix_length * bool(rows)
        steps += max(weights(rows) / rates.bytes_per_s, flops * rows / matmul)
        steps += rows * sums + read * max(token / rates.bytes_per_s, seeing / rates.flops_per_s)
    return float(prompts + steps)


def _feed_forward_weights(spec: FeedForwardSpec, hidden: int, rows: int) -> int:
    """Returns how many weights of a feed-forward layer are read by a step with `rows` rows. For a
    mixture of experts, returns the number expected if the router chooses experts uniformly.
    """
    if isinstance(spec, DenseSpec):
        return spec.weight_elements(hidden)
    return spec.weight_elements(hidden, spec.count * (1 - (1 - spec.top_k / spec.count) ** rows))
