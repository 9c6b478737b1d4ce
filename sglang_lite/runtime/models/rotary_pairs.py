"""Orders of rotary pairs: checkpoints may store the two elements of a pair beside each other, while
the rotation expects the first elements of all pairs before the second ones.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.models.spec import AttentionSpec, LatentSpec, MixerSpec


def deinterleave_order(spec: MixerSpec) -> torch.Tensor | None:
    """Returns the order in which `rotate` expects the outputs of a layer's first linear layer, as a
    permutation. It moves the two elements of each rotary pair from adjacent positions to separate
    halves. Returns None if the checkpoint already stores them that way.
    """
    if not spec.rope.interleaved or not isinstance(spec, AttentionSpec | LatentSpec):
        return None
    if isinstance(spec, LatentSpec):
        made = (
            latent_query_deinterleave_order(spec)
            if spec.query_rank is None
            else torch.arange(spec.query_rank)
        )
        assert made is not None
        return torch.cat(
            (
                made,
                torch.arange(spec.rank) + len(made),
                _even_then_odd_order(spec.rope_size) + len(made) + spec.rank,
                torch.arange(spec.gate_size) + len(made) + spec.key_size,
            )
        )
    head = head_deinterleave_order(spec)
    assert head is not None
    queries_keys = _repeat_order_per_head(spec.heads + spec.kv_heads, spec.key_size, head)
    others = spec.kv_heads * spec.value_size
    if spec.output_gate:
        others += spec.heads * spec.gate_size
    return torch.cat((queries_keys, torch.arange(others) + len(queries_keys)))


def head_deinterleave_order(spec: AttentionSpec) -> torch.Tensor | None:
    """Returns `deinterleave_order` for the elements of a single query or key, or None if rotary
    pairs aren't interleaved.
    """
    if not spec.rope.interleaved:
        return None
    rotated = spec.rope.rotary_dim or spec.key_size
    return torch.cat((_even_then_odd_order(rotated), torch.arange(rotated, spec.key_size)))


def latent_query_deinterleave_order(spec: LatentSpec) -> torch.Tensor | None:
    """Returns the part of `deinterleave_order` for latent attention's queries, whose heads end with
    the rotated elements. Returns None if rotary pairs aren't interleaved.
    """
    if not spec.rope.interleaved:
        return None
    head = torch.cat(
        (torch.arange(spec.nope_size), _even_then_odd_order(spec.rope_size) + spec.nope_size)
    )
    return _repeat_order_per_head(spec.heads, spec.query_size, head)


def _even_then_odd_order(rotated: int) -> torch.Tensor:
    return torch.cat((torch.arange(0, rotated, 2), torch.arange(1, rotated, 2)))


def _repeat_order_per_head(heads: int, size: int, head: torch.Tensor) -> torch.Tensor:
    return (torch.arange(heads).unsqueeze(1) * size + head).flatten()
