"""GPU version of `Decoder`, built from fused kernels. A `DevicePlan` holds the batch of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.attention.base import StepAttention
from sglang_lite.runtime.kernels.all_reduce import Peers
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.delta_gates import delta_rates, gate_heads
from sglang_lite.runtime.kernels.delta_scan import delta_scan
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.embed import add_features, embed
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import SoundPrefix
from sglang_lite.runtime.kernels.latent_attention import PAIRS_PER_PROGRAM
from sglang_lite.runtime.kernels.latent_store import latent_store
from sglang_lite.runtime.kernels.lora_weights import LoraStep
from sglang_lite.runtime.kernels.mamba1_scan import mamba1_scan
from sglang_lite.runtime.kernels.mamba2_scan import mamba2_scan
from sglang_lite.runtime.kernels.mlstm_scan import mlstm_scan
from sglang_lite.runtime.kernels.norm import add_norm, add_norm_eight, norm, norm_eight
from sglang_lite.runtime.kernels.rope_store import rope_store
from sglang_lite.runtime.kernels.sampling import BLOCK
from sglang_lite.runtime.kernels.short_conv import short_conv
from sglang_lite.runtime.kernels.state_conv import state_conv
from sglang_lite.runtime.kernels.wkv_scan import wkv_scan
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.gpu_ranks import GpuRanks, LogitParts, broadcast_last_stage
from sglang_lite.runtime.models.layers.adapted_linear import Rows, adapted_rows, with_adapters
from sglang_lite.runtime.models.layers.cca import convolve_heads
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.gpu_experts import GpuExperts
from sglang_lite.runtime.models.layers.gpu_linear import SumOfProducts, as_gpu_product
from sglang_lite.runtime.models.layers.latent import compute_queries
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.low_rank import with_additions
from sglang_lite.runtime.models.layers.norm import apply_norm
from sglang_lite.runtime.models.layers.rope import RotaryTable, rotate
from sglang_lite.runtime.models.layers.state_steps import StateSteps
from sglang_lite.runtime.models.spec import (
    NO_ROPE,
    AttentionSpec,
    ConvSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    Mamba2Spec,
    MixerSpec,
    ModelSpec,
    StateSpec,
    WkvSpec,
)
from sglang_lite.runtime.models.weight_reader import Layer
from sglang_lite.runtime.parallel.layout import Parallel
from sglang_lite.runtime.parallel.shared_steps import SharedSteps

_WITHOUT_KERNEL = ("relu", "xielu")  # activations that torch's operations compute


class GpuDecoder(Decoder):
    """Decoder-only transformer loaded on a GPU. Takes the arguments of Decoder.

    Raises:
        ModelError: keys and values differ in size, or Decoder raises it.
    """

    fused = True
    state_steps = StateSteps(
        state_conv=state_conv,
        delta_rates=delta_rates,
        delta_scan=delta_scan,
        gate_heads=gate_heads,
        mamba2_scan=mamba2_scan,
        mamba1_scan=mamba1_scan,
        wkv_scan=wkv_scan,
        mlstm_scan=mlstm_scan,
    )
    vocab_block = BLOCK
    cuts_embedding = False
    uncapturable: str | None = None
    sound: SoundPrefix | None = None

    def __init__(self, spec: ModelSpec, *args: Any, **kwargs: Any) -> None:  # arguments of Decoder
        if any(len(set(planes)) > 1 for planes in spec.kv_layout.layers):
            raise ModelError(
                "keys of another size than their values don't run on a GPU.",
                hint='Use device="cpu".',
            )
        experts = [x.feed_forward for x in spec.layers if isinstance(x.feed_forward, ExpertsSpec)]
        if not all(each.gated for each in experts):
            raise ModelError("experts without gates don't run on a GPU.", hint='Use device="cpu".')
        if any(isinstance(x, AttentionSpec) and x.distance_bias for x in spec.attentions):
            raise ModelError(
                "attention with a bias by distance doesn't run on a GPU.", hint='Use device="cpu".'
            )
        ranks = kwargs.get("ranks")
        # With dp, each rank has its own rows; see `share_steps`.
        every = ranks if isinstance(ranks, GpuRanks) and ranks.parallel.dp == 1 else None
        sharing = None if every is None else every.in_stage
        self.gpu_ranks = (
            sharing if isinstance(sharing, GpuRanks) else None
        )  # ranks that share a layer
        if every is not None:
            _check_ranks(spec, every.parallel)
        super().__init__(spec, *args, **kwargs)
        if self.offload is not None:  # copies dominate a step, so kernel launches cost nothing
            self.uncapturable = "they copy weights from the host's memory"
        self.parts = (
            None if every is None else LogitParts(every, tuple(map(len, self._vocabulary_parts)))
        )
        self._unrotated = None
        if any(isinstance(each, AttentionSpec) and each.norms_rotated for each in self.attentions):
            key_size = self.attentions[0].key_size
            self._unrotated = RotaryTable(
                NO_ROPE, key_size, self.max_positions, self.precision.compute, self.device
            )
        self._plain = spec.norm == "rms" and all(map(_has_plain_residual, spec.layers))
        self._alone = (
            self._plain
            and all(map(_can_fuse_norms, spec.layers))
            and all(map(_can_fuse_single_row, self.layers))
        )

    def share_steps(self, steps: SharedSteps) -> None:
        super().share_steps(steps)
        self._alone = False

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec, ...]:
        first = self.spec.first_attention
        mixers = (layer.attention for layer in self.spec.layers)
        return tuple(
            mixer if isinstance(mixer, AttentionSpec | LatentSpec) else first for mixer in mixers
        )

    @property
    def activation_elements(self) -> int:
        hidden = self.spec.hidden_size
        return max(
            hidden * 6
            + sum(mixer.activation_elements for mixer in layer.mixers)
            + _activation_elements(layer.feed_forward, hidden)
            + 3 * self.spec.layer_input_size
            + 4 * hidden * self.spec.reads_embeddings
            for layer in self.spec.layers
        )

    @property
    def rope_axes(self) -> torch.Tensor | None:
        return self.ropes[0].axes

    @property
    def active_parameters(self) -> int:
        return sum(
            layer.active_weight_elements(self.spec.hidden_size) for layer in self.spec.layers
        )

    @property
    def shares_prefixes(self) -> bool:
        # One row's heads may fill a kernel program, which is bound by products then, not by reading
        # keys.
        bound = any(
            isinstance(each, LatentSpec) and each.heads >= PAIRS_PER_PROGRAM
            for each in self.attentions
        )
        return not bound and all(each.window is None for each in self.attentions)

    @property
    def logit_softcap(self) -> float | None:
        return self.spec.logit_softcap

    def run(self, plan: DevicePlan, cache: KVCache, attention: StepAttention) -> torch.Tensor:
        """Computes the plan's tokens and stores their keys and values.

        Replicas that share feed-forwards must have begun a step.

        Args:
            plan: device plan of the step.
            cache: KV cache.
            attention: attention that has been prepared for this plan.

        Returns:
            Hidden states [T, hidden_size] after the last norm; with several stages, the rows after
            this rank's layers.
        """
        assert isinstance(self.embedding, torch.Tensor), "blocks stay on a CPU alone"
        rows = None if plan.lora is None else _adapter_rows(plan.lora, plan.slots, self.layers)
        residual = plan.rows
        if residual is None:
            residual = embed(plan, self.embedding, self.embedding_scale, self.features)
            if self.position_table is not None:
                at = plan.positions.long() + self.spec.position_offset
                residual.add_(self.position_table[at])
            if self.embedding_norm is not None:
                residual = norm(residual, self.embedding_norm, self.spec.rms_eps)
            if self.embedding_sum is not None:
                residual.add_(self.embedding_sum[0]).mul_(self.embedding_sum[1])
        given = None
        if self.layer_inputs is not None:
            ids = torch.where(plan.ids < 0, plan.last_tokens[plan.slots], plan.ids)
            given = self._inputs_of_layers(ids.long(), residual)
        elif self.spec.reads_embeddings or self.spec.router_size:
            given = self._inputs_of_layers(plan.ids, residual.clone())  # the layers overwrite it
        normed, residual = self._run_stage(residual, given, rows, plan, cache, attention)
        return self.watch.record_pass(
            plan.ids, plan.positions, normed if self.ranks.parallel.pp == 1 else residual
        )

    def finish_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns hidden states [R, hidden_size] after the last norm, given rows that `run`
        returned. With several stages, broadcasts the last stage's rows and normalises them.
        Otherwise `run` has already normalised the rows.
        """
        staged = self.ranks.parallel.pp > 1
        return (
            norm(broadcast_last_stage(self.ranks, hidden), self.norm, self.spec.rms_eps)
            if staged
            else hidden
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(self.finish_hidden(hidden))

    def _run_stage(
        self,
        residual: torch.Tensor,
        given: torch.Tensor | None,
        rows: Rows | None,
        plan: DevicePlan,
        cache: KVCache,
        attention: StepAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden states [T, hidden_size] after this rank's layers, both with and without
        the last norm applied.

        Args:
            residual: rows that enter the layers; overwritten.
            given: the layers' own inputs [T, layers, size], or None.
            rows: the step's rows with their adapters, or None without adapters.
            plan, cache, attention: as for `run`.
        """
        if len(residual) == 1 and self._alone and rows is None and not self.watch.observes_layers:
            return self._run_single_token(residual, plan, cache, attention)
        x: torch.Tensor | None = None
        scales: Scales | None = None
        peers = self._peers_for_block_sum(len(residual))
        at = None if cache.experts is None else plan.token_slots
        for i, own in enumerate(self._stream_layers()):
            self._add_layer_features(i, plan, residual)
            layer = (
                own
                if plan.lora is None or rows is None
                else with_adapters(own, plan.lora.layers[i], rows)
            )
            if layer.spec.block is not None:
                assert given is not None
                if x is not None:
                    residual.add_(x if scales is None else _apply_scales(x, scales))
                self.watch.record_layer(i - 1, residual)
                x = self._run_device_block(i, own, residual, given[:, i], plan, cache, attention)
                scales = None
                continue
            record = None if at is None else partial(cache.record_experts, i, at)
            first, second = self._choose_8_bit_types(layer, len(residual))
            normed: torch.Tensor | EightBitRows
            if layer.spec.mixes:
                normed = self._normalise_input(
                    layer.input_norm, x, residual, scales, peers, eight=first
                )
                self.watch.record_layer(i - 1, residual)
                _replace_residual(layer, residual, normed, 0)
                product = self._multiply_qkv(layer, normed, plan)
                seen = self._attend(i, layer, *product, plan, cache, attention)
                if layer.spec.parallel:
                    if layer.mlp_norm is not None:
                        normed = self._normalise_input(
                            layer.mlp_norm, None, residual, None, None, eight=second
                        )
                    residual.add_(
                        self._scale_output(layer, self.layer_ranks.sum(layer.output(seen)))
                    )
                else:
                    if layer.spec.beside is None:
                        x, scales = self._multiply_last_of_block(layer.output, seen, peers)
                    else:
                        x = self._add_beside(i, layer, normed, seen, plan, cache, peers)
                        scales = None
                    x, scales = self._finish_block(layer, layer.post_attention_norm, x, scales)
                    if layer.attention_sum is not None:
                        x = _weigh_sum(x, scales, residual, layer.attention_sum)
                        scales = None
            if layer.spec.feeds:
                if not layer.spec.parallel:
                    wide = isinstance(
                        layer.feed_forward, GpuExperts
                    )  # the router needs 16-bit rows
                    normed = self._normalise_input(
                        layer.mlp_norm, x, residual, scales, peers, eight=second, unquantised=wide
                    )
                    if not layer.spec.mixes:
                        self.watch.record_layer(i - 1, residual)
                    _replace_residual(layer, residual, normed, 1)
                if layer.spec.feeds_apart:
                    x = self._feed_beside_experts(layer, normed, residual, record)
                    x, scales = self._scale_output(layer, x), None
                else:
                    carried = None if given is None else given[:, i]
                    gate: torch.Tensor | None = None
                    fed = normed
                    if layer.channel_mix is not None:
                        assert isinstance(normed, torch.Tensor), "not in 8 bits"
                        fed, gate = self._mix_channels(i, layer, normed, plan, cache)
                    x, scales = self._feed_forward(
                        layer, fed, peers, len(residual), record, carried
                    )
                    if gate is not None:
                        x = (x if scales is None else _apply_scales(x, scales)) * gate
                        scales = None
                    x, scales = self._finish_block(layer, layer.post_mlp_norm, x, scales)
                    if layer.mlp_sum is not None:
                        x = _weigh_sum(x, scales, residual, layer.mlp_sum)
                        scales = None
            if layer.layer_scale is not None:
                assert x is not None
                assert scales is None, "what comes out has been normalised or gated"
                residual.add_(x)
                if given is not None:
                    residual.add_(self._feed_input(layer, residual, given[:, i]))
                residual.mul_(layer.layer_scale)
                x = None
        if x is None:
            hidden = norm(residual, self.norm, self.spec.rms_eps)
        else:
            hidden = add_norm(x, residual, self.norm, self.spec.rms_eps, scales, peers)
        return hidden, self.watch.record_layer(len(self.layers) - 1, residual)

    def _run_device_block(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        embeddings: torch.Tensor,
        plan: DevicePlan,
        cache: KVCache,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Returns the rows [T, hidden_size] that a layer with a block adds to the residual x, as
        described in `BlockSpec`.
        """
        eps = self.spec.rms_eps
        layer = with_additions(layer, SumOfProducts)
        assert layer.input_norm is not None
        assert layer.mlp_norm is not None
        assert layer.beside_norm is not None
        rows = norm(torch.cat((x, embeddings), 1), layer.input_norm, eps)
        product = self._multiply_qkv(layer, rows, plan)
        seen = self._attend(index, layer, *product, plan, cache, attention)
        h = norm(self.layer_ranks.sum(layer.output(seen)), layer.mlp_norm, eps)
        h, scales = self._feed_forward(layer, h, None, len(x), None)
        h = x + layer.block_output(h if scales is None else _apply_scales(h, scales))
        h = self._run_beside(index, layer, norm(h, layer.beside_norm, eps), plan, cache)
        return self.layer_ranks.sum(h)

    def _peers_for_block_sum(self, rows: int) -> Peers | None:
        """Returns the memory through which `add_norm` sums each block's output over the ranks.
        Returns None if the output is summed before `add_norm`, or if there is only one rank.
        """
        if self.gpu_ranks is None or not self._plain:
            return None
        return self.gpu_ranks.peers_for_fused_sum(
            rows, self.spec.hidden_size * self.precision.compute.itemsize
        )

    def _stream_layers(self) -> Iterable[Layer]:
        """Iterates over the layers, yielding each when its weights are on the device."""
        return self.watch.mark_layers(
            self.layers if self.offload is None else self.offload.stream(self.layers)
        )

    def _add_layer_features(self, index: int, plan: DevicePlan, residual: torch.Tensor) -> None:
        """Adds the image features for a layer to the residual that enters it."""
        if (
            self.features is not None
            and 0 < index < self.features.shape[1] // self.spec.hidden_size
        ):
            add_features(plan, self.features, index, residual)

    def _choose_8_bit_types(
        self, layer: Layer, rows: int
    ) -> tuple[torch.dtype | None, torch.dtype | None]:
        """Returns the 8-bit types that a layer's attention and feed-forward accept for this many
        rows, or None for 16 bits.
        """
        if layer.spec.norms == "residual" or layer.channel_mix is not None:
            return None, None  # these need the rows in 16 bits
        fed = layer.feed_forward if layer.shared is None else None  # ranks exchange rows of 16 bits
        first = (
            as_gpu_product(layer.qkv).eight_bit_input_type(rows)
            if _attention_kernel_prepares(layer.spec.attention, self.spec.norm)
            and not layer.spec.attention.output_gate
            and layer.spec.beside is None
            else None
        )
        if isinstance(fed, GpuExperts):
            wide = layer.spec.parallel or layer.spec.feeds_apart
            second = None if wide else fed.eight_bit_input_type(rows)
        else:
            second = (
                as_gpu_product(fed.gate_up).eight_bit_input_type(rows)
                if isinstance(fed, FeedForward) and layer.spec.feeds
                else None
            )
        both = first if first == second else None
        return (both, both) if layer.spec.parallel == "one norm" else (first, second)

    def _normalise_input(
        self,
        weight: torch.Tensor | None,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        scales: Scales | None,
        peers: Peers | None,
        *,
        eight: torch.dtype | None,
        unquantised: bool = False,
    ) -> torch.Tensor | EightBitRows:
        """Adds x to the residual. Returns the sum as the input of a linear layer, normalised if a
        weight is given.

        Args:
            weight: weight of the norm, or None for no norm.
            x: output of the previous block, or None at the first layer.
            residual: residual, updated in place.
            scales: factors that x is still to be multiplied by, or None.
            peers: memory through which the ranks' x are summed, or None if they already are.
            eight: 8-bit type of the rows to return, or None.
            unquantised: whether to keep the 16-bit rows, too.
        """
        eps = self.spec.rms_eps
        if weight is None:
            assert scales is None, "what comes out has been normalised"
            return residual if x is None else residual.add_(x)
        if x is None:
            return (
                norm(residual, weight, eps)
                if eight is None
                else norm_eight(residual, weight, eps, eight)
            )
        if eight is not None:
            return add_norm_eight(
                x, residual, weight, eps, scales, eight, peers, unquantised=unquantised
            )
        return add_norm(x, residual, weight, eps, scales, peers)

    def _finish_block(
        self, layer: Layer, weight: torch.Tensor | None, x: torch.Tensor, scales: Scales | None
    ) -> tuple[torch.Tensor, Scales | None]:
        """Normalises and scales a block's output before it is added to the residual. Returns the
        output, and any scales that are still to be applied.
        """
        if weight is not None:
            x = norm(x, weight, self.spec.rms_eps, scales)
            scales = None
        return self._scale_output(layer, x), scales

    def _multiply_last_of_block(
        self, linear: Linear, rows: torch.Tensor | EightBitRows, peers: Peers | None
    ) -> tuple[torch.Tensor, Scales | None]:
        """Computes the last linear layer of a block. Returns its output, and any scales that are
        still to be applied. Sums the output over the ranks unless `peers` is given. If an
        `add_norm` follows, the output may be in parts [P, M, N] that `add_norm` adds up.
        """
        if self.gpu_ranks is None or peers is not None:
            return (
                as_gpu_product(linear).multiply_in_parts(rows)
                if self._plain
                else as_gpu_product(linear).multiply_unscaled(rows)
            )
        x, scales = as_gpu_product(linear).multiply_unscaled(rows)
        return self.gpu_ranks.sum(x if scales is None else _apply_scales(x, scales)), None

    def _multiply_qkv(
        self, layer: Layer, rows: torch.Tensor | EightBitRows, plan: DevicePlan
    ) -> tuple[torch.Tensor, Scales | None]:
        """Computes the first linear layer of a layer's attention, and the norms and factors that the
        attention kernels can't apply. Returns the output, and any scales that are still to be
        applied.
        """
        spec = layer.spec.attention
        if isinstance(spec, WkvSpec):  # projects its input itself
            assert isinstance(rows, torch.Tensor), "not in 8 bits"
            return rows, None
        product = as_gpu_product(layer.qkv)
        if _attention_kernel_prepares(spec, self.spec.norm) and not spec.output_gate:
            return product.multiply_unscaled(rows)
        assert isinstance(rows, torch.Tensor), "not in 8 bits"
        qkv = product(rows)
        if not isinstance(spec, AttentionSpec) or _attention_kernel_prepares(spec, self.spec.norm):
            return qkv, None
        if spec.keys_of is not None:
            q = qkv.view(len(qkv), spec.heads, -1)
            normed = apply_norm(q, layer.q_norm, self.spec.rms_eps, "rms")
            at = self.ropes[layer.rope].cos_sin_at(plan.positions.long())
            return rotate(normed, *at).view(qkv.shape), None
        if spec.keys_as_values:
            qkv = torch.cat((qkv, qkv[:, spec.heads * spec.key_size :]), 1)
        if spec.value_norm:
            values = qkv[:, (spec.heads + spec.kv_heads) * spec.key_size :]
            by_head = values.view(len(qkv), spec.kv_heads, -1)
            by_head.copy_(apply_norm(by_head, None, self.spec.rms_eps, "rms"))
        if _kernel_prepares_keys(spec, self.spec.norm):
            return qkv, None
        sizes = [n * spec.key_size for n in (spec.heads, spec.kv_heads)]
        q, k = qkv[:, : sum(sizes)].split_with_sizes(sizes, 1)
        table = self.ropes[layer.rope]
        if spec.norms_rotated:
            at = table.cos_sin_at(plan.positions.long())
            for part in (q, k):
                heads = part.view(len(part), -1, spec.key_size)
                heads.copy_(rotate(heads, *at))
        for part, weight in zip((q, k), (layer.q_norm, layer.k_norm)):
            if weight is not None:
                # normalises each head, or the whole projection, depending on the weight's size
                normed = part.view(len(part), -1, weight.shape[-1])
                normed.copy_(apply_norm(normed, weight, self.spec.rms_eps, self.spec.norm))
        if table.query_scales is not None:
            q.mul_(table.query_scales[plan.positions.long()].unsqueeze(1))
        return qkv if spec.clip is None else qkv.clamp_(-spec.clip, spec.clip), None

    def _feed_forward(
        self,
        layer: Layer,
        rows: torch.Tensor | EightBitRows,
        peers: Peers | None,
        count: int,
        record: Callable[[torch.Tensor], None] | None,
        carried: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Scales | None]:
        """Computes a layer's feed-forward. Returns its output, and any scales that are still to be
        applied.

        Args:
            layer: weights of the layer.
            rows: normalised input rows.
            peers: as for `_multiply_last_of_block`.
            count: number of rows.
            record, carried: as for `GpuExperts`.
        """
        fed = layer.feed_forward
        if layer.shared is not None:
            assert isinstance(rows, torch.Tensor), "not in 8 bits"
            return layer.shared(rows), None
        if isinstance(fed, GpuExperts):
            if self.gpu_ranks is None or peers is not None:
                return fed(rows, parts=self._plain, record=record, carried=carried), None
            return self.gpu_ranks.sum(fed(rows, record=record, carried=carried)), None
        assert isinstance(fed, FeedForward), "as a GPU has them"
        gate_up = as_gpu_product(fed.gate_up)
        down = as_gpu_product(fed.down)
        scaled = fed.spec.gate_scale != 1.0 or fed.spec.inner_scale != 1.0
        if fed.spec.activation in _WITHOUT_KERNEL or scaled:
            up, scales = gate_up.multiply_unscaled(rows)
            if scales is not None:
                up = _apply_scales(up, scales)
            return self._multiply_last_of_block(down, fed.activate(up), peers)
        activate = (
            gate_up.multiply_ungated
            if isinstance(fed.spec, DenseSpec) and not fed.spec.gated
            else gate_up.multiply_gated
        )
        return self._multiply_last_of_block(
            down, activate(rows, fed.spec.activation, eight=down.eight_bit_input_type(count)), peers
        )

    def _feed_beside_experts(
        self,
        layer: Layer,
        rows: torch.Tensor | EightBitRows,
        residual: torch.Tensor,
        record: Callable[[torch.Tensor], None] | None,
    ) -> torch.Tensor:
        """Returns a feed-forward's output if experts and shared expert have separate norms.

        Args:
            layer: weights of the layer.
            rows: the shared expert's normalised input rows.
            residual: rows that enter the block.
            record: as for `GpuExperts`.
        """
        fed = layer.feed_forward
        assert isinstance(fed, GpuExperts)
        assert isinstance(rows, torch.Tensor), "not in 8 bits"
        assert layer.experts_norm is not None
        assert layer.router_scale is not None
        eps = self.spec.rms_eps
        routed = norm(residual, layer.router_scale, eps)
        chosen = fed.apply_chosen(norm(residual, layer.experts_norm, eps), routed, record)
        return self._add_normed(layer, fed.apply_shared(rows), chosen)

    def _run_single_token(
        self, x: torch.Tensor, plan: DevicePlan, cache: KVCache, attention: StepAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a single token like `_run_stage`, with norms and activations fused into the
        neighbouring matmuls.
        """
        eps = self.spec.rms_eps
        residual: torch.Tensor | None = None
        for i, layer in enumerate(self._stream_layers()):
            assert layer.input_norm is not None
            assert layer.mlp_norm is not None
            if residual is not None:
                self._add_layer_features(i, plan, residual)
            qkv, total = as_gpu_product(layer.qkv).multiply_single_row(
                x, residual=residual, norm=layer.input_norm, eps=eps
            )
            x = self.layer_ranks.sum(
                layer.output(self._attend(i, layer, qkv, None, plan, cache, attention))
            )
            fed = layer.feed_forward
            assert isinstance(fed, FeedForward)
            gated_up, residual = as_gpu_product(fed.gate_up).multiply_single_row(
                x, residual=total, norm=layer.mlp_norm, eps=eps, gate=fed.spec.activation
            )
            x = self.layer_ranks.sum(fed.down(gated_up))
        assert residual is not None
        return add_norm(x, residual, self.norm, eps), residual

    def raw_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits [R, V] for rows of the result of `run`, in the model's dtype and before
        soft-capping. V is this rank's part of the vocabulary. Writes them to `out` if given.
        """
        hidden = self.finish_hidden(hidden)
        logits = (
            self.head(hidden)
            if out is None
            else as_gpu_product(self.head).multiply_into(hidden, out)
        )
        return (
            logits
            if self.spec.logit_scale == 1.0
            else torch.mul(logits, self.spec.logit_scale, out=out)
        )

    def _attend(
        self,
        index: int,
        layer: Layer,
        qkv: torch.Tensor,
        scales: Scales | None,
        plan: DevicePlan,
        cache: KVCache,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Computes attention outputs [T, heads * head_dim] from the output of the layer's first
        linear layer.
        """
        spec = layer.spec.attention
        if isinstance(spec, ConvSpec):
            assert layer.kernel is not None
            return short_conv(qkv, layer.kernel, plan.in_layer(spec.window), cache, index)
        if isinstance(spec, StateSpec):
            return self._mix_states(spec, layer, qkv, plan.states, cache.states[index])
        if isinstance(spec, LatentSpec):
            return self._attend_latents(index, layer, spec, qkv, plan, cache, attention)
        assert isinstance(spec, AttentionSpec)
        if layer.convolutions is not None:
            qkv = qkv if scales is None else _apply_scales(qkv, scales)
            scales = None
            states = cache.states[index]
            convolved = spec, layer.convolutions, qkv, plan.states, states, self.state_steps
            qkv = convolve_heads(*convolved)
        gate = None
        if spec.output_gate:
            width = (spec.heads + spec.kv_heads) * spec.key_size + spec.kv_heads * spec.value_size
            gate = qkv[:, width:].sigmoid()
            qkv = qkv[:, :width].contiguous()
        norms = (
            (layer.q_norm, layer.k_norm)
            if _kernel_prepares_keys(spec, self.spec.norm)
            else (None, None)
        )
        table = self.ropes[layer.rope]
        if spec.norms_rotated:
            assert self._unrotated is not None
            table = self._unrotated  # `_multiply_qkv` has rotated the heads
        turn = *norms, self.spec.rms_eps, table.tables
        out = qkv.new_empty((len(qkv), spec.heads, spec.key_size))
        if spec.keys_of is not None:
            attention.attend(qkv.view(out.shape), cache, spec.keys_of, out, layer.rules)
        elif attention.from_product is not None:
            attention.from_product(qkv, *turn, cache, index, out, scales=scales, rules=layer.rules)
        else:
            q = rope_store(qkv, *turn, plan.in_layer(spec.window), cache, index, scales)
            attention.attend(q, cache, index, out, layer.rules)
        if gate is not None:
            out.mul_(gate.view(len(qkv), spec.heads, spec.gate_size))
        if spec.output_scale != 1.0:
            out.mul_(spec.output_scale)
        return out.view(len(qkv), -1)

    def _add_beside(
        self,
        index: int,
        layer: Layer,
        rows: torch.Tensor | EightBitRows,
        seen: torch.Tensor,
        plan: DevicePlan,
        cache: KVCache,
        peers: Peers | None,
    ) -> torch.Tensor:
        """Returns the sum [T, hidden_size] of the outputs of attention and of the state space
        beside it.

        Args:
            index: index of the layer.
            layer: its weights.
            rows: its normalised input rows.
            seen: attention outputs.
            plan, cache: as for `run`.
            peers: as for `_multiply_last_of_block`.
        """
        assert isinstance(rows, torch.Tensor), "not in 8 bits"
        x = layer.output(seen) + self._run_beside(index, layer, rows, plan, cache)
        return x if self.gpu_ranks is None or peers is not None else self.gpu_ranks.sum(x)

    def _attend_latents(
        self,
        index: int,
        layer: Layer,
        spec: LatentSpec,
        product: torch.Tensor,
        plan: DevicePlan,
        cache: KVCache,
        attention: StepAttention,
    ) -> torch.Tensor:
        """Computes attention outputs [T, heads * value_size] for latent attention. Some rows absorb
        their queries into the latent space, and the others expand keys and values from latents.
        """
        weights = layer.latent
        rope = self.ropes[layer.rope].tables
        assert weights is not None
        gate = None
        if spec.output_gate:
            gate = product[:, -spec.gate_size :].sigmoid()
            product = product[:, : -spec.gate_size].contiguous()
        q = compute_queries(spec, weights, product[:, : -spec.key_size])
        nope, turned = q.split_with_sizes((spec.nope_size, spec.rope_size), 2)
        expanded = attention.expanded
        rows = len(q) if expanded is None else plan.decoding  # rows whose queries are absorbed
        absorbed = q.new_empty((rows, spec.heads, spec.key_size))
        if rows:
            weights.keys.multiply_into(nope[:rows], absorbed[..., : spec.rank])
        target = absorbed[..., spec.rank :] if expanded is None else turned
        latent_store(product, turned, target, weights.norm, spec.norm_eps, rope, plan, cache, index)
        out = q.new_empty((len(q), spec.heads, spec.value_size))
        if rows:
            if expanded is not None:
                absorbed[..., spec.rank :] = turned[:rows]
            seen = absorbed.new_empty(absorbed.shape)
            attention.attend(absorbed, cache, index, seen, AttentionRules(spec.scale))
            weights.values.multiply_into(seen[..., : spec.rank], out[:rows])
        if expanded is not None:
            expanded(
                q, weights.keys.weight, weights.values.weight, cache, index, out, scale=spec.scale
            )
        if gate is not None:
            out.mul_(gate.unsqueeze(2))
        return out.view(len(q), -1)


def _replace_residual(
    layer: Layer, residual: torch.Tensor, normed: torch.Tensor | EightBitRows, block: int
) -> None:
    """Overwrites the residual with a block's normalised input, if the layer normalises the
    residual itself. `block` is 0 for attention, 1 for the feed-forward.
    """
    if layer.spec.norms == "residual":
        assert isinstance(normed, torch.Tensor), "not in 8 bits"
        torch.mul(normed, layer.spec.kept[block], out=residual)


def _weigh_sum(
    x: torch.Tensor, scales: Scales | None, residual: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Returns a block's output and changes the residual in place, so that their sum is that of
    `Decoder._add_output`. `scales` are factors that x is still to be multiplied by, or None.
    """
    shift, factor, residual_shift, residual_factor = weights.unbind()
    residual.add_(residual_shift).mul_(residual_factor)
    return ((x if scales is None else _apply_scales(x, scales)) + shift) * factor


def _apply_scales(x: torch.Tensor, scales: Scales) -> torch.Tensor:
    return (x * scales.rows[: len(x)].unsqueeze(1) * scales.columns).to(x.dtype)


def _attention_kernel_prepares(spec: MixerSpec, norm: str) -> bool:
    """Returns whether the attention kernels can apply all that a layer does to queries, keys and
    values before attention. They can't if it normalises values, or takes keys as values.
    """
    return (
        _kernel_prepares_keys(spec, norm)
        and isinstance(spec, AttentionSpec)
        and not spec.value_norm
        and not spec.keys_as_values
        and spec.keys_of is None
    )


def _kernel_prepares_keys(spec: MixerSpec, norm: str) -> bool:
    """Returns whether the attention kernels can apply all that a layer does to queries and keys
    before attention. They can't for latent attention and convolutions, or if the layer clips
    queries and keys, normalises them after the rotation, or scales queries by position.
    """
    if not isinstance(spec, AttentionSpec) or spec.clip is not None:
        return False
    if spec.norms_rotated or spec.rope.query_growth:
        return False
    return not spec.qk_norm or (spec.qk_norm == "head" and norm == "rms")


def _adapter_rows(step: LoraStep, slots: torch.Tensor, layers: Iterable[Layer]) -> Rows:
    """Maps the step's rows to their adapters, in the format of the LoRA kernels that will be used."""
    first = (as_gpu_product(layer.qkv) for layer in layers if layer.spec.mixes)
    return adapted_rows(step, slots, tiles=all(product.tiles for product in first))


def _activation_elements(spec: FeedForwardSpec, hidden: int) -> int:
    """Returns the peak number of activation elements per token in a feed-forward."""
    if isinstance(spec, DenseSpec):
        return 3 * spec.size
    return spec.top_k * (spec.size + hidden) + 3 * spec.shared_size + hidden


def _check_ranks(spec: ModelSpec, parallel: Parallel) -> None:
    """Raises ParameterError if ranks on GPUs can't share a model."""
    problem = None
    count = parallel.ranks
    heads = [layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]
    lightning = any(isinstance(layer.attention, LightningSpec) for layer in spec.layers)
    if parallel.tp > 1 and (lightning or any(each.qk_norm == "whole" for each in heads)):
        problem = "a norm over all heads"
    mambas = [x for layer in spec.layers for x in layer.mixers if isinstance(x, Mamba2Spec)]
    if any(each.norm and each.groups < parallel.tp for each in mambas):
        problem = "a norm over all heads of a group"
    if spec.vocab_size <= (count - 1) * BLOCK:
        problem = f"{spec.vocab_size} tokens, of which each takes multiples of {BLOCK}"
    if problem is not None:
        setting = parallel.setting
        raise ParameterError(
            setting,
            f"{count} GPUs can't share {problem}.",
            hint=f'Use {setting}=1, or device="cpu".',
        )


def _has_plain_residual(layer: LayerSpec) -> bool:
    """Returns whether a layer's block outputs can be added to the residual unchanged, as `add_norm`
    does.
    """
    return (
        layer.norms == "before"
        and not layer.parallel
        and not layer.scaled
        and layer.block is None
        and not layer.residual_weights
        and layer.residual_scale == 1.0
    )


def _can_fuse_single_row(layer: Layer) -> bool:
    """Returns whether the matmuls of a layer can include the norm before them and the gate after
    them, for a single row.
    """
    fed = layer.feed_forward
    return (
        layer.spec.mixes
        and layer.spec.feeds
        and as_gpu_product(layer.qkv).fuses_one
        and isinstance(fed, FeedForward)
        and as_gpu_product(fed.gate_up).fuses_one
    )


def _can_fuse_norms(layer: LayerSpec) -> bool:
    """Returns whether a plain layer's norms, activations and residual sums can be fused into the
    matmuls of a single row.
    """
    fed = layer.feed_forward
    attention = layer.attention
    if (
        layer.beside is not None
        or attention.output_gate
        or (
            isinstance(attention, AttentionSpec)
            and not _attention_kernel_prepares(attention, "rms")
        )
    ):
        return False
    scaled = fed.gate_scale != 1.0 or fed.inner_scale != 1.0
    return isinstance(fed, DenseSpec) and fed.gated and not scaled
