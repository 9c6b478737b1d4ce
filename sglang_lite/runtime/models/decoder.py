"""Decoder-only transformer for all families, whose differences are in `ModelSpec`.

Maps token ids and an attention plan to hidden states and logits. Knows nothing of requests
or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn

import torch

from sglang_lite.constraints.memo import trim
from sglang_lite.runtime.kernels.arena import Arena, DeviceArena
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales, LayerStates
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.kernels.reference.attention import attention, store_kv
from sglang_lite.runtime.kernels.reference.kv_copy import copy_kv
from sglang_lite.runtime.kernels.state_rows import StateWave
from sglang_lite.runtime.models.cpu_small_batch import small_batch_step
from sglang_lite.runtime.models.families import FAMILIES
from sglang_lite.runtime.models.layer_watch import LayerWatch
from sglang_lite.runtime.models.layers.cca import convolve_heads
from sglang_lite.runtime.models.layers.conv import gated_conv
from sglang_lite.runtime.models.layers.depth_attention import attend_over_depth
from sglang_lite.runtime.models.layers.distance_bias import compute_distance_bias, limit_norms
from sglang_lite.runtime.models.layers.experts import Experts, FeedForward, apply_activation
from sglang_lite.runtime.models.layers.latent import latent_attention
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.low_rank import add_linear, with_additions
from sglang_lite.runtime.models.layers.norm import apply_norm
from sglang_lite.runtime.models.layers.rope import Rotation, rotate
from sglang_lite.runtime.models.layers.rwkv import mix_channels
from sglang_lite.runtime.models.layers.short_convs import (
    CONV_OF_ATTENTION,
    CONV_OF_FEED_FORWARD,
    CONV_OF_KEYS_VALUES,
    apply_dynamic_conv,
    apply_short_conv,
)
from sglang_lite.runtime.models.layers.state_mixer import mix_states
from sglang_lite.runtime.models.layers.state_steps import ON_CPU
from sglang_lite.runtime.models.lora.cpu_step import LayerAdapters
from sglang_lite.runtime.models.offload import Offload
from sglang_lite.runtime.models.parameters import parameters
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.sharding import rank_spec, vocabulary_part
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    ConvSpec,
    LatentSpec,
    ModelSpec,
    StateSpec,
    WkvSpec,
)
from sglang_lite.runtime.models.weight_reader import Layer, WeightReader
from sglang_lite.runtime.models.weights.source import WeightSource
from sglang_lite.runtime.parallel.collectives import ONE_PROCESS, Collectives, run_stages_in_turn
from sglang_lite.runtime.parallel.placement import ExpertPlacement
from sglang_lite.runtime.parallel.shared_steps import (
    UNSHARED,
    SharedFeedForward,
    SharedSteps,
    Steps,
)

if TYPE_CHECKING:
    from sglang_lite.runtime.models.expert_moves import ExpertMoves
    from sglang_lite.runtime.models.sound_tower import SoundTower
    from sglang_lite.runtime.models.vision_tower import VisionTower
    from sglang_lite.runtime.models.weight_memory import WeightMemory

_DRAFT_TENSORS = (
    "mtp.",
    "model.mtp.",
    "model.mtp_",
)  # prefixes of drafting layers outside the list of layers
_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")
_LAYERS_PER_TRIM = 4  # trimming also returns pages that the next layers need


class Decoder:
    """Decoder-only transformer with loaded weights.

    Args:
        spec: shape of the model.
        source: weights of the model, read tensor by tensor, each exactly once.
        precision: dtypes of weights, activations and cache.
        device: device of weights and computation.
        max_positions: longest sequence that will be run, in tokens.
        progress: wraps the iteration over layer indices while weights are read, for example to show
            progress.
        head: whether to load the head that computes logits; if False, a head in the checkpoint is
            ignored.
        ranks: collectives of the ranks that have parts of the model, each of which loads its own.
        offload: keeps the last layers' weights in host memory; None to keep all on the device.
        placement: experts held by each group of ranks; None to divide them into consecutive ranges.

    Attributes:
        spec: shape of this rank's part of the model, with the full vocabulary.
        layer_ranks: collectives of the ranks that share the layers.
        linears: builder of its linear layers.
        unused_tensors: prefixes of tensors that a checkpoint may have in addition to the model's.
        tower: encoder of the images or sounds whose features the decoder reads, or None.
        both_ways: whether image tokens attend to later tokens.
        recorded: heads, size and dtype of what caches record for each token, by the cache's
            attribute.
        expert_moves: moves experts between ranks, if the model started with a placement.
        weight_memory: memory of the weights on a GPU, if it and the caches can be released.
        watch: observes the layers for profiling and dumps.

    Raises:
        ModelError: a tensor is missing, has a wrong shape, or is not used by the model.
        ParameterError: the ranks can't share the model.
    """

    fused = False
    state_steps = ON_CPU
    vocab_block = 1  # vocabulary parts are multiples of this many tokens
    cuts_embedding = True  # whether ranks shard the embedding table, too

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        precision: Precision,
        device: torch.device,
        max_positions: int,
        progress: Callable[[Iterable[int]], Iterable[int]] = iter,
        *,
        head: bool = True,
        ranks: Collectives = ONE_PROCESS,
        offload: Offload | None = None,
        placement: ExpertPlacement | None = None,
    ) -> None:
        self.offload = offload
        self.precision = precision
        self.device = device
        self.ranks = ranks
        self.max_positions = max_positions
        reader = WeightReader(
            spec,
            source,
            precision,
            device,
            fused=self.fused,
            parallel=ranks.parallel,
            vocab_block=self.vocab_block,
            cuts_embedding=self.cuts_embedding,
            placement=placement,
        )
        self.spec = reader.of_rank
        mixers = (layer.attention for layer in self.spec.layers)
        windows = [mixer.window for mixer in mixers if isinstance(mixer, ConvSpec)]
        self._conv_reads = max(windows, default=1) - 1  # earlier tokens that a token reads
        self.layer_ranks = ranks.in_stage if ranks.parallel.dp == 1 else ONE_PROCESS
        every = map(ranks.parallel.as_seen_by, range(ranks.parallel.ranks))
        # Rank 0 chooses the number of pages for all: by the most that a token takes on one of them.
        self._layouts = [rank_spec(spec, each, even=self.fused).kv_layout for each in every]
        # The largest tables first: their temporary memory is free again before the layers are read.
        self.ropes = reader.rotary_tables(max_positions)
        self.embedding, self.head = (
            reader.embedding_and_head()
            if head
            else (reader.embedding_without_head(), raise_missing_head)
        )
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=precision.compute).item()
        self.layers: list[Layer] = []
        self.position_table = reader.position_table() if spec.learned_positions else None
        self.embedding_norm = reader.embedding_norm() if spec.embedding_norm else None
        self.embedding_sum = reader.embedding_sum() if spec.embedding_weights else None
        self.layer_inputs = reader.layer_inputs() if spec.layer_input_tokens else None
        # In reverse if the last layers go to the host: a layer's size is known only once it is
        # built.
        order = reader.layers if offload is None else reader.layers[::-1]
        for i, left in zip(progress(order), reversed(range(len(order)))):
            self.layers.append(reader.layer(i))
            if offload is not None:
                offload.offload_layer(i, self.layers[-1], vars(reader.linears).values())
            if left % _LAYERS_PER_TRIM == 0 or left < _LAYERS_PER_TRIM:  # the peak is at the end
                # glibc keeps freed memory between live allocations, up to half the size of a small
                # model
                trim()
        if offload is not None:
            self.layers.reverse()
            offload.allocate()
        self.message_queries = reader.message_queries() if spec.looped_layers else None
        self.last_query = reader.last_query() if spec.blocks else None
        self.norm = reader.norm()
        behind = range(len(spec.layers), len(spec.layers) + spec.draft_layers)
        self.unused_tensors = tuple(f"model.layers.{i}." for i in behind)
        if spec.draft_layers:
            self.unused_tensors += _DRAFT_TENSORS
        self.unused_tensors += tuple(  # unused tensors that files of Gemma 4 contain
            f"model.layers.{i}.self_attn.{name}" for i in spec.key_readers for name in _OF_KEYS
        )
        shared = FAMILIES[spec.architecture].block
        self.unused_tensors += tuple(  # repetitions of shared weights
            f"model.layers.{i}.{shared}." for i in spec.borrowed_blocks
        )
        if ranks.parallel.ranks > 1:
            reader.tensors.skip_other_ranks(parameters(spec))
        source.check_all_used(self.unused_tensors)
        self.linears = reader.linears
        self.choose_small_batch_step()
        self.tower: VisionTower | SoundTower | None = None  # set by `load`
        # features of images [rows, planes * hidden_size], if there is an encoder
        self.features: torch.Tensor | None = None
        self.both_ways = False  # whether tokens of images see later ones; set by `load`
        self.recorded: dict[str, tuple[int, int, torch.dtype]] = {}  # set by `load`
        self.weight_memory: WeightMemory | None = None  # set by `load`
        self.expert_moves: ExpertMoves | None = None  # set by `load`
        self.watch = LayerWatch()  # set by `load`
        # scales of an 8-bit KV cache; set by `load`, since a trial run may measure them
        self.kv_scales: KVScales | None = None

    def choose_small_batch_step(self) -> None:
        """Chooses how steps with few tokens are computed. Called again when layers have been
        replaced.
        """
        args = self.spec, self.precision, self.layers, self.norm, self.device, self.ranks
        cut_otherwise = self.ranks.parallel.pp > 1 or self.ranks.parallel.dp > 1
        self._small_batch = None if self.fused or cut_otherwise else small_batch_step(*args)

    def release_small_batch_step(self) -> None:
        """Drops the fast path for steps with few tokens, and with it its references to the layers."""
        self._small_batch = None

    @property
    def encoder_weights(self) -> dict[str, torch.nn.Parameter]:
        """Weights of the encoder by transformers' names; empty without an encoder."""
        return {} if self.tower is None else self.tower.parameters

    @property
    def kv_layout(self) -> KVLayout:
        return self.spec.kv_layout

    @cached_property
    def _vocabulary_parts(self) -> list[range]:
        """For each rank, the range of the vocabulary whose embeddings and logits the rank has."""
        every = map(self.ranks.parallel.as_seen_by, range(self.ranks.parallel.ranks))
        return [vocabulary_part(self.vocab_size, each, self.vocab_block) for each in every]

    @property
    def vocabulary(self) -> range:
        """Range of the vocabulary whose embeddings and logits this rank has."""
        return self._vocabulary_parts[self.ranks.parallel.rank]

    @cached_property
    def _has_whole_vocabulary(self) -> bool:
        return len(self.vocabulary) == self.vocab_size

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def format(self) -> str:
        return str(self.precision.compute).removeprefix("torch.")

    @property
    def batch_sensitive(self) -> bool:
        return self.precision.batch_sensitive

    @property
    def token_bytes(self) -> int:
        recorded = sum(
            heads * size * dtype.itemsize for heads, size, dtype in self.recorded.values()
        )
        return (
            max(layout.numbers for layout in self._layouts) * self.precision.cache.itemsize
            + recorded
        )

    @property
    def window_bytes(self) -> int:
        return (
            min(layout.window_elements_per_token for layout in self._layouts)
            * self.precision.cache.itemsize
        )

    @property
    def window(self) -> int | None:
        return self.kv_layout.window

    @property
    def state_bytes(self) -> int:
        sizes = (
            planes.count_bytes(self.precision.compute.itemsize, self.precision.states.itemsize)
            for planes in self.spec.states
            if planes is not None
        )
        return sum(sizes)

    def allocate_cache(self, slots: int, window_slots: int = 0, states: int = 0) -> KVCache:
        arena = (
            DeviceArena(self.device)
            if self.weight_memory is not None and self.device.type == "cuda"
            else None
        )
        cache = KVCache.allocate(
            self.kv_layout,
            slots,
            self.precision.cache,
            self.device,
            self.kv_scales,
            window_slots,
            arena,
            self.recorded,
        )
        if not self.state_bytes:
            return cache
        return replace(cache, states=self._allocate_states(states, cache.memory))

    def _allocate_states(self, count: int, arena: Arena | None) -> tuple[LayerStates | None, ...]:
        """Returns new states for recurrent layers, and None for other layers."""

        def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            if arena is None:
                return torch.zeros(shape, dtype=dtype, device=self.device)
            return arena.zeros(tuple(shape), dtype)

        return tuple(
            None
            if planes is None
            else LayerStates(
                zeros((count, planes.tail, planes.channels), self.precision.compute),
                zeros((count, *planes.sums), self.precision.states),
            )
            for planes in self.spec.states
        )

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of zeros on the model's device. If a sleeping engine releases the
        weights' memory, it releases this tensor's memory, too.
        """
        if self.weight_memory is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return self.weight_memory.zeros(shape, dtype)

    def copy_slots(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values between token slots, given as int64 [N] each."""
        copy_kv(cache, source, target)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: KVCache
    ) -> torch.Tensor:
        """Computes new tokens and stores their keys and values in the cache.

        Args:
            ids: token ids, int64 [T]; id -2 - r stands for row r of `features`.
            positions: positions that rotate queries and keys, int64 [T]; or [3, T] as for
                `RotaryTable.cos_sin_at`.
            plan: slots that the step writes and reads.
            cache: KV cache.

        Returns:
            Hidden states [T, hidden_size] after the last norm.
        """
        x, deep = self._embed_tokens(ids, positions)
        rotations = [rope.rotation_at(positions) for rope in self.ropes]
        plan = self._add_previous_tokens(plan)
        few = None if self.watch.observes_layers else self._small_batch
        if not deep and few is not None and few.supports(plan):
            return few(x, [(each.cos, each.sin) for each in rotations], plan, cache)
        given = self._inputs_of_layers(ids, x)
        with self.steps.enter_step(len(x)):
            x = run_stages_in_turn(
                self.ranks, x, lambda x: self._run_layers(x, deep, given, rotations, plan, cache)
            )
        if self.last_query is not None:
            assert given is not None
            depth = self.layers[-1].spec.depth
            assert depth is not None
            (whole,) = attend_over_depth(self.last_query, given[:, -1, depth.complete], x)
            x = self._norm_in_float32(whole, self.norm)
            return self.watch.record_pass(ids, positions, x)
        return self.watch.record_pass(ids, positions, self._norm(x, self.norm))

    def _inputs_of_layers(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Returns what layers get besides the residual, [T, layers, size], or None. `x` has the
        embeddings of the tokens `ids`. All layers share the memory of what a router carries to the
        next layer, and that of the sums of blocks of layers [T, layers, blocks, hidden_size].
        """
        if blocks := self.spec.blocks:
            memory = x.new_zeros((len(x), 1, blocks, x.shape[1]))
            return memory.expand(-1, len(self.layers), -1, -1)
        if size := self.spec.router_size:
            return x.new_zeros((len(x), 1, size)).expand(-1, len(self.layers), -1)
        if self.spec.reads_embeddings:
            return x.unsqueeze(1).expand(-1, len(self.layers), -1)
        return None if self.layer_inputs is None else self.layer_inputs(ids, x)

    def _add_previous_tokens(self, plan: AttentionPlan) -> AttentionPlan:
        """Returns a plan with the tokens that the model's convolutions read."""
        return plan.with_previous(self._conv_reads) if self._conv_reads else plan

    @property
    def steps(self) -> Steps:
        shared = self.layers[0].shared
        return UNSHARED if shared is None else shared.steps

    def share_steps(self, steps: SharedSteps) -> None:
        """Makes ranks with different rows compute the feed-forwards together. All ranks must then
        take part in every step.
        """
        steps.idle = self._join_step_without_rows
        for layer in self.layers:
            if layer.spec.feeds:
                layer.shared = SharedFeedForward(layer.feed_forward, self.ranks, steps)

    def _join_step_without_rows(self) -> None:
        """Takes part in a step of other ranks without rows of its own."""
        x = torch.empty(
            (0, self.spec.hidden_size), dtype=self.precision.compute, device=self.device
        )
        for layer in self.layers:
            if layer.spec.feeds:
                _feed_forward(layer, x, None, None)

    def _run_layers(
        self,
        x: torch.Tensor,
        deep: list[torch.Tensor],
        given: torch.Tensor | None,
        rotations: list[Rotation],
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """Returns rows [T, hidden_size] after this rank's layers. `x` and `deep` are the results of
        `_embed_tokens`, `given` that of `_inputs_of_layers`; `forward` builds the other arguments.
        """
        for i, layer in enumerate(self.watch.mark_layers(self.layers)):
            if 0 < i <= len(deep):
                x = x + deep[i - 1]
            own = None if given is None else given[:, i]
            x = self._run_layer(i, layer, x, rotations, plan, cache, own)
            self.watch.record_layer(i, x)
        return x

    def _run_layer(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        rotations: list[Rotation],
        plan: AttentionPlan,
        cache: KVCache,
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layer.spec.block is not None:
            assert given is not None
            return self._run_block(index, layer, x, rotations[layer.rope], plan, cache, given)
        if layer.spec.depth is not None:
            assert given is not None
            return self._run_depth_layer(index, layer, x, rotations[layer.rope], plan, cache, given)
        lora = None if plan.lora is None else plan.lora.layer(index)
        record = partial(cache.record_experts, index, plan.store_at)
        if layer.spec.parallel:
            normed = self._norm(x, layer.input_norm)
            h = self._mix(index, layer, normed, rotations[layer.rope], plan, cache, lora)
            mlp_input = normed if layer.mlp_norm is None else self._norm(x, layer.mlp_norm)
            return x + self._scale_output(
                layer, self.layer_ranks.sum(h + _feed_forward(layer, mlp_input, lora, record))
            )
        if layer.spec.mixes:
            normed = self._norm(x, layer.input_norm)
            h = self._mix(index, layer, normed, rotations[layer.rope], plan, cache, lora)
            h = self._convolve_output(
                index, layer, CONV_OF_ATTENTION, self.layer_ranks.sum(h), plan, cache
            )
            h = self._norm(h, layer.post_attention_norm)
            x = self._add_output(layer, _residual(layer, x, normed, 0), h, layer.attention_sum)
        if layer.spec.feeds_apart:
            x = x + self._scale_output(layer, self._feed_apart(layer, x, record))
        elif layer.spec.feeds:
            normed = self._norm(x, layer.mlp_norm)
            gate: torch.Tensor | None = None
            fed = normed
            if layer.channel_mix is not None:
                fed, gate = self._mix_channels(index, layer, normed, plan, cache)
            h = _feed_forward(layer, fed, lora, record, given)
            h = self.layer_ranks.sum(h if gate is None else h * gate)
            h = self._convolve_output(index, layer, CONV_OF_FEED_FORWARD, h, plan, cache)
            h = self._norm(h, layer.post_mlp_norm)
            x = self._add_output(layer, _residual(layer, x, normed, 1), h, layer.mlp_sum)
        if given is not None and layer.spec.input_size:
            x = x + self._feed_input(layer, x, given)
        return x if layer.layer_scale is None else x * layer.layer_scale

    def _run_depth_layer(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        cache: KVCache,
        blocks: torch.Tensor,
    ) -> torch.Tensor:
        """Runs a layer of a block, as described in `DepthSpec`. Returns the block's sum so far [T,
        hidden_size].

        Args:
            index: index of the layer.
            layer: its weights.
            x: the block's sum before the layer; the previous block's sum if the layer begins a
                block, and the previous pass's last sum if it begins a later pass.
            rotation, plan, cache: as for `_attention`.
            blocks: sums of all blocks [T, blocks, hidden_size] (written).
        """
        depth = layer.spec.depth
        assert depth is not None
        assert isinstance(layer.spec.attention, AttentionSpec)
        assert layer.feed_query is not None
        if depth.saves_to is not None:
            blocks[:, depth.saves_to] = x
        if depth.restarts_from is not None:
            x = blocks[:, depth.restarts_from].clone()
        seen: tuple[torch.Tensor, ...] = (x,)
        if layer.depth_queries is not None:
            seen = attend_over_depth(layer.depth_queries, blocks[:, depth.sources], x)
        norms = [layer.input_norm]
        if layer.spec.attention.separate:
            own = depth.norms > 1
            others_norms = (layer.key_input_norm, layer.value_input_norm)
            norms += others_norms if own else [layer.input_norm] * 2
            seen = seen if len(seen) > 1 else seen * 3
        messages: tuple[torch.Tensor, ...] = ()
        gates = layer.message_gates
        if depth.messages:
            assert gates is not None
            assert self.message_queries is not None
            *earlier, last = depth.messages
            queries = self.message_queries[depth.loop_index]
            messages = attend_over_depth(queries, blocks[:, earlier], blocks[:, last])
            seen = tuple(gates(i, each, messages[i]) for i, each in enumerate(seen))
        rows, *others = [self._norm_in_float32(each, norm) for each, norm in zip(seen, norms)]
        h = self._attention(index, layer, rows, rotation, plan, cache, None, others)
        h = self._convolve_output(index, layer, CONV_OF_ATTENTION, h, plan, cache).float()
        if depth.writes_to is not None:
            blocks[:, depth.writes_to] = x
        else:
            h = x.float() + h
        (fed,) = attend_over_depth(layer.feed_query, blocks[:, depth.complete], h)
        if messages:
            assert gates is not None
            fed = gates(3, fed, messages[3])
        record = partial(cache.record_experts, index, plan.store_at)
        out = _feed_forward(layer, self._norm_in_float32(fed, layer.mlp_norm), None, record)
        out = self._convolve_output(index, layer, CONV_OF_FEED_FORWARD, out, plan, cache)
        return (h + out).to(x.dtype)

    def _norm_in_float32(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Normalises rows in float32, and returns them in the dtype of activations."""
        assert weight is not None
        wide = apply_norm(x.float(), weight.float(), self.spec.rms_eps, self.spec.norm)
        return wide.to(self.precision.compute)

    def _convolve_output(
        self,
        index: int,
        layer: Layer,
        which: int,
        x: torch.Tensor,
        plan: AttentionPlan | DevicePlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """Applies one of the layer's short convolutions, if it has them, to a block's output x."""
        if layer.short_convs is None:
            return x
        states = cache.states[index]
        return apply_short_conv(layer.short_convs, which, x, plan.states, states, self.state_steps)

    def _run_block(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        cache: KVCache,
        embeddings: torch.Tensor,
    ) -> torch.Tensor:
        """Returns rows [T, hidden_size] after a layer with a block, as described in `BlockSpec`."""
        layer = with_additions(layer, add_linear)
        h = self._norm(torch.cat((x, embeddings), 1), layer.input_norm)
        h = self.layer_ranks.sum(self._attention(index, layer, h, rotation, plan, cache, None))
        h = _feed_forward(layer, self._norm(h, layer.mlp_norm), None, None)
        h = x + layer.block_output(self.layer_ranks.sum(h))
        h = self._run_beside(index, layer, self._norm(h, layer.beside_norm), plan, cache)
        return x + self.layer_ranks.sum(h)

    def _feed_input(self, layer: Layer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Returns the rows to add to x for a layer's additional inputs `given` [T, input_size]."""
        gate = torch.cat((layer.inputs_first(x), given), 1)
        fed = layer.spec.feed_forward
        inner = apply_activation(gate, fed, batch_invariant=self.precision.batch_invariant)
        return self._norm(layer.inputs_output(inner), layer.inputs_norm)

    def _feed_apart(
        self, layer: Layer, x: torch.Tensor, record: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Returns a feed-forward's output if experts and shared expert have separate norms."""
        fed = layer.feed_forward
        assert isinstance(fed, Experts)
        assert fed.shared is not None
        shared = fed.shared(self._norm(x, layer.mlp_norm))
        routed = self._norm(x, layer.router_scale)
        chosen = fed.apply_chosen(self._norm(x, layer.experts_norm), routed, record)
        return self._add_normed(layer, shared, chosen)

    def _add_normed(self, layer: Layer, shared: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Normalises the outputs of the shared expert and of the chosen experts, and returns their
        normalised sum.
        """
        ranks = self.layer_ranks
        shared = self._norm(ranks.sum(shared), layer.shared_out_norm)
        chosen = self._norm(ranks.sum(chosen), layer.experts_out_norm)
        return self._norm(shared + chosen, layer.post_mlp_norm)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, hidden_size] of text tokens as they enter the first layer.
        `ids` and `positions` are int64 [T].
        """
        return self._embed_tokens(ids, positions)[0]

    def run_layer(
        self,
        index: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """Computes one layer, for callers that run the layers one by one.

        Args:
            index: index of the layer.
            x: rows [T, hidden_size] before it.
            positions, plan, cache: as for `forward`.

        Returns:
            Rows [T, hidden_size] after it.
        """
        return self._run_layer(
            index,
            self.layers[index],
            x,
            [rope.rotation_at(positions) for rope in self.ropes],
            self._add_previous_tokens(plan),
            cache,
        )

    def _embed_tokens(
        self, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the embeddings [T, hidden_size], with features in place of the tokens of images
        and sounds. Also returns tensors to add to the residual, one after each of the first layers.
        """
        x = self._look_up_embeddings(ids if self.features is None else ids.clamp(min=0)).to(
            self.precision.compute
        )
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.position_table is not None:
            x = x + self.position_table[positions + self.spec.position_offset]
        x = self._norm(x, self.embedding_norm)
        if self.embedding_sum is not None:
            x = (x + self.embedding_sum[0]) * self.embedding_sum[1]
        at = (ids < 0).nonzero()[:, 0] if self.features is not None else ids[:0]
        if self.features is None or not len(at):
            return x, []
        first, *others = (
            self.features[-2 - ids[at]]
            .to(x.dtype)
            .view(len(at), -1, self.spec.hidden_size)
            .unbind(1)
        )
        x[at] = first
        return x, [torch.zeros_like(x).index_copy_(0, at, each) for each in others]

    def _look_up_embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        if self._has_whole_vocabulary:
            return self.embedding[ids]
        own = (ids >= self.vocabulary.start) & (ids < self.vocabulary.stop)
        x = self.embedding[(ids - self.vocabulary.start).clamp(0, len(self.vocabulary) - 1)]
        return self.ranks.sum(x.masked_fill(~own.unsqueeze(1), 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [R, vocab_size] of hidden states [R, hidden_size]."""
        logits = self.head(hidden).float()
        if not self._has_whole_vocabulary:
            logits = self.ranks.gather_columns(logits, list(map(len, self._vocabulary_parts)))
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        if real := self.spec.real_tokens:
            logits[:, real:] = float("-inf")
        return logits

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else apply_norm(x, weight, self.spec.rms_eps, self.spec.norm)

    def _scale_output(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return x if layer.spec.residual_scale == 1.0 else x * layer.spec.residual_scale

    def _add_output(
        self, layer: Layer, x: torch.Tensor, output: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the sum of the residual x and a block's output. `weights` is as in `Layer`."""
        if weights is None:
            return x + self._scale_output(layer, output)
        shift, factor, residual_shift, residual_factor = weights.unbind()
        return (output + shift) * factor + (x + residual_shift) * residual_factor

    def _mix(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        cache: KVCache,
        lora: LayerAdapters | None,
    ) -> torch.Tensor:
        """Returns the outputs [T, hidden_size] of attention, plus those of the state space beside
        attention, if the layer has one.
        """
        h = self._attention(index, layer, x, rotation, plan, cache, lora)
        if layer.spec.beside is None:
            return h
        return h + self._run_beside(index, layer, x, plan, cache)

    def _run_beside(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        plan: AttentionPlan | DevicePlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """Returns the outputs [T, hidden_size] of the state space beside attention for its input
        rows x.
        """
        spec = layer.spec.beside
        assert spec is not None
        product = layer.beside_first(x)
        mixed = self._mix_states(spec, layer, product, plan.states, cache.states[index])
        return layer.beside_output(mixed)

    def _mix_states(
        self,
        spec: StateSpec,
        layer: Layer,
        product: torch.Tensor,
        waves: Sequence[StateWave],
        states: LayerStates | None,
    ) -> torch.Tensor:
        ranks = self.layer_ranks
        return mix_states(spec, layer.state, product, waves, states, ranks, self.state_steps)

    def _mix_channels(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        plan: AttentionPlan | DevicePlan,
        cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixes each input row of x with that of the token before. Returns the feed-forward's input
        [T, hidden_size] and the gate of its output.
        """
        assert layer.channel_mix is not None
        states = cache.states[index]
        return mix_channels(layer.channel_mix, x, plan.states, states, self.state_steps)

    def _attention(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        cache: KVCache,
        lora: LayerAdapters | None,
        others: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Computes attention's outputs [T, hidden_size] for its input rows x. `others` has the input
        rows of keys and of values, if theirs differ from the queries'.
        """
        spec = layer.spec.attention
        waves = plan.states
        plan = plan.in_layer(spec.window)
        if isinstance(spec, ConvSpec):
            assert layer.kernel is not None
            product = _project("qkv", layer.qkv, x, lora)
            out = gated_conv(layer.kernel, product, plan, cache, index)
            return _project("output", layer.output, out, lora)
        if isinstance(spec, StateSpec):
            inside = isinstance(spec, WkvSpec)  # projects its input itself
            product = x if inside else _project("qkv", layer.qkv, x, lora)
            mixed = self._mix_states(spec, layer, product, plan.states, cache.states[index])
            return _project("output", layer.output, mixed, lora)
        cos, sin, query_scale = rotation
        if isinstance(spec, LatentSpec):
            assert layer.latent is not None
            product = layer.qkv(x)
            product, gate = product.tensor_split((product.shape[1] - spec.gate_size,), 1)
            out = latent_attention(spec, layer.latent, product, cos, sin, plan, cache, index)
            if spec.output_gate:
                out = out * gate.sigmoid().unsqueeze(2)
            return layer.output(out.view(len(x), -1).to(x.dtype))
        assert isinstance(spec, AttentionSpec)
        if spec.keys_of is not None:
            q = _project("qkv", layer.qkv, x, lora).view(len(x), spec.heads, -1)
            q = rotate(self._norm(q, layer.q_norm), cos, sin)
            out = attention(q, cache, spec.keys_of, plan, layer.rules)
            return _project("output", layer.output, out.reshape(len(x), -1).to(x.dtype), lora)
        rotated = spec.heads + spec.kv_heads
        qkv = _project("qkv", layer.qkv, x, lora)
        dynamic: list[torch.Tensor] = []
        if spec.separate:
            key_rows, value_rows = others
            k, of_keys = layer.keys(key_rows).tensor_split((spec.projected_keys,), 1)
            v, of_values = layer.values(value_rows).tensor_split((spec.projected_values,), 1)
            size = spec.heads * spec.key_size
            qkv = torch.cat((qkv[:, :size], k, v, qkv[:, size:]), 1)
            dynamic = [each.view(len(x), spec.kv_heads, -1) for each in (of_keys, of_values)]
        if layer.convolutions is not None:
            states = cache.states[index]
            qkv = convolve_heads(spec, layer.convolutions, qkv, waves, states, self.state_steps)
        if layer.short_convs is not None:
            start = spec.heads * spec.key_size
            some = slice(start, start + spec.projected_keys + spec.projected_values)
            inputs = qkv[:, some].contiguous()
            convs = spec.short_convs
            assert convs is not None
            state = waves, cache.states[index], self.state_steps
            if convs.dynamic:
                kernels = torch.cat(dynamic, 1)
                done = apply_dynamic_conv(convs, layer.short_convs, inputs, kernels, *state)
            else:
                done = apply_short_conv(layer.short_convs, CONV_OF_KEYS_VALUES, inputs, *state)
            qkv[:, some] = done
        columns = [rotated * spec.key_size, spec.projected_values, spec.heads * spec.gate_size]
        columns.append(spec.bias_projection)
        columns.append(qkv.shape[1] - sum(columns))
        qk, v, gate, of_bias, sinks = qkv.split_with_sizes(columns, -1)
        if spec.keys_as_values:
            v = qk[:, spec.heads * spec.key_size :]
        if spec.qk_norm == "whole":
            qk = self._qk_norm(layer, qk, spec.heads * spec.key_size)
        if spec.clip is not None:
            qk = qk.clamp(-spec.clip, spec.clip)
            v = v.clamp(-spec.clip, spec.clip)
        qk = qk.view(len(x), rotated, -1)
        v = v.view(len(x), spec.kv_heads, -1)
        if spec.value_norm:
            v = apply_norm(v, None, self.spec.rms_eps, "rms")
        by_head = spec.qk_norm in ("head", "heads")
        if by_head and not spec.norms_rotated:
            qk = self._qk_norm(layer, qk, spec.heads)
        qk = rotate(qk, cos, sin)
        if by_head and spec.norms_rotated:
            qk = self._qk_norm(layer, qk, spec.heads)
        q, k = qk.split_with_sizes((spec.heads, spec.kv_heads), 1)
        if spec.norm_limit is not None:
            q = limit_norms(q, spec.norm_limit, layer.query_scale)
            k = limit_norms(k, spec.norm_limit, None)
        if query_scale is not None:
            q = q * query_scale
        q = store_kv(cache, index, plan.store_at, q, k, v)
        rules = layer.rules
        if layer.distance_bank is not None:
            assert spec.distance_bias is not None
            clip = layer.distance_scale, spec.distance_bias.clip
            bank = layer.distance_bank
            bias = compute_distance_bias(of_bias, bank, spec.heads, query_scale, *clip)
            rules = replace(rules, bias=bias)
        if spec.token_sinks:
            rules = replace(rules, sinks=sinks.float())
        out = attention(q, cache, index, plan, rules)
        out = out.reshape(len(x), -1).to(x.dtype)
        if spec.output_gate:
            gate = gate.sigmoid().view(len(x), spec.heads, spec.gate_size)
            out = (out.view(len(x), spec.heads, -1) * gate).flatten(1)
        if spec.output_scale != 1.0:
            out = out * spec.output_scale
        return _project("output", layer.output, out, lora)

    def _qk_norm(self, layer: Layer, qk: torch.Tensor, queries: int) -> torch.Tensor:
        """Normalises queries and keys separately; the first `queries` entries of axis 1 are
        queries, the rest keys.
        """
        q = qk[:, :queries]
        k = qk[:, queries:]
        if qk.dim() == 2 and self.layer_ranks.parallel.tp > 1:
            return self._whole_qk_norm(layer, q, k)
        return torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), 1)

    def _whole_qk_norm(self, layer: Layer, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Applies RMS norms to queries and keys, with the mean squares taken over all ranks. `q`
        and `k` are this rank's columns.
        """
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        squares = self.layer_ranks.sum(torch.stack([x.float().square().sum(1) for x in (q, k)], 1))
        own = torch.tensor([q.shape[1], k.shape[1]], dtype=torch.float32)  # keys may be repeated
        sizes = self.layer_ranks.sum(own)
        scale = torch.rsqrt(squares / sizes + self.spec.rms_eps)
        parts = ((q, layer.q_norm), (k, layer.k_norm))
        return torch.cat(
            [(x.float() * scale[:, i : i + 1]).to(x.dtype) * w for i, (x, w) in enumerate(parts)], 1
        )


def _residual(layer: Layer, x: torch.Tensor, normed: torch.Tensor, block: int) -> torch.Tensor:
    """Returns what a block's output is added to, given the block's input with and without the norm.
    `block` is 0 for attention, 1 for the feed-forward.
    """
    return normed * layer.spec.kept[block] if layer.spec.norms == "residual" else x


def _project(
    name: str, linear: Linear, x: torch.Tensor, lora: LayerAdapters | None
) -> torch.Tensor:
    """Computes a linear layer's outputs, with those of the step's adapters."""
    product = linear(x)
    return product if lora is None else lora.add_adapter_deltas(name, x, product)


def _feed_forward(
    layer: Layer,
    x: torch.Tensor,
    lora: LayerAdapters | None,
    record: Callable[[torch.Tensor], None] | None,
    carried: torch.Tensor | None = None,
) -> torch.Tensor:
    if layer.shared is not None:
        return layer.shared(x)
    if isinstance(layer.feed_forward, FeedForward):
        return layer.feed_forward(x, lora)
    return layer.feed_forward(x, record=record, carried=carried)  # experts take no adapters


def raise_missing_head(hidden: torch.Tensor) -> NoReturn:
    """Stands in for the head of a model that was loaded without one. Always raises AssertionError."""
    raise AssertionError("a model without a head gives no logits")
