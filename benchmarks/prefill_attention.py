"""Prefill attention on one Hopper GPU: its own kernel and the one for all GPUs, in TFLOP/s of the
causal products.

    python benchmarks/prefill_attention.py

Keys and values lie in pages of 16 tokens, scattered; blocks of 128 queries, the longest first, as
the engine has them. Medians of `triton.testing.do_bench`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import triton

from sglang_lite.runtime.kernels import prefill_attention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache

PAGE = 16
CASES = {  # rows, heads, KV heads, size of a head, new tokens, tokens before them
    "8,192": (1, 32, 8, 128, 8192, 0),
    "8,192, 16 heads": (1, 16, 8, 128, 8192, 0),
    "4,096 after 1,024": (1, 32, 8, 128, 4096, 1024),
    "2,048": (1, 32, 8, 128, 2048, 0),
    "16 x 512": (16, 32, 8, 128, 512, 0),
    "8,192, heads of 64": (1, 32, 8, 64, 8192, 0),
    "8,192, 16 of 256": (1, 16, 2, 256, 8192, 0),
    "8,192 after 24,576": (1, 16, 2, 256, 8192, 24_576),
}


def case(
    rows: int, heads: int, kv_heads: int, dim: int, new: int, before: int
) -> tuple[torch.Tensor, KVCache, DevicePlan]:
    pages = -(-(new + before) // PAGE)
    shape = (kv_heads, rows * pages * PAGE, dim)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(rows * pages, device="cuda").to(torch.int32).view(rows, pages)
    starts = [(row, at) for row in range(rows) for at in range(0, new, 128)]
    blocks = [(row * new + at, min(128, new - at), row, before + at) for row, at in starts]
    blocks.sort(key=lambda block: -block[3])
    nothing = torch.zeros(0, dtype=torch.int32, device="cuda")
    plan = DevicePlan(
        ids=nothing, slots=nothing, positions=nothing, last_tokens=nothing, page_table=table, page_size=PAGE,
        decoding=0, shared=None, blocks=torch.tensor(blocks, dtype=torch.int32, device="cuda"), block_size=128,
    )  # fmt: skip
    queries = torch.randn((rows * new, heads, dim), device="cuda", dtype=torch.bfloat16)
    return queries, KVCache((keys,), (values,)), plan


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print(f"{'':20}{'for all':>10}{'Hopper':>10}")
    for name, (rows, heads, kv_heads, dim, new, before) in CASES.items():
        queries, cache, plan = case(rows, heads, kv_heads, dim, new, before)
        out = torch.empty_like(queries)

        def run() -> None:
            prefill_attention.prefill_attention(
                queries, cache, 0, plan, out, AttentionRules(dim**-0.5)
            )  # called here

        with mock.patch.object(prefill_attention, "hopper_kernels", return_value=None):
            for_all = triton.testing.do_bench(run, return_mode="median")
        hopper = triton.testing.do_bench(run, return_mode="median")
        products = 4 * rows * heads * dim * (new * before + new * (new + 1) / 2)
        print(
            f"{name:20}{products / for_all / 1e9:10.0f}{products / hopper / 1e9:10.0f}", flush=True
        )


if __name__ == "__main__":
    main()
