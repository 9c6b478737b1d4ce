"""The decoder as fused kernels: the same weights, run from a device plan."""

from __future__ import annotations

from typing import Any

import torch

from sglang_lite.runtime.attention.base import Attend
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.embed import embed
from sglang_lite.runtime.kernels.fp8 import Fp8Rows, Scales
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from sglang_lite.runtime.kernels.rope_store import rope_store
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layers.gpu_linear import matrix


class GpuDecoder(Decoder):
    """A loaded model on a GPU. Takes the arguments of Decoder."""

    fused = True

    @property
    def shares_prefixes(self) -> bool:
        """True where all layers see a whole prefix, so that rows can read a common one together."""
        return all(layer.window is None for layer in self.layers)

    def run(self, plan: DevicePlan, cache: KVCache, attend: Attend) -> torch.Tensor:
        """Computes the plan's tokens and stores their keys and values.

        Args:
            attend: attention as it was begun for this plan.

        Returns:
            Hidden states [T, hidden_size] after the last norm.
        """
        eps = self.spec.rms_eps
        residual = embed(plan, self.embedding, self.embedding_scale)
        if len(residual) == 1 and not self.spec.post_norms:
            return self._run_one(residual, plan, cache, attend)
        many = len(residual) > 1  # in one way for 8 bits, where that is what the product takes
        x, scales = residual, None
        for i, layer in enumerate(self.layers):
            qkv, output, gate_up, down = map(matrix, (layer.qkv, layer.output, layer.gate_up, layer.down))
            rows: torch.Tensor | Fp8Rows
            if i:
                norm = add_rms_norm_fp8 if many and qkv.takes_fp8 else add_rms_norm
                rows = norm(x, residual, layer.input_norm, eps, scales)
            else:
                rows = (rms_norm_fp8 if many and qkv.takes_fp8 else rms_norm)(x, layer.input_norm, eps)
            x, scales = output.unscaled(self._attend(i, layer, *qkv.unscaled(rows), plan, cache, attend))
            if layer.post_attention_norm is not None:
                x, scales = rms_norm(x, layer.post_attention_norm, eps, scales), None
            norm = add_rms_norm_fp8 if many and gate_up.takes_fp8 else add_rms_norm
            rows = norm(x, residual, layer.mlp_norm, eps, scales)
            x, scales = down.unscaled(gate_up.gated(rows, self.spec.activation, eight=many and down.takes_fp8))
            if layer.post_mlp_norm is not None:
                x, scales = rms_norm(x, layer.post_mlp_norm, eps, scales), None
        return add_rms_norm(x, residual, self.norm, eps, scales)

    def _run_one(self, x: torch.Tensor, plan: DevicePlan, cache: KVCache, attend: Attend) -> torch.Tensor:
        """A single token [1, hidden_size]: norms and activations are part of the products beside them."""
        eps = self.spec.rms_eps
        residual: torch.Tensor | None = None
        for i, layer in enumerate(self.layers):
            qkv, total = matrix(layer.qkv).one(x, residual=residual, norm=layer.input_norm, eps=eps)
            x = layer.output(self._attend(i, layer, qkv, None, plan, cache, attend))
            gated_up, residual = matrix(layer.gate_up).one(
                x, residual=total, norm=layer.mlp_norm, eps=eps, gate=self.spec.activation
            )
            x = layer.down(gated_up)
        assert residual is not None
        return add_rms_norm(x, residual, self.norm, eps)

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab_size] of hidden states, in the model's format and before soft-capping."""
        return self.head(hidden)

    def _attend(
        self,
        index: int,
        layer: Any,
        qkv: torch.Tensor,
        scales: Scales | None,
        plan: DevicePlan,
        cache: KVCache,
        attend: Attend,
    ) -> torch.Tensor:
        """Outputs of the heads [T, heads * head_dim] of a layer's QKV product."""
        spec = self.spec
        rope = self.local_rope if layer.window is not None and self.local_rope else self.rope
        q = rope_store(qkv, layer.q_norm, layer.k_norm, spec.rms_eps, rope.tables, plan, cache, index, scales)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend(q, cache, index, out, scale=spec.scale, window=layer.window, softcap=spec.attention_softcap)
        return out.view(len(qkv), -1)
