"""Attention with version 4 of flash-attn's kernels, from the installed package `flash-attn-4`
(`flash_attn.cute`, in CuTe DSL).

Only this version reads pages as small as ours and can be installed from PyPI: version 2 needs pages
of a multiple of 256 tokens, and version 3, which takes any size, is not on PyPI. On Hopper, version
4 doesn't split a row among programs, so a few long rows leave most multiprocessors idle.

Lengths are read on the device, so a CUDA graph can capture decoding steps.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from sglang_lite.runtime.attention.base import AttentionRequirements, StepAttention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache

_WIDEST = 256
_TYPES = (torch.bfloat16, torch.float16)


class FlashAttention:
    capturable = True
    shares_prefixes = False

    @staticmethod
    def unsupported_reason(requirements: AttentionRequirements) -> str | None:
        if requirements.sinks or requirements.latent:
            return (
                "attention sinks are not supported"
                if requirements.sinks
                else "latent attention is not supported"
            )
        if requirements.chunked:
            return "attention within chunks is not supported"
        if requirements.alibi:
            return "ALiBi is not supported"
        if (
            importlib.util.find_spec("flash_attn") is None
            or importlib.util.find_spec("flash_attn.cute") is None
        ):
            return "the package flash-attn-4 is not installed"
        if requirements.device.type != "cuda" or torch.cuda.get_device_capability(
            requirements.device
        )[0] not in (
            9,
            10,
            11,
        ):
            return "only GPUs of compute capability 9 (Hopper) to 11 are supported"
        if requirements.head_dim % 16 or requirements.head_dim > _WIDEST:
            return f"the head size {requirements.head_dim} is not a multiple of 16 up to {_WIDEST}"
        if requirements.compute not in _TYPES:
            return f"computing in {requirements.compute} is not supported"
        if requirements.cache != requirements.compute:
            return f"a KV cache in {requirements.cache} is not supported"
        return None

    def __init__(self, requirements: AttentionRequirements) -> None:
        from flash_attn.cute import flash_attn_varlen_func

        self._requirements = requirements
        self._attend = flash_attn_varlen_func

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        parts = _sequence_groups(plan)
        windowed = parts if plan.window_table is None else _sequence_groups(plan.in_layer(1))

        def attend(
            q: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor, rules: AttentionRules
        ) -> None:
            assert rules.sinks is None, "refused"
            shape = self._requirements.kv_heads, -1, plan.page_size, self._requirements.head_dim
            k, v = (side[layer].view(shape).permute(1, 2, 0, 3) for side in (cache.k, cache.v))
            for part in parts if rules.window is None else windowed:
                out[part.tokens] = self._attend(
                    q[part.tokens],
                    k,
                    v,
                    cu_seqlens_q=part.queries,
                    seqused_k=part.lengths,
                    max_seqlen_q=part.max_new_tokens,
                    page_table=part.pages,
                    softmax_scale=rules.scale,
                    causal=True,
                    window_size=(None, None) if rules.window is None else (rules.window - 1, 0),
                    softcap=rules.softcap or 0.0,
                )[0]

        return StepAttention(attend)


class _SequenceGroup(NamedTuple):
    """Sequences whose new tokens are contiguous in the batch. New tokens are the last tokens of
    each sequence.

    Attributes:
        tokens: range of the new tokens in the batch.
        queries: int32 [sequences + 1], start of each sequence's new tokens.
        lengths: int32 [sequences], length of each sequence.
        pages: int32 [sequences, pages], pages of each sequence.
        max_new_tokens: maximum number of new tokens of a sequence.
    """

    tokens: slice
    queries: torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor
    max_new_tokens: int


def _sequence_groups(plan: DevicePlan) -> list[_SequenceGroup]:
    made = ((_decoding_group, plan.decoding), (_block_group, len(plan.blocks)))
    return [make(plan) for make, count in made if count]


def _decoding_group(plan: DevicePlan) -> _SequenceGroup:
    rows = plan.decoding
    queries = torch.arange(rows + 1, dtype=torch.int32, device=plan.slots.device)
    return _SequenceGroup(
        slice(0, rows), queries, plan.positions[:rows] + 1, plan.page_table[plan.slots[:rows]], 1
    )


def _block_group(plan: DevicePlan) -> _SequenceGroup:
    _, count, slot, position = plan.blocks[plan.blocks[:, 0].argsort()].unbind(1)
    queries = torch.nn.functional.pad(count.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = slice(plan.decoding, len(plan.slots))
    return _SequenceGroup(tokens, queries, position + count, plan.page_table[slot], plan.block_size)
