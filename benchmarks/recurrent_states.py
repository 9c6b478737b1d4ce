"""Kernels of recurrent states on one GPU: the gated delta rule of Qwen3.5-35B-A3B's layers, its
convolution, Kimi Linear's delta rule, and Mamba 2 of Nemotron-H-8B's layers.

    python benchmarks/recurrent_states.py

Rows of one token: microseconds, and GB/s of the states that are read and written, which are the
limit: 4,800 on an H200. A row of 8,192 tokens: milliseconds. Medians of
`triton.testing.do_bench`, which empties the L2 cache between runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import triton

from sglang_lite.runtime.kernels.delta_scan import delta_scan
from sglang_lite.runtime.kernels.mamba2_scan import mamba2_scan
from sglang_lite.runtime.kernels.state_conv import state_conv
from sglang_lite.runtime.kernels.state_rows import StateRows

LONG = 8192  # tokens


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def rows_of(count: int, tokens: int) -> StateRows:
    """Rows of `tokens` tokens each, whose states are updated in place."""
    offsets = torch.arange(0, count * tokens + 1, tokens, dtype=torch.int32, device="cuda")
    places = torch.arange(count, dtype=torch.int32, device="cuda")
    return StateRows(offsets, places, places, tokens)


def delta(
    rows: StateRows, heads: tuple[int, int], *decays: int
) -> tuple[Callable[[], object], int]:
    key_heads, value_heads = heads
    tokens, count = len(rows.read) * rows.longest, len(rows.read)
    q, k = normal(tokens, key_heads, 128), normal(tokens, key_heads, 128)
    v = normal(tokens, value_heads, 128)
    decay = -torch.rand((tokens, value_heads, *decays), device="cuda")
    beta = torch.rand((tokens, value_heads), device="cuda")
    states = torch.zeros((count, value_heads, 128, 128), device="cuda")
    return lambda: delta_scan(q, k, v, decay, beta, states, rows), 2 * states.nbytes


def conv(rows: StateRows) -> tuple[Callable[[], object], int]:
    tokens, count, channels = len(rows.read) * rows.longest, len(rows.read), 8192
    inputs, tails = normal(tokens, channels), normal(count, 3, channels)
    kernel = normal(5, channels, dtype=torch.float32)
    return lambda: state_conv(inputs, kernel, tails, rows), 2 * (tails.nbytes + inputs.nbytes)


def mamba2(rows: StateRows) -> tuple[Callable[[], object], int]:
    tokens, count = len(rows.read) * rows.longest, len(rows.read)
    x, b, c = normal(tokens, 128, 64), normal(tokens, 8, 128), normal(tokens, 8, 128)
    dt = torch.rand((tokens, 128), device="cuda")
    a, d = -torch.rand(128, device="cuda"), torch.rand(128, device="cuda")
    states = torch.zeros((count, 128, 64, 128), device="cuda")
    return lambda: mamba2_scan(x, b, c, dt, a, d, states, rows), 2 * states.nbytes


CASES: dict[str, Callable[[StateRows], tuple[Callable[[], object], int]]] = {
    "delta rule": lambda rows: delta(rows, (16, 32)),
    "by channel": lambda rows: delta(rows, (32, 32), 128),
    "convolution": conv,
    "Mamba 2": mamba2,
}


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print(f"{'':14}{'1 row':>16}{'64 rows':>16}{'8,192 tokens':>16}{'8 x 1,024':>12}")
    for name, case in CASES.items():
        cells = [f"{name:14}"]
        for count in (1, 64):
            run, moved = case(rows_of(count, 1))
            ms = triton.testing.do_bench(run, return_mode="median")
            cells.append(f"{1000 * ms:7.1f} us {moved / ms / 1e6:5.0f}")
        for count in (1, 8):
            run, _ = case(rows_of(count, LONG // count))
            ms = triton.testing.do_bench(run, return_mode="median")
            cells.append(f"{ms:{13 if count == 1 else 9}.2f} ms")
        print("".join(cells), flush=True)


if __name__ == "__main__":
    main()
