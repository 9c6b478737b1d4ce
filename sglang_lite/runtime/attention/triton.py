"""Attention with Triton kernels of this package. Decoding work is divided among programs by tokens;
this is done on the device. A shared prefix is read once.
"""

from __future__ import annotations

from functools import partial

import torch

from sglang_lite.runtime.attention.base import AttentionRequirements, StepAttention
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionRules,
    DecodeWork,
    DevicePlan,
    Partials,
)
from sglang_lite.runtime.kernels.decode_attention import decode_attention, split_work
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.few_queries import columns
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launch_config import Kernel, choose_attention_launch
from sglang_lite.runtime.kernels.prefill_attention import prefill_attention
from sglang_lite.runtime.kernels.prefix_attention import (
    MAX_GROUP,
    prefix_attention,
    queries_per_program,
)
from sglang_lite.runtime.kernels.rope_attention import rope_attention

_MIN_TOKENS = 64  # minimum number of tokens in a decoding program's share
# The same for a program that has a multiprocessor to itself: merging shares takes longer than
# reading this many.
_MIN_EXCLUSIVE_TOKENS = 256
_WIDEST = 256  # largest head that fits a program's registers and shared memory
# Most 16-bit heads that `rope_attention` takes from the QKV product: with 32 heads, steps of 1 and
# of 256 rows take 1 % longer, and steps of 64 rows 2 % less.
MAX_HEADS = 16
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonAttention:
    capturable = True
    shares_prefixes = True

    @staticmethod
    def unsupported_reason(requirements: AttentionRequirements) -> str | None:
        if requirements.sinks:
            return "attention sinks are not supported"
        if requirements.head_dim > _WIDEST:
            return f"the head size {requirements.head_dim} is above the limit of {_WIDEST}"
        if (group := requirements.heads // requirements.kv_heads) > MAX_GROUP:
            return f"{group} query heads per KV head are above the limit of {MAX_GROUP}"
        if requirements.compute not in _TYPES:
            return f"computing in {requirements.compute} is not supported"
        return _unsupported_kernel_reason(requirements)

    def __init__(self, requirements: AttentionRequirements) -> None:
        self._requirements = requirements
        parts = self._count_items(requirements.max_rows) * requirements.heads
        shared = requirements.max_shared_rows * requirements.max_chunks * requirements.heads
        dim = requirements.head_dim
        device = requirements.device
        self._partials = Partials(
            acc=torch.empty((parts, dim), device=device),
            ml=torch.empty((parts, 2), device=device),
            counters=torch.zeros(
                (requirements.max_rows + 1, requirements.kv_heads), dtype=torch.int32, device=device
            ),
            prefix_acc=torch.empty((shared, dim), device=device),
            prefix_ml=torch.empty((shared, 2), device=device),
        )

    def _count_items(self, rows: int, *, exclusive: bool = False) -> int:
        properties = properties_of(self._requirements.device)
        # 8-bit programs are small, so more run at once
        eight_bits = self._requirements.cache.itemsize == 1
        programs = (
            properties.multiprocessors
            if exclusive
            else (4 if eight_bits else 1) * properties.programs_to_fill
        )
        return rows + -(-programs // self._requirements.kv_heads)

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        rows = plan.decoding
        device = self._requirements.device
        requirements = self._requirements
        launch = choose_attention_launch(
            properties_of(device),
            "decode",
            dim=requirements.head_dim,
            item=requirements.compute.itemsize,
            cached=requirements.cache.itemsize,
            queries=columns(requirements.heads // requirements.kv_heads),
            rows=rows,
            heads=requirements.kv_heads,
            shared=plan.shared is not None,
        )
        assert launch is not None, "refused"
        work = DecodeWork(
            items=torch.empty(
                (self._count_items(rows, exclusive=launch.exclusive), 4),
                dtype=torch.int32,
                device=device,
            ),
            rows=torch.empty((max(rows, 1), 2), dtype=torch.int32, device=device),
            partials=self._partials,
        )
        if rows:
            split_work(
                plan.positions[:rows],
                plan.slots,
                plan.shared,
                work.items,
                work.rows,
                min_tokens=_MIN_EXCLUSIVE_TOKENS if launch.exclusive else _MIN_TOKENS,
                round_up=launch.exclusive,
            )

        def attend(
            q: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor, rules: AttentionRules
        ) -> None:
            assert rules.sinks is None, "refused"
            seen = plan.in_layer(rules.window)
            if plan.decoding:
                if plan.shared is not None:
                    prefix_attention(q, cache, layer, plan, work, rules)
                decode_attention(q, cache, layer, seen, work, out, rules)
            if len(plan.blocks):
                prefill_attention(q, cache, layer, seen, out, rules)

        few = requirements.heads <= MAX_HEADS or launch.exclusive
        direct = few and plan.separate and plan.shared is None and rows == len(plan.ids)
        return StepAttention(
            attend, partial(rope_attention, plan=plan, work=work) if direct else None
        )


def _unsupported_kernel_reason(requirements: AttentionRequirements) -> str | None:
    """Returns the reason why one of the kernels can't run on the GPU, or None if all can."""
    properties = properties_of(requirements.device)
    item = requirements.compute.itemsize
    group = requirements.heads // requirements.kv_heads
    kernels: dict[Kernel, int] = {
        "decode": columns(group),
        "prefill": 16,
        "prefix": queries_per_program(group, item),
    }
    for kernel, queries in kernels.items():
        if not choose_attention_launch(
            properties,
            kernel,
            dim=requirements.head_dim,
            item=item,
            cached=requirements.cache.itemsize,
            queries=queries,
        ):
            return (
                f"heads of {requirements.head_dim} elements of {item} bytes don't fit in the "
                f"{properties.shared_memory:,} bytes of shared memory that a program has on a {properties.name}"
            )
    return None
