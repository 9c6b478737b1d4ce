"""Latent attention on one GPU: decoding in TB/s of latents read and TFLOP/s, prefill in TFLOP/s of
the causal products.

    python benchmarks/latent_attention.py            # DeepSeek's latents: 512 numbers and 64 rotary ones
    python benchmarks/latent_attention.py --sweep    # decoding by the kernels for all cards, with several launches, too

Latents lie in pages of 16 tokens, scattered. "share" is that of the rate of a large copy. Products
are those of absorbed queries: 1,088 multiplications for a head and a token that is seen. Medians of
`triton.testing.do_bench`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import triton

from sglang_lite.bench.limits import measure_rates
from sglang_lite.runtime.attention import latent as attention
from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.latent import LatentAttention
from sglang_lite.runtime.kernels import latent_attention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launch_config import Launch

PAGE, RANK, ROPE_DIM = 16, 512, 64
DECODING = {  # rows, tokens of each, heads
    "64 x 8,192, 16 heads": (64, 8192, 16),
    "64 x 8,192, 128 heads": (64, 8192, 128),
    "64 x 1,024, 16 heads": (64, 1024, 16),
    "1 x 1,024, 16 heads": (1, 1024, 16),
    "1 x 16,384, 16 heads": (1, 16384, 16),
}
PREFILL = {"8,192 new, 16 heads": (8192, 0, 16), "512 after 4,096, 16 heads": (512, 4096, 16)}
LAUNCHES = [
    (tokens, warps, stages) for warps in (4, 8) for tokens in (16, 32, 64) for stages in (2, 3)
]


def case(rows: int, length: int, new: int) -> tuple[KVCache, DevicePlan]:
    """A cache of rows of so many tokens, and a plan of the last `new` ones of each."""
    pages = -(-length // PAGE)
    plane = torch.randn(
        (1, rows * pages * PAGE, RANK + ROPE_DIM), device="cuda", dtype=torch.bfloat16
    )
    table = torch.randperm(rows * pages, device="cuda").to(torch.int32).view(rows, pages)
    decoding = rows if new == 1 else 0
    starts = [] if decoding else [(row, at) for row in range(rows) for at in range(0, new, 128)]
    blocks = [(row * new + at, min(128, new - at), row, length - new + at) for row, at in starts]
    blocks.sort(key=lambda block: -block[3])
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    plan = DevicePlan(
        ids=slots, slots=slots, positions=slots * 0 + length - 1, last_tokens=slots, page_table=table, page_size=PAGE,
        decoding=decoding, shared=None, blocks=torch.tensor(blocks, dtype=torch.int32, device="cuda").view(-1, 4),
        block_size=128,
    )  # fmt: skip
    return KVCache((plane,), (plane,)), plan


def milliseconds(heads: int, cache: KVCache, plan: DevicePlan, tokens: int) -> float:
    half = torch.bfloat16
    requirements = AttentionRequirements(
        heads, 1, RANK + ROPE_DIM, half, half, torch.device("cuda"), max_rows=max(plan.decoding, 1), max_chunks=0,
        latent=RANK,
    )  # fmt: skip
    q = torch.randn((tokens, heads, RANK + ROPE_DIM), device="cuda", dtype=half)
    out = torch.empty_like(q)
    attend = LatentAttention(requirements).plan_step(plan).attend
    run = lambda: attend(q, cache, 0, out, AttentionRules(0.07))  # noqa: E731 # what is measured
    return float(triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median"))


def launches(sweep: bool, heads: int) -> Iterator[tuple[str, Launch | None]]:
    """Names and launches: None for the one in use, then others that can be tried."""
    yield "", None
    queries = latent_attention.heads_per_program(heads)
    for tokens, warps, stages in LAUNCHES if sweep else ():
        if (warps == 8) >= (queries >= 64):
            yield (
                f"  {tokens} tokens, {warps} warps, {stages} stages",
                Launch(queries, tokens, warps, stages),
            )


@contextmanager
def using(launch: Launch | None) -> Iterator[None]:
    """Context in which decoding is by the kernels for all cards with that launch; None: by what is
    in use.
    """
    with ExitStack() as patches:
        if launch is not None:
            patches.enter_context(
                mock.patch.object(latent_attention, "latent_launch", return_value=launch)
            )
            for module in (latent_attention, attention):
                patches.enter_context(mock.patch.object(module, "hopper_module", return_value=None))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sweep", action="store_true", help="kernels for all cards with several launches, too"
    )
    sweep = parser.parse_args().sweep
    torch.manual_seed(0)
    rates = measure_rates()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, "
          f"copies {rates.bytes_per_s / 1e12:.2f} TB/s, products {rates.flops_per_s / 1e12:.0f} TFLOP/s")  # fmt: skip
    print(f"{'':44}{'us':>9}{'TB/s':>7}{'share':>7}{'TFLOP/s':>9}")
    for name, (rows, length, heads) in DECODING.items():
        cache, plan = case(rows, length, 1)
        read, products = (
            rows * length * (RANK + ROPE_DIM) * 2,
            rows * length * heads * (2 * RANK + ROPE_DIM),
        )
        for other, launch in launches(sweep and length == 8192, heads):
            with using(launch):
                try:
                    took = milliseconds(heads, cache, plan, rows)
                except triton.TritonError as error:
                    print(f"{other:44}{str(error)[:60]}")
                    continue
            rate = read / took / 1e9
            print(f"{other or name:44}{took * 1e3:9.1f}{rate:7.2f}{rate * 1e12 / rates.bytes_per_s:7.0%}"
                  f"{2 * products / took / 1e9:9.0f}", flush=True)  # fmt: skip
    for name, (new, before, heads) in PREFILL.items():
        cache, plan = case(1, new + before, new)
        took = milliseconds(heads, cache, plan, new)
        twice = heads * (2 * RANK + ROPE_DIM) * new * (2 * before + new + 1)  # a product and a sum
        print(f"prefill: {name:35}{took * 1e3:9.1f}{'':14}{twice / took / 1e9:9.0f}", flush=True)


if __name__ == "__main__":
    main()
