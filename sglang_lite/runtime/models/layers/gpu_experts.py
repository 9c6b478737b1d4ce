"""Mixture of experts on a GPU: routing and matmuls as kernels, without synchronisation with the
host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import FLOAT8, EightBitRows
from sglang_lite.runtime.kernels.experts import ExpertMatrices, apply_experts
from sglang_lite.runtime.kernels.experts_route import experts_route
from sglang_lite.runtime.models.layers.experts import (
    FeedForward,
    compute_router_logits,
    drop_skipped,
    local_expert_ids,
    sparse_mixer,
)
from sglang_lite.runtime.models.layers.gpu_linear import as_gpu_product
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.router_mlp import RouterMlp
from sglang_lite.runtime.models.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """Mixture of experts in a layer.

    Attributes:
        spec: specification of the experts.
        router, correction, shared, shared_gate, local_ids, counts, scales: as in
            `experts.Experts`.
        matrices: matrices of the experts that this rank holds.
    """

    spec: ExpertsSpec
    router: Linear | RouterMlp
    correction: torch.Tensor | None
    matrices: ExpertMatrices
    shared: FeedForward | None
    shared_gate: Linear | None
    local_ids: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def eight_bit_input_type(self, rows: int) -> torch.dtype | None:
        """Returns the 8-bit type in which the experts multiply this many input rows, or None for 16
        bits. The router needs the 16-bit rows in any case.
        """
        return None if rows == 1 or self.matrices.gate_up_scales is None else FLOAT8

    def __call__(
        self,
        rows: torch.Tensor | EightBitRows,
        *,
        parts: bool = False,
        record: Callable[[torch.Tensor], None] | None = None,
        carried: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the layer's output [T, H].

        Args:
            rows: input rows; 8-bit rows must include the 16-bit ones.
            parts: whether the output may be returned as parts [P, T, H] that add up to it.
            record: callback for the rows' experts [T, top_k], or None.
            carried: as for `compute_router_logits`.
        """
        x, eight = (rows.unquantised, rows) if isinstance(rows, EightBitRows) else (rows, None)
        assert x is not None, "the router takes them so"
        spec = self.spec
        base = None
        chosen, weights = self._choose(x, record, carried)
        if self.shared is not None:
            base = self.apply_shared(x)
            if self.shared_gate is not None:
                base = base * self.shared_gate(x).sigmoid()
            if spec.shared_scale != 1.0:
                base = base * spec.shared_scale
        if spec.weigh_input:
            return self._apply_to_weighed(x, chosen, weights, base, parts=parts)
        return apply_experts(
            x,
            chosen,
            weights,
            self.matrices,
            spec.activation,
            alpha=spec.alpha,
            limit=spec.limit,
            base=base,
            quantised=eight,
            parts=parts,
        )

    def apply_shared(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the shared expert, before any factor."""
        assert self.shared is not None
        gated = as_gpu_product(self.shared.gate_up).multiply_gated(
            x, self.spec.activation, eight=None
        )
        assert isinstance(gated, torch.Tensor)
        return self.shared.down(gated)

    def apply_chosen(
        self,
        x: torch.Tensor,
        routed: torch.Tensor,
        record: Callable[[torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """Returns the output of the experts that rows x choose, like
        `experts.Experts.apply_chosen`.
        """
        chosen, weights = self._choose(routed, record)
        return apply_experts(
            x,
            chosen,
            weights,
            self.matrices,
            self.spec.activation,
            alpha=self.spec.alpha,
            limit=self.spec.limit,
            base=None,
            quantised=None,
            parts=False,
        )

    def _choose(
        self,
        x: torch.Tensor,
        record: Callable[[torch.Tensor], None] | None,
        carried: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses experts like `_route`, and returns the indices of this rank's experts. Calls
        `record`.
        """
        later = record is not None or self.scales is not None or self.spec.skips
        # routing can convert the ids itself
        chosen, weights = self._route(x, None if later else self.local_ids, carried)
        if self.spec.skips:
            chosen, weights = drop_skipped(chosen, weights, self.spec.count)
        if record is not None:
            record(chosen)
        if self.scales is not None:
            weights = weights * self.scales[chosen.long()]
        if later and self.local_ids is not None:
            chosen = local_expert_ids(chosen, self.local_ids)
        return chosen, weights

    def _apply_to_weighed(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        base: torch.Tensor | None,
        *,
        parts: bool,
    ) -> torch.Tensor:
        """Computes the output of routed experts with the weights applied to the experts' inputs:
        each pair of a row and an expert becomes a row of its own.
        """
        spec = self.spec
        pairs = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).flatten(0, 1)
        single = spec.top_k == 1
        out = apply_experts(
            pairs,
            chosen.view(-1, 1),
            torch.ones_like(weights).view(-1, 1),
            self.matrices,
            spec.activation,
            alpha=spec.alpha,
            limit=spec.limit,
            base=base if single else None,
            quantised=None,
            parts=parts and single,
        )
        if single:
            return out
        out = out.view(len(x), spec.top_k, -1).sum(1)
        return out if base is None else out + base

    def _route(
        self,
        x: torch.Tensor,
        local_ids: torch.Tensor | None,
        carried: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the experts of rows and their weights, int32 and float32 [T, top_k]."""
        spec = self.spec
        if spec.scoring == "sparsemixer":
            logits = compute_router_logits(self.router, x, carried)
            ids, weights = sparse_mixer(logits, spec.jitter, self.counts)
            chosen = ids.int() if local_ids is None else local_expert_ids(ids, local_ids)
            return chosen.contiguous(), weights
        if isinstance(self.router, RouterMlp):
            logits = compute_router_logits(self.router, x, carried)
        else:
            logits, _ = as_gpu_product(self.router).multiply_in_parts(x)
        return experts_route(
            logits,
            spec.top_k,
            scoring=spec.scoring,
            correction=self.correction,
            groups=spec.groups,
            kept_groups=spec.kept_groups,
            group_top=spec.group_top,
            normalise=spec.normalise,
            scale=spec.scale,
            local_ids=local_ids,
            counts=self.counts,
        )
