"""Feed-forward layers and mixtures of experts on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.reference import activation
from sglang_lite.runtime.kernels.reference.experts_route import experts_route
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.router_mlp import RouterMlp
from sglang_lite.runtime.models.lora.cpu_step import LayerAdapters
from sglang_lite.runtime.models.spec import DenseSpec, ExpertsSpec


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Dense feed-forward layer.

    Attributes:
        gate_up: linear layer that returns gates, then ups; without a gate, ups only.
        down: linear layer back to the hidden size.
        spec: specification of the feed-forward.
        batch_invariant: whether a row's bits must not depend on its neighbours, as in
            `apply_activation`.
        curve: parameters of the activation, as for `apply_activation`.
    """

    gate_up: Linear
    down: Linear
    spec: DenseSpec | ExpertsSpec
    batch_invariant: bool
    curve: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, lora: LayerAdapters | None = None) -> torch.Tensor:
        gate_up = (
            self.gate_up(x)
            if lora is None
            else lora.add_adapter_deltas("gate_up", x, self.gate_up(x))
        )
        inner = self.activate(gate_up)
        return (
            self.down(inner)
            if lora is None
            else lora.add_adapter_deltas("down", inner, self.down(inner))
        )

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns the input of `down` for the output of `gate_up`."""
        inner = apply_activation(
            gate_up, self.spec, batch_invariant=self.batch_invariant, curve=self.curve
        )
        scale = self.spec.inner_scale
        return inner if scale == 1.0 else inner * scale


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts in a layer. Each expert runs on the rows that chose it.

    Attributes:
        spec: specification of the experts.
        router: linear layer that returns logits of the experts, or a router with hidden layers.
        correction: float32 [count], added to scores for the choice of experts, or None.
        experts: feed-forward of each expert that this rank has.
        shared: shared expert that every row passes through, or None.
        shared_gate: linear layer that computes the logit of the shared expert's weight, or None for a
            weight of 1.
        local_ids: int32 [turns, count], as for `experts_route`; None if this rank has all experts.
        counts: int32 [count], number of rows that have chosen each expert, of all ranks' experts;
            None if not counted.
        scales: float32 [count], factors of the experts' weights, or None.
    """

    spec: ExpertsSpec
    router: Linear | RouterMlp
    correction: torch.Tensor | None
    experts: tuple[FeedForward, ...]
    shared: FeedForward | None
    shared_gate: Linear | None
    local_ids: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def __call__(
        self,
        x: torch.Tensor,
        *,
        record: Callable[[torch.Tensor], None] | None = None,
        carried: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the layer's output for rows x. Calls `record` with the experts [T, top_k] that
        the rows chose. `carried` is as for `compute_router_logits`.
        """
        out = self._sum_chosen(x, x, record, carried)
        if self.shared is not None:
            shared = self.shared(x).float()
            if self.spec.shared_scale != 1.0:
                shared *= self.spec.shared_scale
            out += (
                shared
                if self.shared_gate is None
                else shared * self.shared_gate(x).float().sigmoid()
            )
        return out.to(x.dtype)

    def apply_chosen(
        self,
        x: torch.Tensor,
        routed: torch.Tensor,
        record: Callable[[torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """Returns the output of the experts that rows x choose, without that of the shared one.

        Args:
            x: the experts' input rows.
            routed: the router's input rows.
            record: as for `__call__`.
        """
        return self._sum_chosen(x, routed, record).to(x.dtype)

    def _sum_chosen(
        self,
        x: torch.Tensor,
        routed: torch.Tensor,
        record: Callable[[torch.Tensor], None] | None,
        carried: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the output of `apply_chosen` in float32."""
        logits = compute_router_logits(self.router, routed, carried)
        chosen, weights = route(logits, self.spec, self.correction, self.counts)
        if self.spec.skips:
            chosen, weights = drop_skipped(chosen, weights, self.spec.count)
        if self.scales is not None:
            weights = weights * self.scales[chosen]
        if record is not None:
            record(chosen)
        if self.local_ids is not None:
            chosen = local_expert_ids(chosen, self.local_ids).long()
        out = torch.zeros(x.shape)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # (row, expert) pairs, sorted by expert
        counts = flat.bincount(minlength=len(self.experts)).tolist()
        # others' pairs come last
        for expert, pairs in zip(self.experts, order.split_with_sizes(counts)):
            if len(pairs):
                rows = pairs // self.spec.top_k
                of_pairs = weights.flatten()[pairs].unsqueeze(1)
                if self.spec.weigh_input:
                    out.index_add_(0, rows, expert((x[rows] * of_pairs).to(x.dtype)).float())
                else:
                    out.index_add_(0, rows, expert(x[rows]).float() * of_pairs)
        return out


def compute_router_logits(
    router: Linear | RouterMlp, x: torch.Tensor, carried: torch.Tensor | None
) -> torch.Tensor:
    """Returns a router's logits for rows x. `carried` is as for `RouterMlp`, for such a router."""
    if not isinstance(router, RouterMlp):
        return router(x)
    assert carried is not None
    return router(x, carried)


def drop_skipped(
    chosen: torch.Tensor, weights: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns experts and weights of rows, with a weight of 0 for class `count`, which has no
    expert.
    """
    skipped = chosen == count
    return chosen.masked_fill(skipped, 0), weights.masked_fill(skipped, 0.0)


def route(
    logits: torch.Tensor,
    spec: ExpertsSpec,
    correction: torch.Tensor | None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts for rows. Returns indices int64 [T, top_k] and weights float32 [T, top_k].

    Args:
        logits: logits of the router [T, count].
        spec: specification of the experts.
        correction: float32 [count], added to scores for the choice, or None.
        counts: as for `experts_route`.
    """
    if spec.scoring == "sparsemixer":
        return sparse_mixer(logits, spec.jitter, counts)
    if spec.always:
        chosen, weights = route_with_shared(logits, spec, correction, experts_route)
        return chosen.long(), weights
    chosen, weights = experts_route(
        logits,
        spec.top_k,
        scoring=spec.scoring,
        correction=correction,
        groups=spec.groups,
        kept_groups=spec.kept_groups,
        group_top=spec.group_top,
        normalise=spec.normalise,
        scale=spec.scale,
        counts=counts,
    )
    return chosen.long(), weights


def route_with_shared(
    logits: torch.Tensor,
    spec: ExpertsSpec,
    correction: torch.Tensor | None,
    choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts for rows, and appends the shared experts of `ExpertsSpec.always`.

    Args:
        logits: logits of the router [T, count].
        spec: specification of the experts.
        correction: float32 [count - always], added to scores for the choice, or None.
        choose: the device's `experts_route`.

    Returns:
        Indices and weights [T, top_k], like those of `experts_route`.
    """
    routed = spec.count - spec.always
    chosen, weights = choose(
        logits[:, :routed].contiguous(),
        spec.top_k - spec.always,
        scoring=spec.scoring,
        correction=correction,
        normalise=False,
    )
    shared = torch.arange(routed, spec.count, dtype=chosen.dtype, device=chosen.device)
    weights = torch.cat((weights, logits[:, routed:].float().sigmoid()), 1)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * spec.scale
    return torch.cat((chosen, shared.expand(len(chosen), -1)), 1), weights


def sparse_mixer(
    logits: torch.Tensor, jitter: float, counts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses two experts by SparseMixer (arXiv:2409.12136): the best, then the best of the others.

    An expert's weight is a softmax over those of the remaining experts whose logits are near the
    best one: the distance from the best, divided by the larger of |logit| and the best, is at most
    2 * jitter. Returns the same as `route`.
    """
    scores = logits.float()
    left = scores
    ids: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    for _ in range(2):
        best, at = left.max(-1, keepdim=True)
        distance = (best - scores) / torch.maximum(scores.abs(), best)
        near = left.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(near.softmax(-1).gather(-1, at))
        ids.append(at)
        left = left.scatter(-1, at, float("-inf"))
    chosen = torch.cat(ids, -1)
    if counts is not None:
        counts.index_add_(
            0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=counts.dtype)
        )
    return chosen, torch.cat(weights, -1)


def local_expert_ids(chosen: torch.Tensor, local_ids: torch.Tensor) -> torch.Tensor:
    """Converts the chosen experts of rows to their indices among a rank's own experts, int32 [T,
    top_k].

    Args:
        chosen: experts of rows, integers [T, top_k].
        local_ids: as for `experts_route`.
    """
    turns = torch.arange(len(chosen), device=chosen.device) % len(local_ids)
    return local_ids[turns.unsqueeze(1), chosen.long()]


def apply_activation(
    gate_up: torch.Tensor,
    spec: DenseSpec | ExpertsSpec,
    *,
    batch_invariant: bool,
    curve: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns act(gate) * up for rows [T, 2 * size] with gates first; without a gate, act(up) for
    rows [T, size].

    Args:
        gate_up: output of the first linear layer.
        spec: specification of the feed-forward.
        batch_invariant: whether a row's bits must not depend on its neighbours: in 16 bits, torch
            computes the last elements of a thread's share differently.
        curve: parameters of "xielu", float32 [4] in the order of `XIELU_ROLES`; else None.
    """
    if curve is not None:
        return _xielu(gate_up.float(), curve).to(gate_up.dtype)
    if spec.activation == "relu":
        return F.relu(gate_up)
    if not spec.gated:
        wide = gate_up.float() if batch_invariant else gate_up
        return activation.apply_activation(wide, spec.activation).to(gate_up.dtype)
    gate, up = gate_up.chunk(2, -1)
    if spec.gate_scale != 1.0:
        gate = gate * spec.gate_scale
    if spec.activation == "silu":
        return F.silu(gate).mul_(up)
    wide = gate.float() if batch_invariant else gate
    if isinstance(spec, ExpertsSpec) and spec.activation == "softcapped":
        wide, up = gate.float(), up.float()
        capped = torch.tanh(wide / spec.alpha) * spec.alpha
        inner = capped * torch.sigmoid(wide) * (torch.tanh(up / spec.limit) * spec.limit)
        return inner.to(gate.dtype)
    if isinstance(spec, ExpertsSpec) and spec.activation == "clamped":
        wide = wide.clamp(max=spec.limit)
        wide = wide * torch.sigmoid(wide * spec.alpha)
        up = up.clamp(-spec.limit, spec.limit) + 1
    else:
        wide = F.gelu(wide, approximate="tanh" if spec.activation == "gelu_tanh" else "none")
    return wide.to(gate.dtype).mul_(up)


def _xielu(x: torch.Tensor, curve: torch.Tensor) -> torch.Tensor:
    """Applies xIELU (arXiv:2411.13010): a parabola above 0, and an exponential below."""
    alpha_p, alpha_n, beta, eps = curve.unbind()
    high = F.softplus(alpha_p) * x * x
    low = (beta + F.softplus(alpha_n)) * (torch.expm1(torch.minimum(x, eps)) - x)
    return torch.where(x > 0, high, low) + beta * x
