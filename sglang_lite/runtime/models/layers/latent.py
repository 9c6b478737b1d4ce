"""Latent attention (DeepSeek-V2, arXiv:2405.04434): its matrices, and its computation on a CPU.

    latent = norm(x A)      cached per token, with `turned`, a rotated key part that heads share
    key_h, value_h = (latent K_h, turned), latent V_h       for head h
    score = q_h · key_h = (q_nope_h K_h^T) · latent + q_rope_h · turned

Two computations give the same result. Absorbed: queries are multiplied into the latent space, and
the weighted sum of latents is multiplied by V_h. This is attention over one key-value head whose
values are the first elements of its keys. Expanded: keys and values of all heads are computed from
the latents that are read. Each pair of tokens then takes fewer multiplications (320 per head
instead of 1,088 in DeepSeek's models), but each token that is read must be expanded first. So rows
with few new tokens use the absorbed form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, AttentionRules, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache, apply_latent_scales, view_as_indexable
from sglang_lite.runtime.kernels.reference.attention import attend_rows, attention
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.rope import rotate
from sglang_lite.runtime.models.spec import LatentSpec

MAX_EXPANDED = 1 << 24  # maximum number of elements of expanded keys and values in memory


class HeadProduct:
    """Multiplies each head's vectors by that head's own matrix.

    Args:
        weight: matrices [heads, inputs, outputs].
        batch_invariant: whether to compute each row separately, so that its bits don't depend on
            other rows.
    """

    def __init__(self, weight: torch.Tensor, *, batch_invariant: bool) -> None:
        self.weight = weight
        self._batch_invariant = batch_invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies x [T, heads, inputs] by the heads' matrices. Returns [T, heads, outputs]."""
        if self._batch_invariant and len(x) > 1:
            return torch.cat([self(x[i : i + 1]) for i in range(len(x))])
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)

    def multiply_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Multiplies x [T, heads, inputs] by the heads' matrices, and writes the result to `out`
        [T, heads, outputs].
        """
        torch.bmm(x.transpose(0, 1), self.weight, out=out.transpose(0, 1))


@dataclass(frozen=True, slots=True)
class LatentMatrices:
    """Weights of a layer's latent attention, except its first and its last linear layer.

    Attributes:
        query_norm, queries: norm of the low-rank query vector, and the linear layer that turns it
            into queries; None if the first linear layer returns queries.
        norm: weight [rank] of the latent's norm.
        keys: multiplies queries into the latent space, by [heads, nope_size, rank].
        values: turns latents into values, by [heads, rank, value_size].
    """

    query_norm: torch.Tensor | None
    queries: Linear | None
    norm: torch.Tensor
    keys: HeadProduct
    values: HeadProduct


def compute_queries(
    spec: LatentSpec, matrices: LatentMatrices, first: torch.Tensor
) -> torch.Tensor:
    """Returns queries [T, heads, nope_size + rope_size], computed from the query columns [T, …] of
    the first linear layer's output.
    """
    if matrices.queries is not None:
        assert matrices.query_norm is not None
        first = matrices.queries(
            F.rms_norm(first, matrices.query_norm.shape, matrices.query_norm, spec.norm_eps)
        )
    return first.view(len(first), spec.heads, spec.query_size)


def latent_attention(
    spec: LatentSpec,
    matrices: LatentMatrices,
    product: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    plan: AttentionPlan,
    cache: KVCache,
    layer: int,
) -> torch.Tensor:
    """Stores the new tokens' latents in the cache and attends to all tokens that they see.

    Args:
        spec: specification of the attention.
        matrices: weights of the attention.
        product: output [T, …] of the first linear layer: queries or low-rank query vectors,
            latents, and the rotated key part before rotation.
        cos, sin: rotary tables at the tokens' positions, as `rotate` takes them.
        plan: attention plan of the step.
        cache: KV cache.
        layer: index of the layer.

    Returns:
        Outputs of the heads [T, heads, value_size].
    """
    first, latent, turned = product.split_with_sizes(
        (product.shape[1] - spec.key_size, spec.rank, spec.rope_size), 1
    )
    q_nope, q_rope = compute_queries(spec, matrices, first).split_with_sizes(
        (spec.nope_size, spec.rope_size), 2
    )
    q_rope = rotate(q_rope, cos, sin)
    latent = F.rms_norm(latent, matrices.norm.shape, matrices.norm, spec.norm_eps)
    stored = torch.cat((latent, rotate(turned.unsqueeze(1), cos, sin).squeeze(1)), 1)
    plane = cache.k[layer]
    scales = None if cache.scales is None else cache.scales.k[layer]
    if scales is not None:
        stored = apply_latent_scales(stored, 1 / scales, spec.rank)
    view_as_indexable(plane[0]).index_copy_(
        0, plan.store_at, view_as_indexable(stored.to(plane.dtype))
    )
    expanded = [row for row in plan.extends if expands(spec, row)]
    out = product.new_empty((len(product), spec.heads, spec.value_size))
    at = _unexpanded_tokens(expanded, len(product))
    if isinstance(at, slice) or len(at):
        q = product.new_empty((len(product), spec.heads, spec.key_size))
        absorbed = torch.cat((matrices.keys(q_nope[at]), q_rope[at]), 2)
        q[at] = absorbed if scales is None else apply_latent_scales(absorbed, scales, spec.rank)
        seen = attention(
            q, cache, layer, _drop_expanded_rows(spec, plan), AttentionRules(spec.scale)
        )
        out[at] = matrices.values(seen[at][..., : spec.rank])
    for row in expanded:
        q = torch.cat((q_nope[row.start : row.end], q_rope[row.start : row.end]), 2)
        latents = row.read_positions(plane, 0, product.dtype)[0]
        if scales is not None:
            latents = apply_latent_scales(latents, scales, spec.rank)
        out[row.start : row.end] = _attend_expanded(spec, matrices, q, latents, row)
    return out


def expands(spec: LatentSpec, row: ExtendRow) -> bool:
    """Returns whether a row takes fewer multiplications if keys and values are expanded from its
    latents.
    """
    new = row.end - row.start
    pairs = new * (row.length - (new - 1) / 2)
    a_token = spec.heads * spec.rank * (spec.nope_size + spec.value_size)
    return (
        new > 1
        and pairs * (spec.absorbed_products_per_pair - spec.products_per_pair)
        > (row.length - new) * a_token
    )


def _unexpanded_tokens(expanded: list[ExtendRow], tokens: int) -> torch.Tensor | slice:
    """Returns the indices of the batch's tokens outside the expanded rows; a full slice if no row
    is expanded.
    """
    if not expanded:
        return slice(None)
    others = torch.ones(tokens, dtype=torch.bool)
    for row in expanded:
        others[row.start : row.end] = False
    return others.nonzero().squeeze(1)


def _drop_expanded_rows(spec: LatentSpec, plan: AttentionPlan) -> AttentionPlan:
    return replace(
        plan,
        extends=tuple(row for row in plan.extends if not expands(spec, row)),
        groups=tuple(
            group for group in plan.groups if not any(expands(spec, row) for row in group.rows)
        ),
    )


def _attend_expanded(
    spec: LatentSpec,
    matrices: LatentMatrices,
    q: torch.Tensor,
    stored: torch.Tensor,
    row: ExtendRow,
) -> torch.Tensor:
    """Computes the attention of a row's new tokens over expanded keys and values, a few heads at a
    time to bound memory.

    Args:
        spec: specification of the attention.
        matrices: weights of the attention.
        q: queries [tokens, heads, query_size].
        stored: latents and rotated key parts [length, key_size] of all tokens of the row.
        row: tokens that the row reads.

    Returns:
        Outputs [tokens, heads, value_size].
    """
    keys = matrices.keys.weight
    values = matrices.values.weight
    latents, turned = stored.to(keys.dtype).split_with_sizes((spec.rank, spec.rope_size), 1)
    own = ExtendRow(0, len(q), slice(0, row.length))
    # torch's attention is fast only if keys and values have one size
    wide = max(spec.query_size, spec.value_size)
    step = max(1, MAX_EXPANDED // (2 * wide * row.length))
    parts = []
    for heads in (slice(first, first + step) for first in range(0, spec.heads, step)):
        k = latents @ keys[heads].transpose(1, 2)
        k = torch.cat((k, turned.expand(len(k), -1, -1)), 2)
        k, v, queries = (
            F.pad(x, (0, wide - x.shape[-1])) for x in (k, latents @ values[heads], q[:, heads])
        )
        parts.append(
            attend_rows(queries, k, v, own, AttentionRules(spec.scale))[..., : spec.value_size]
        )
    return torch.cat(parts, 1)
