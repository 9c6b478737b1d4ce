"""Copies of keys and values between token slots. All planes of the same shape and type are copied
in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.sizes import round_up_to_power_of_2


@cached_launch
@triton.jit
def _copy(pointers, like, source, target, head_stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    tensor = tl.load(pointers + tl.program_id(1)).to(like.dtype)
    head = tl.program_id(2).to(tl.int64) * head_stride
    d = tl.arange(0, BLOCK_D)
    at = tl.program_id(0)
    value = tl.load(tensor + head + tl.load(source + at) * DIM + d, mask=d < DIM)
    tl.store(tensor + head + tl.load(target + at) * DIM + d, value, mask=d < DIM)


class KVCopy:
    """Function that copies token slots within one cache.

    Args:
        cache: cache whose slots are copied.
    """

    def __init__(self, cache: KVCache) -> None:
        alike: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for plane in cache.planes:
            alike.setdefault((plane.shape, plane.dtype), []).append(plane)
        self._alike = [
            (
                planes[0],
                torch.tensor(
                    [p.data_ptr() for p in planes], dtype=torch.int64, device=planes[0].device
                ),
            )
            for planes in alike.values()
        ]

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies token slots `source` to `target`, int64 [N] each; no slot may be in both. Reads
        and writes N * `KVLayout.numbers` elements.
        """
        for like, pointers in self._alike:
            heads, slots, dim = like.shape
            _copy[(len(source), len(pointers), heads)](
                pointers,
                like,
                source,
                target,
                slots * dim,
                DIM=dim,
                BLOCK_D=round_up_to_power_of_2(dim),
                num_warps=1,
            )
