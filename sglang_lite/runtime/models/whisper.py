"""Decoder of Whisper (arXiv:2212.04356): transformers' layers, computed over our KV cache.

A sequence begins with the frames of a sound. In each layer, the cache holds the keys and values
that cross attention uses for them. These depend on no other token, so the cache keeps, shares and
evicts them like any prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F

from sglang_lite.runtime.attention.base import StepAttention
from sglang_lite.runtime.attention.cross import plan_text_attention
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import KVLayout, SoundPrefix
from sglang_lite.runtime.kernels.reference.attention import attention, store_kv
from sglang_lite.runtime.kernels.reference.page_table import token_slots
from sglang_lite.runtime.models.cached_module import CachedModule
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import NO_ROPE, AttentionSpec
from sglang_lite.runtime.models.vision_tower import build_without_weights, load_encoder_weights
from sglang_lite.runtime.models.weights.source import WeightSource

# Attention of a layer, from its index and its queries, or queries, keys and values [T, heads, head
# size].
_OverSound: TypeAlias = Callable[[int, torch.Tensor], torch.Tensor]
_OverText: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class WhisperDecoder(CachedModule):
    """Decoder of Whisper, on a CPU or a GPU, where it is a `DeviceModel`.

    Args:
        folder: folder of the model.
        source: weights of the model; the decoder's are taken.
        dtype, device: data type and device of the weights and the computation.
        sound: tokens of the sound that begins each sequence.

    Attributes:
        features: encoder outputs of sounds [rows, hidden size]; id -2 - r of a token stands for row
            r.

    Raises:
        ModelError: transformers can't make the decoder, or a tensor is missing or has a wrong
            shape.
    """

    uncapturable: str | None = None
    shares_prefixes = False
    both_ways = True  # its attention reads `DevicePlan.limits`

    def __init__(
        self,
        folder: Path,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        sound: SoundPrefix,
    ) -> None:
        from transformers import AutoModel

        config, self._decoder = build_without_weights(
            folder, "decoder", lambda c: AutoModel.from_config(c, dtype=dtype).decoder
        )
        load_encoder_weights(torch.nn.ModuleDict({"decoder": self._decoder}), source, dtype, device)
        source.ignore_tensor(
            "proj_out.weight"
        )  # a copy of the embedding that some checkpoints have
        self._decoder.to(device).eval().requires_grad_(False)
        self.sound: SoundPrefix | None = sound
        self.dtype = dtype
        self.device = device
        self.precision = Precision(dtype, dtype, dtype)
        self.vocab_size: int = config.vocab_size
        self.features: torch.Tensor | None = None
        heads = config.decoder_attention_heads
        size = config.d_model // config.decoder_attention_heads
        each = AttentionSpec(heads, heads, size, size, size**-0.5, NO_ROPE)
        self.attentions = (each,) * config.decoder_layers
        self.kv_layout = KVLayout(tuple(spec.planes for spec in self.attentions))
        self.activation_elements = 16 * config.d_model + 2 * config.decoder_ffn_dim
        self.active_parameters = sum(weight.numel() for weight in self._decoder.parameters())
        self._prefix = sound
        self._over_text, self._over_sound = (
            AttentionRules(each.scale, causal=causal) for causal in (True, False)
        )

    @property
    def fused(self) -> bool:
        return self.device.type == "cuda"

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: KVCache
    ) -> torch.Tensor:
        """Computes hidden states [T, hidden_size] of text, with zeros for sound tokens, and stores
        all keys and values.

        Args:
            ids: token ids, int64 [T]; those of sounds are negative.
            positions: positions of the tokens, int64 [T].
            plan: slots that the step writes and reads.
            cache: KV cache.
        """
        text = ids >= 0
        heard = self._encoder_outputs(ids[~text])
        heard_at = plan.store_at[~text]
        own, sound = plan_text_attention(plan, text, self._prefix)

        def attend_to_text(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            if len(heard):
                store_kv(cache, layer, heard_at, q, *self._cross_kv(layer, heard))
            q = store_kv(cache, layer, own.store_at, q, k, v)
            return attention(q, cache, layer, own, self._over_text)

        def attend_to_sound(layer: int, q: torch.Tensor) -> torch.Tensor:
            return attention(q, cache, layer, sound, self._over_sound)

        found = self._run_layers(ids[text], positions[text], attend_to_text, attend_to_sound)
        return found.new_zeros(len(ids), found.shape[1]).index_copy_(0, text.nonzero()[:, 0], found)

    @torch.inference_mode()
    def run(self, plan: DevicePlan, cache: KVCache, attention: StepAttention) -> torch.Tensor:
        """Computes hidden states [T, hidden size] of the plan's tokens and stores all keys and
        values.

        Hidden states of sound tokens are meaningless. The host does not know which tokens are of
        sounds, so keys and values are computed for both cases.

        Args:
            plan: device plan of the step.
            cache: KV cache.
            attention: `CrossAttention` that has been prepared for this plan.
        """
        from sglang_lite.runtime.kernels.kv_store import kv_store  # needs Triton

        ids = torch.where(plan.ids == -1, plan.last_tokens[plan.slots], plan.ids)
        if plan.features:
            is_sound = (ids < 0)[:, None, None]
            heard = self._encoder_outputs(ids.clamp(max=-2))
        store_at = token_slots(plan, plan.slots, plan.positions)

        def attend_text_slots(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            if plan.features:
                k, v = (
                    torch.where(is_sound, *each)
                    for each in zip(self._cross_kv(layer, heard), (k, v))
                )
            kv_store(k, v, store_at, cache, layer)
            attention.attend(q, cache, layer, out := torch.empty_like(q), self._over_text)
            return out

        def attend_sound_slots(layer: int, q: torch.Tensor) -> torch.Tensor:
            attention.attend(q, cache, layer, out := torch.empty_like(q), self._over_sound)
            return out

        return self._run_layers(
            ids.clamp(min=0), plan.positions, attend_text_slots, attend_sound_slots
        )

    def raw_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        found = F.linear(hidden, self._decoder.embed_tokens.weight)
        return found if out is None else out.copy_(found)

    def _run_layers(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        over_text: _OverText,
        over_sound: _OverSound,
    ) -> torch.Tensor:
        decoder = self._decoder
        learned = decoder.embed_positions.weight
        x = (
            decoder.embed_tokens.weight[ids]
            + learned[(positions - self._prefix.tokens).clamp(0, len(learned) - 1)]
        )
        for i, layer in enumerate(decoder.layers):
            own = layer.self_attn
            cross = layer.encoder_attn
            normed = layer.self_attn_layer_norm(x)
            q, k, v = (
                self._heads(project(normed)) for project in (own.q_proj, own.k_proj, own.v_proj)
            )
            x = x + own.out_proj(over_text(i, q, k, v).flatten(1))
            q = self._heads(cross.q_proj(layer.encoder_attn_layer_norm(x)))
            x = x + cross.out_proj(over_sound(i, q).flatten(1))
            x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x))))
        hidden: torch.Tensor = decoder.layer_norm(x)
        return hidden

    def _encoder_outputs(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks up the encoder outputs [T, hidden size] of sound tokens by their ids."""
        assert self.features is not None, "an engine gives it a store of features"
        return self.features[-2 - ids]

    def _cross_kv(self, layer: int, heard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of a layer's cross attention, [T, heads, head size] each, for the
        encoder outputs `heard`.
        """
        cross = self._decoder.layers[layer].encoder_attn
        return self._heads(cross.k_proj(heard)), self._heads(cross.v_proj(heard))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), self.attentions[0].heads, self.attentions[0].key_size)
