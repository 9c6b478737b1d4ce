"""Feed-forwards of which a router chooses some for each token (mixture of experts), on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_lite.runtime.kernels.reference.experts_route import experts_route
from sglang_lite.runtime.models.layers.activation import activated
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.spec import DenseSpec, ExpertsSpec


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward.

    Attributes:
        gate_up: gates, then ups; without a gate ups alone.
        exact: as `activated` takes it.
    """

    gate_up: Linear
    down: Linear
    spec: DenseSpec | ExpertsSpec
    exact: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(activated(self.gate_up(x), self.spec, exact=self.exact))


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer, each multiplied with the rows that chose it.

    Attributes:
        router: logits of rows.
        correction: [count], of scores, for the choice.
        shared: what every row takes besides; `shared_gate` gives a logit of how much.
    """

    spec: ExpertsSpec
    router: Linear
    correction: torch.Tensor | None
    experts: tuple[FeedForward, ...]
    shared: FeedForward | None
    shared_gate: Linear | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights = routed(self.router(x), self.spec, self.correction)
        out = torch.zeros(x.shape)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # pairs of a row and an expert, by expert
        counts = flat.bincount(minlength=len(self.experts)).tolist()
        for expert, pairs in zip(self.experts, order.split_with_sizes(counts)):
            if len(pairs):
                rows = pairs // self.spec.top_k
                out.index_add_(0, rows, expert(x[rows]).float() * weights.flatten()[pairs].unsqueeze(1))
        if self.shared is not None:
            shared = self.shared(x).float()
            out += shared if self.shared_gate is None else shared * self.shared_gate(x).float().sigmoid()
        return out.to(x.dtype)


def routed(
    logits: torch.Tensor, spec: ExpertsSpec, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of rows, int64 [T, top_k], and their weights, float32 [T, top_k].

    Args:
        logits: of the router [T, count].
    """
    chosen, weights = experts_route(
        logits, spec.top_k, scoring=spec.scoring, correction=correction, groups=spec.groups,
        kept_groups=spec.kept_groups, group_top=spec.group_top, normalise=spec.normalise, scale=spec.scale,
    )  # fmt: skip
    return chosen.long(), weights
