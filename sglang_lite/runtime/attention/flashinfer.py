"""Attention with flashinfer's kernels, from the installed package `flashinfer-python`. nvcc
compiles them at first use.

Pages are read in place: flashinfer's "HND" layout is (pages, kv_heads, page_size, head_dim) with
any strides, which covers our cache. Decoding tokens and blocks are planned separately. Decoding
uses FA2, which splits long rows among programs; its prompt kernel is also the one that flashinfer
uses to decode on tensor cores. Blocks use the kernel that flashinfer considers fastest (FA3 on
Hopper, which doesn't split rows). Plans are made on the host from lengths read back from the
device, so no CUDA graph can contain a step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from sglang_lite.runtime.attention.base import AttentionRequirements, StepAttention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache, scale_by_kv_head

_HEADS = (64, 128, 256)
_TYPES = (torch.bfloat16, torch.float16)
_WORKSPACE = 256 << 20  # bytes for partial results of rows until they are merged


class FlashInferAttention:
    capturable = False
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
        if importlib.util.find_spec("flashinfer") is None:
            return "the package flashinfer-python is not installed"
        if requirements.device.type != "cuda" or torch.cuda.get_device_capability(
            requirements.device
        ) < (8, 0):
            return "a GPU of compute capability 8.0 (Ampere) or newer is required"
        if requirements.head_dim not in _HEADS:
            return (
                f"the head size {requirements.head_dim} is not one of {', '.join(map(str, _HEADS))}"
            )
        if requirements.compute not in _TYPES:
            return f"computing in {requirements.compute} is not supported"
        return None

    def __init__(self, requirements: AttentionRequirements) -> None:
        self._requirements = requirements
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=requirements.device)
        self._wrappers: dict[tuple[str, AttentionRules], Any] = {}

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        parts = list(_sequence_groups(plan))
        windowed = parts if plan.window_table is None else list(_sequence_groups(plan.in_layer(1)))
        planned: dict[AttentionRules, list[tuple[_SequenceGroup, Any]]] = {}

        def attend(
            q: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor, rules: AttentionRules
        ) -> None:
            assert rules.sinks is None, "refused"
            if rules not in planned:
                of_kind = parts if rules.window is None else windowed
                planned[rules] = [
                    (part, self._plan_wrapper(part, plan.page_size, rules)) for part in of_kind
                ]
            shape = self._requirements.kv_heads, -1, plan.page_size, self._requirements.head_dim
            pages = tuple(side[layer].view(shape).transpose(0, 1) for side in (cache.k, cache.v))
            for part, wrapper in planned[rules]:
                wrapper.run(q[part.first : part.end], pages, out=out[part.first : part.end])
            if cache.scales is not None:
                out.copy_(scale_by_kv_head(out, cache.scales.v[layer]))

        return StepAttention(attend)

    def _plan_wrapper(self, part: _SequenceGroup, page_size: int, rules: AttentionRules) -> Any:
        """Returns one of flashinfer's wrappers, planned for one group of sequences. Each kind of
        layer has its own wrapper, because a wrapper keeps its plan until the next step.
        """
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        key = part.backend, rules
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "HND", backend=part.backend
            )
            self._wrappers[key] = wrapper
        wrapper.plan(
            part.queries,
            part.pages,
            part.page_indices,
            part.last_page,
            self._requirements.heads,
            self._requirements.kv_heads,
            self._requirements.head_dim,
            page_size,
            causal=True,
            sm_scale=rules.scale,
            window_left=-1 if rules.window is None else rules.window - 1,
            logits_soft_cap=rules.softcap,
            q_data_type=self._requirements.compute,
            kv_data_type=self._requirements.cache,
        )
        return wrapper


class _SequenceGroup(NamedTuple):
    """Sequences that are planned together, because their new tokens are contiguous in the batch.
    New tokens are the last tokens of each sequence.

    Attributes:
        backend: flashinfer's name of the kernel.
        first, end: range of the new tokens in the batch.
        queries: int32 [sequences + 1] on the host, start of each sequence's new tokens, relative to
            `first`.
        pages: int32 [sequences + 1] on the host, start of each sequence's pages in `page_indices`.
        page_indices: int32 on the device, pages of all sequences.
        last_page: int32 [sequences] on the host, number of tokens in each sequence's last page.
    """

    backend: str
    first: int
    end: int
    queries: torch.Tensor
    pages: torch.Tensor
    page_indices: torch.Tensor
    last_page: torch.Tensor


def _sequence_groups(plan: DevicePlan) -> Iterator[_SequenceGroup]:
    rows = plan.decoding
    if rows:
        slots, positions = torch.stack((plan.slots[:rows], plan.positions[:rows])).tolist()
        yield _make_group(
            plan, "fa2", 0, [(slot, 1, position + 1) for slot, position in zip(slots, positions)]
        )
    if len(plan.blocks):
        yield _make_group(plan, "auto", rows, _join_blocks(plan.blocks.tolist()))


def _join_blocks(blocks: list[list[int]]) -> list[tuple[int, int, int]]:
    """Joins consecutive blocks of a row. Returns (slot, tokens, length of the sequence up to the
    last of these tokens) for each joined block, in the order of the tokens.
    """
    joined: list[tuple[int, int, int]] = []
    for _, count, slot, position in sorted(blocks):
        if joined and joined[-1][0] == slot and joined[-1][2] == position:
            joined[-1] = slot, joined[-1][1] + count, position + count
        else:
            joined.append((slot, count, position + count))
    return joined


def _make_group(
    plan: DevicePlan, backend: str, first: int, sequences: list[tuple[int, int, int]]
) -> _SequenceGroup:
    slots, counts, lengths = zip(*sequences)
    size = plan.page_size
    device = plan.page_table.device
    page_counts = [-(-length // size) for length in lengths]
    table = plan.page_table[torch.tensor(slots, device=device), : max(page_counts)]
    is_used = torch.arange(max(page_counts), device=device) < torch.tensor(
        page_counts, device=device
    ).unsqueeze(1)
    return _SequenceGroup(
        backend,
        first,
        first + sum(counts),
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        torch.tensor([0, *accumulate(page_counts)], dtype=torch.int32),
        table[is_used],
        torch.tensor([(length - 1) % size + 1 for length in lengths], dtype=torch.int32),
    )
