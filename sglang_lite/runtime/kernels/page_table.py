"""Updates of the page table on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.sizes import cdiv


@cached_launch
@triton.jit(do_not_specialize=["count"])
def _update(table, at, values, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        table + tl.load(at + i, mask=i < count), tl.load(values + i, mask=i < count), mask=i < count
    )


def update_pages(table: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Writes `values` to elements `at` of the flattened table, both int32 [N]."""
    if len(at):
        _update[(cdiv(len(at), 256),)](table, at, values, len(at), BLOCK=256, num_warps=4)
