"""Latent attention with kernels of this package: the backend "triton" for models whose cache holds
latents. Queries are absorbed, except for tokens that attend to expanded keys and values
(`attention/expanded.py`).
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.attention.base import AttentionRequirements, StepAttention
from sglang_lite.runtime.attention.expanded import make_expanded_attention
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionRules,
    DecodeWork,
    DevicePlan,
    Partials,
)
from sglang_lite.runtime.kernels.decode_attention import split_work
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.latent_attention import (
    PAIRS_PER_PROGRAM,
    hopper_module,
    latent_decode,
    latent_prefill,
    latent_prefix,
)
from sglang_lite.runtime.kernels.launch_config import latent_launch

_MIN_TOKENS = 128  # minimum number of tokens in a decoding program's share
_MAX_PARTS = 32  # maximum number of parts of a row, since a single program merges them
_WIDEST = 512  # largest latent that fits a program's registers
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class LatentAttention:
    capturable = True

    @staticmethod
    def unsupported_reason(requirements: AttentionRequirements) -> str | None:
        if requirements.latent > _WIDEST:
            return f"the latent size {requirements.latent} is above the limit of {_WIDEST}"
        if requirements.cache not in (requirements.compute, torch.float8_e4m3fn):
            return f"latents in {requirements.cache} are not supported"
        if requirements.compute not in _TYPES:
            return f"computing in {requirements.compute} is not supported"
        properties = properties_of(requirements.device)
        if (
            latent_launch(
                properties,
                size=requirements.head_dim,
                item=requirements.compute.itemsize,
                queries=PAIRS_PER_PROGRAM,
            )
            is None
        ):
            return (
                f"latents don't fit in the {properties.shared_memory:,} bytes of shared memory of a "
                f"{properties.name}"
            )
        return None

    def __init__(self, requirements: AttentionRequirements) -> None:
        self._requirements = requirements
        # without TMA, registers overflow
        self.shares_prefixes = properties_of(requirements.device).has_tma
        # shares computed at once if one program fills a multiprocessor, else 0
        self._concurrent_items = 0
        if hopper_module(
            requirements.device, requirements.cache, requirements.latent, requirements.head_dim
        ):
            self._concurrent_items = max(
                1,
                properties_of(requirements.device).multiprocessors // -(-requirements.heads // 64),
            )
        parts = self._count_items(requirements.max_rows) * requirements.heads
        device = requirements.device
        shared = requirements.max_shared_rows * requirements.max_chunks * requirements.heads
        # upper bound for blocks of heads times halves of latents
        blocks = 2 * -(-requirements.heads // 16)
        self._partials = Partials(
            acc=torch.empty((parts, requirements.latent), device=device),
            ml=torch.empty((parts, 2), device=device),
            counters=torch.zeros(
                (requirements.max_rows + 1, blocks), dtype=torch.int32, device=device
            ),
            prefix_acc=torch.empty((shared, requirements.latent), device=device),
            prefix_ml=torch.empty((shared, 2), device=device),
        )

    def _count_items(self, rows: int) -> int:
        programs = (
            2 * self._concurrent_items or properties_of(self._requirements.device).programs_to_fill
        )
        return rows + min(programs, _MAX_PARTS * rows)

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        rows = plan.decoding
        device = self._requirements.device
        work = DecodeWork(
            items=torch.empty((self._count_items(rows), 4), dtype=torch.int32, device=device),
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
                min_tokens=_MIN_TOKENS,
                concurrent_programs=self._concurrent_items,
            )

        expanded = make_expanded_attention(self._requirements, plan)

        def attend(
            q: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor, rules: AttentionRules
        ) -> None:
            assert rules.plain, "as of all latent attention"
            if plan.decoding:
                if plan.shared is not None:
                    latent_prefix(
                        q,
                        cache,
                        layer,
                        plan,
                        work,
                        rank=self._requirements.latent,
                        scale=rules.scale,
                    )
                latent_decode(
                    q,
                    cache,
                    layer,
                    plan,
                    work,
                    out,
                    rank=self._requirements.latent,
                    scale=rules.scale,
                )
            if len(plan.blocks) and expanded is None:
                latent_prefill(
                    q, cache, layer, plan, out, rank=self._requirements.latent, scale=rules.scale
                )

        return StepAttention(attend, expanded=expanded)
