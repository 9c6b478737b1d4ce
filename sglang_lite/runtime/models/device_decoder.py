"""The decoder as fused kernels: the same weights, run from a device plan."""

from __future__ import annotations

from typing import Any

import torch

from sglang_lite.runtime.kernels.activation import gated
from sglang_lite.runtime.kernels.decode_attention import decode_attention
from sglang_lite.runtime.kernels.embed import embed
from sglang_lite.runtime.kernels.fp8 import Scales
from sglang_lite.runtime.kernels.norm import add_rms_norm, rms_norm
from sglang_lite.runtime.kernels.plan import DevicePlan
from sglang_lite.runtime.kernels.prefill_attention import prefill_attention
from sglang_lite.runtime.kernels.prefix_attention import prefix_attention
from sglang_lite.runtime.kernels.reference import KVCache
from sglang_lite.runtime.kernels.rope_store import rope_store
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layers.device_linear import matrix


class DeviceDecoder(Decoder):
    """A loaded model on a GPU. Takes what Decoder takes."""

    fused = True

    @property
    def shares_prefixes(self) -> bool:
        """Whether all layers see a whole prefix, so that rows can read a common one together."""
        return all(layer.window is None for layer in self.layers)

    def run(self, plan: DevicePlan, cache: KVCache) -> torch.Tensor:
        """Computes the plan's tokens and stores their keys and values.

        Returns:
            Hidden states [T, hidden_size] after the last norm.
        """
        eps = self.spec.rms_eps
        residual = embed(plan, self.embedding, self.embedding_scale)
        if len(residual) == 1 and not self.spec.post_norms:
            return self._run_one(residual, plan, cache)
        x = rms_norm(residual, self.layers[0].input_norm, eps)
        scales: Scales | None = None
        for i, layer in enumerate(self.layers):
            if i:
                x = add_rms_norm(x, residual, layer.input_norm, eps, scales)
            x = self._attend(i, layer, *matrix(layer.qkv).unscaled(x), plan, cache)
            x, scales = matrix(layer.output).unscaled(x)
            if layer.post_attention_norm is not None:
                x, scales = rms_norm(x, layer.post_attention_norm, eps, scales), None
            x = add_rms_norm(x, residual, layer.mlp_norm, eps, scales)
            gate_up, scales = matrix(layer.gate_up).unscaled(x)
            x, scales = matrix(layer.down).unscaled(gated(gate_up, self.spec.activation, scales))
            if layer.post_mlp_norm is not None:
                x, scales = rms_norm(x, layer.post_mlp_norm, eps, scales), None
        return add_rms_norm(x, residual, self.norm, eps, scales)

    def _run_one(self, x: torch.Tensor, plan: DevicePlan, cache: KVCache) -> torch.Tensor:
        """A single token [1, hidden_size]: norms and activations are part of the products beside them."""
        eps = self.spec.rms_eps
        residual: torch.Tensor | None = None
        for i, layer in enumerate(self.layers):
            qkv, total = matrix(layer.qkv).one(x, residual=residual, norm=layer.input_norm, eps=eps)
            x = layer.output(self._attend(i, layer, qkv, None, plan, cache))
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
        self, index: int, layer: Any, qkv: torch.Tensor, scales: Scales | None, plan: DevicePlan, cache: KVCache
    ) -> torch.Tensor:
        """From a layer's QKV product to the heads' outputs [T, heads * head_dim]."""
        spec = self.spec
        rope = self.local_rope if layer.window is not None and self.local_rope else self.rope
        q = rope_store(qkv, layer.q_norm, layer.k_norm, spec.rms_eps, rope.tables, plan, cache, index, scales)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale, window, softcap = spec.scale, layer.window, spec.attention_softcap
        if plan.decoding:
            if plan.shared is not None:
                prefix_attention(q, cache, index, plan, scale=scale, softcap=softcap)
            decode_attention(q, cache, index, plan, out, scale=scale, window=window, softcap=softcap)
        if len(plan.blocks):
            prefill_attention(q, cache, index, plan, out, scale=scale, window=window, softcap=softcap)
        return out.view(len(qkv), -1)
