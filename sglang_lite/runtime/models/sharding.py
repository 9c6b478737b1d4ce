"""Sharding of a model over ranks: one rule for each role of a parameter. Needs no torch.

Heads are sharded together with the keys and values that they read, convolutions by channel,
feed-forwards (and each expert's) by their inner size, embedding and head by vocabulary. Everything
else is whole on every rank. With `ep`, experts are sharded by number, and each of them by inner size
over the ranks that share it. A layer therefore needs two sums: of attention outputs and of
feed-forward outputs. With `pp`, layers are divided into stages, and only a stage's ranks
share a layer. With `dp`, each rank has its own rows, and only feed-forwards are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.models.parameters import ParameterSpec, output_projection_role
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MlstmSpec,
    ModelSpec,
    NoMixerSpec,
    RgLruSpec,
    SharedMixerSpec,
    WkvSpec,
)
from sglang_lite.runtime.parallel.layout import Parallel
from sglang_lite.runtime.parallel.placement import ExpertPlacement

# elements that quantised formats keep together, the largest first
_GRAINS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_VOCABULARY = ("embedding", "head", "head_bias")


@dataclass(frozen=True, slots=True)
class RankPart:
    """Part of a parameter that a rank has; may be empty.

    Attributes:
        axis: "outputs" for the outputs of a matrix or the elements of a vector, "inputs" for the
            inputs of a matrix.
        start, stop: the rank's range of that axis.
    """

    axis: Literal["outputs", "inputs"]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


NOTHING = RankPart("outputs", 0, 0)


def rank_spec(
    spec: ModelSpec, parallel: Parallel, *, even: bool, placement: ExpertPlacement | None = None
) -> ModelSpec:
    """Returns the specification of a rank's part of a model: its heads, feed-forward parts and
    experts.

    Vocabulary, hidden size and the number of experts to choose from stay whole.

    Args:
        spec: the model.
        parallel: layout of the ranks, and the place of this one.
        even: whether all ranks must have the same shapes, as kernels in graphs need.
        placement: experts held by each group of ranks; None to divide them into consecutive
            ranges.

    Raises:
        ParameterError: the ranks can't share the model.
    """
    if parallel.ranks == 1:
        return spec
    if parallel.pp > 1:
        _check_stages(spec, parallel, even=even)
    _check_experts(spec, parallel.ep)
    problem = _sharing_problem(spec, parallel, even=even)
    if problem is not None:
        sizes_of = range(parallel.ep, 129, parallel.ep)
        layouts = [
            Parallel(tp=tp, dp=tp if parallel.dp > 1 else 1, ep=parallel.ep) for tp in sizes_of
        ]
        sizes = [
            str(each.tp) for each in layouts if _sharing_problem(spec, each, even=even) is None
        ]
        raise ParameterError(
            "tp_size",
            f"{parallel.tp} ranks can't share {problem}.",
            hint=f"It can be {', '.join(sizes) or 1}.",
        )
    stage = stage_layers(spec, parallel)
    return replace(
        spec,
        layers=tuple(
            _layer_spec_of_rank(spec.layers[i], i, parallel.in_stage, placement) for i in stage
        ),
    )


def stage_layers(spec: ModelSpec, parallel: Parallel) -> range:
    """Returns the layers of a rank's stage. The `pp` stages are consecutive layers with about
    equally many weights.
    """
    sums = [0, *accumulate(layer.weight_elements(spec.hidden_size) for layer in spec.layers)]
    count = len(spec.layers)
    pp = parallel.pp
    ends = [0]
    for stage in range(1, pp):  # each has a layer at least
        free = range(ends[-1] + 1, count - pp + stage + 1)
        ends.append(min(free, key=lambda end: abs(sums[end] * pp - sums[-1] * stage)))
    ends.append(count)
    return range(ends[parallel.stage], ends[parallel.stage + 1])


def _check_stages(spec: ModelSpec, parallel: Parallel, *, even: bool) -> None:
    """Raises ParameterError if the model's layers can't be divided into the stages."""
    problem = None
    if spec.has_linked_layers:
        problem = "layers read keys of other stages' layers, or inputs of their own."
    elif parallel.pp > len(spec.layers):
        problem = f"{parallel.pp} is more than the model's {len(spec.layers)} layers."
    elif (
        len(
            {
                _longest_stage_window(spec, parallel.as_seen_by(stage * parallel.tp))
                for stage in range(parallel.pp)
            }
        )
        > 1
    ):
        problem = f"{parallel.pp} stages would have layers with unlike windows."
    elif even and not all(_has_attention(spec, stage, parallel) for stage in range(parallel.pp)):
        problem = f"one of {parallel.pp} stages would have no layer with attention."
    if problem is not None:
        raise ParameterError("pp_size", problem, hint="Take a smaller one, or tp_size.")


def _has_attention(spec: ModelSpec, stage: int, parallel: Parallel) -> bool:
    layers = stage_layers(spec, parallel.as_seen_by(stage * parallel.tp))
    return bool(replace(spec, layers=spec.layers[layers.start : layers.stop]).attentions)


def _longest_stage_window(spec: ModelSpec, parallel: Parallel) -> int | None:
    """Returns the longest attention window of the layers in a rank's stage, or None if none of them
    has a window.
    """
    layers = stage_layers(spec, parallel)
    return replace(spec, layers=spec.layers[layers.start : layers.stop]).kv_layout.window


def _check_experts(spec: ModelSpec, ep: int) -> None:
    """Raises ParameterError if the model's experts can't be divided among the groups of ranks."""
    counts = [
        layer.feed_forward.count
        for layer in spec.layers
        if isinstance(layer.feed_forward, ExpertsSpec)
    ]
    if ep > min(counts, default=1):
        problem = (
            f"{ep} is more than the model's {min(counts)} experts."
            if counts
            else "the model has no experts."
        )
        raise ParameterError("ep_size", problem, hint="Leave it out.")


def _sharing_problem(spec: ModelSpec, parallel: Parallel, *, even: bool) -> str | None:
    """Returns the part of a model that ranks can't share, as text for an error, such as "32 heads".
    Returns None if they can share the model.
    """
    tp = parallel.row_group_layout.tp
    for layer in spec.layers:
        fed = layer.feed_forward
        problems = (_mixer_problem(mixer, tp, even=even) for mixer in layer.mixers)
        if problem := next(filter(None, problems), None):
            return problem
        sizes = [(fed.size, parallel.tp)]
        if isinstance(fed, ExpertsSpec):
            sizes = [(fed.size, parallel.same_experts.tp), (fed.shared_size, parallel.tp)]
        for size, ranks in sizes:
            if size and (size < ranks or (even and size % ranks)):
                return f"a feed-forward of {size}"
    return (
        None
        if parallel.dp > 1 or spec.vocab_size >= parallel.ranks
        else f"{spec.vocab_size} tokens"
    )


def _mixer_problem(a: MixerSpec, tp: int, *, even: bool) -> str | None:
    """Returns the part of a mixer that ranks can't share, as `_sharing_problem` does."""
    if isinstance(a, NoMixerSpec):
        return None
    convolves = isinstance(a, AttentionSpec) and (a.taps or a.short_convs) is not None
    if convolves and tp > 1:
        return "attention with convolutions"
    if isinstance(a, WkvSpec) and tp > 1:
        return "time mixing"
    kv_heads = a.heads if isinstance(a, LatentSpec) else a.kv_heads
    uneven = kv_heads % tp if kv_heads >= tp else (a.heads // kv_heads) % (tp // kv_heads)
    whole = isinstance(a, Mamba1Spec)  # ranks have whole groups of channels
    several = kv_heads >= tp or (tp % kv_heads == 0 and not whole)
    if a.heads >= tp and several and not (even and uneven):
        return None
    if isinstance(a, Mamba2Spec):
        return f"{a.heads} heads in {kv_heads} groups"
    if isinstance(a, Mamba1Spec) and a.groups > 1:
        return f"{a.groups} groups of channels"
    what = "channels" if isinstance(a, ConvSpec | Mamba1Spec) else "heads"
    return f"{a.heads} {what}" + (
        f" with {kv_heads} of keys and values" if kv_heads != a.heads else ""
    )


def _layer_spec_of_rank(
    layer: LayerSpec, index: int, parallel: Parallel, placement: ExpertPlacement | None
) -> LayerSpec:
    fed = layer.feed_forward
    attention = _mixer_spec_of_rank(layer.attention, parallel.row_group_layout)
    beside = layer.beside and _mixer_spec_of_rank(layer.beside, parallel.row_group_layout)
    assert isinstance(beside, Mamba2Spec | Mamba1Spec | None)
    layer = replace(layer, attention=attention, beside=beside)
    if isinstance(fed, DenseSpec):
        size = len(_inner_range(fed.size, parallel))
        return replace(layer, feed_forward=replace(fed, size=size))
    own = None if parallel.ep == 1 else _experts(index, fed.count, parallel, placement)
    size = len(_inner_range(fed.size, parallel.same_experts))
    shared = len(_inner_range(fed.shared_size, parallel))
    return replace(layer, feed_forward=replace(fed, size=size, shared_size=shared, own=own))


def _mixer_spec_of_rank(a: MixerSpec, parallel: Parallel) -> MixerSpec:
    if isinstance(a, NoMixerSpec | WkvSpec):
        return a
    heads, kv_heads = head_shares(a, parallel)
    if isinstance(a, ConvSpec):
        return replace(a, size=len(heads))
    if isinstance(a, Mamba1Spec) and a.groups == 1:
        return replace(a, size=len(heads), sharers=parallel.tp)
    if isinstance(a, Mamba1Spec):
        return replace(a, size=len(heads), groups=len(kv_heads))
    if isinstance(a, DeltaSpec):
        return replace(a, value_heads=len(heads), key_heads=len(kv_heads))
    if isinstance(a, LightningSpec):
        return replace(a, slopes=a.slopes[heads.start : heads.stop])
    if isinstance(a, Mamba2Spec):
        sharers = max(parallel.tp // a.groups, 1)
        return replace(a, heads=len(heads), groups=len(kv_heads), sharers=sharers)
    if isinstance(a, LatentSpec | RgLruSpec | MlstmSpec):
        return replace(a, heads=len(heads))
    slopes = a.slopes[heads.start : heads.stop]
    return replace(a, heads=len(heads), kv_heads=len(kv_heads), slopes=slopes)


def _experts(
    layer: int, count: int, parallel: Parallel, placement: ExpertPlacement | None
) -> tuple[int, ...]:
    """Returns the experts of a layer that a rank holds, whole or in part."""
    return (
        tuple(parallel.experts(count))
        if placement is None
        else placement.experts_of_rank(layer, parallel)
    )


def head_shares(a: SharedMixerSpec, parallel: Parallel) -> tuple[range, range]:
    """Returns a rank's range of query heads, and the range of key-value heads that its query heads
    read. With fewer key-value heads than ranks, several ranks have the same one. For a convolution,
    both are the rank's range of channels.
    """
    if isinstance(a, LatentSpec):
        return parallel.share(a.heads), range(a.kv_heads)
    queries = a.heads // a.kv_heads
    if a.kv_heads >= parallel.tp:
        kv = parallel.share(a.kv_heads)
        return range(kv.start * queries, kv.stop * queries), kv
    sharing = parallel.tp // a.kv_heads
    head, sharer = divmod(parallel.rank, sharing)
    own = parallel.share(queries, sharing, sharer)
    return range(head * queries + own.start, head * queries + own.stop), range(head, head + 1)


def _inner_range(size: int, parallel: Parallel) -> range:
    """Returns a rank's range of a feed-forward's inner size. The bounds are multiples of the
    largest of `_GRAINS` that allows equal ranges for all ranks, or of 1 if none does.
    """
    grain = next((grain for grain in _GRAINS if size % (grain * parallel.tp) == 0), 1)
    units = parallel.share(size // grain)
    return range(units.start * grain, units.stop * grain)


def vocabulary_part(size: int, parallel: Parallel, block: int = 1) -> range:
    """Returns a rank's range of the vocabulary. Bounds are multiples of `block`, and the last rank
    has the remaining tokens. Every rank has the whole vocabulary if the last range would be empty
    or ranks have their own rows.
    """
    if parallel.dp > 1:
        return range(size)
    each = -(-size // (block * parallel.ranks)) * block
    if each * (parallel.ranks - 1) >= size:
        return range(size)
    return range(each * parallel.rank, min(each * (parallel.rank + 1), size))


def rank_part_of_parameter(
    parameter: ParameterSpec,
    spec: ModelSpec,
    parallel: Parallel,
    block: int = 1,
    *,
    embedding: bool = True,
    placement: ExpertPlacement | None = None,
) -> RankPart | None:
    """Returns the part of a parameter that a rank has, or None for the whole.

    Args:
        parameter: the parameter, either of no layer or of one in the rank's stage.
        spec: the whole model.
        parallel: layout of the ranks, and the place of this one.
        block: vocabulary parts are multiples of this many tokens.
        embedding: whether the embedding table is sharded.
        placement: as for `rank_spec`.
    """
    if parallel.ranks == 1 or (parameter.role == "embedding" and not embedding):
        return None
    role = parameter.role
    if parameter.layer is None:
        return (
            _scale_range("outputs", vocabulary_part(spec.vocab_size, parallel, block))
            if role in _VOCABULARY
            else None
        )
    parallel = parallel.in_stage
    if parallel.tp == 1:
        return None
    layer = spec.layers[parameter.layer]
    matrix = role.removesuffix("_bias")
    if parameter.expert is not None:
        assert isinstance(layer.feed_forward, ExpertsSpec), "it has an expert"
        if parameter.expert not in _experts(
            parameter.layer, layer.feed_forward.count, parallel, placement
        ):
            return NOTHING
        parallel = parallel.same_experts
        if parallel.tp == 1:
            return None
    fed = matrix.endswith(("gate", "up", "down")) and matrix != "shared_expert_gate"
    if not fed and (parallel := parallel.row_group_layout).tp == 1:
        return None
    besides = layer.beside is not None and matrix.startswith("mamba_")
    mixer = layer.mixers[besides]
    last = matrix == output_projection_role(mixer)
    if matrix != role and (last or matrix.endswith("down")):  # a sum needs the bias once
        return None if parallel.rank == 0 else NOTHING
    if fed:
        return _feed_forward_part(layer, matrix, parallel)
    if isinstance(mixer, NoMixerSpec):
        return None  # a norm, or the router
    if last:
        return _scale_range("inputs", head_shares(mixer, parallel)[0], mixer.value_size)
    return _attention_part(mixer, matrix, parallel)


def _feed_forward_part(layer: LayerSpec, matrix: str, parallel: Parallel) -> RankPart:
    fed = layer.feed_forward
    size = (
        fed.size
        if isinstance(fed, DenseSpec) or not matrix.startswith("shared")
        else fed.shared_size
    )
    return _scale_range(
        "inputs" if matrix.endswith("down") else "outputs", _inner_range(size, parallel)
    )


def _attention_part(a: SharedMixerSpec, matrix: str, parallel: Parallel) -> RankPart | None:
    heads, kv_heads = head_shares(a, parallel)
    if isinstance(a, ConvSpec):
        return _scale_range("outputs", heads) if matrix.startswith("conv_") else None
    if isinstance(a, DeltaSpec):
        return _delta_part(a, matrix, heads, kv_heads)
    if isinstance(a, LightningSpec):
        own = matrix.startswith("lightning_")
        return _scale_range("outputs", heads, a.size) if own else None
    if isinstance(a, Mamba2Spec):
        return _mamba2_part(a, matrix, heads, kv_heads)
    if isinstance(a, Mamba1Spec):
        return _mamba1_part(matrix, heads, kv_heads)
    if isinstance(a, RgLruSpec):
        return _rg_lru_part(a, matrix, heads)
    if isinstance(a, MlstmSpec):
        return _mlstm_part(a, matrix, heads)
    if isinstance(a, WkvSpec):  # not shared by ranks
        return None
    if isinstance(a, LatentSpec):
        size = {
            "q": a.query_size,
            "q_b": a.query_size,
            "kv_b": a.nope_size + a.value_size,
            "output_gating": 1,
        }.get(matrix)
        return None if size is None else _scale_range("outputs", heads, size)
    name, _, head = matrix.removeprefix("second_").partition(".")
    of_rank = kv_heads if name in ("k", "v", "k_norm") else heads
    if head:  # the norm of one head
        return None if int(head) in of_rank else NOTHING
    # a norm of each head with the same weights is whole
    norm = {"whole": a.key_size, "heads": 1}.get(a.qk_norm)
    size = {
        "q": a.key_size,
        "k": a.key_size,
        "v": a.value_size,
        "output_gating": a.gate_size,
        "sinks": 1,
        "q_norm": norm,
        "k_norm": norm,
    }.get(name)
    return None if size is None else _scale_range("outputs", of_rank, size)


def _delta_part(a: DeltaSpec, matrix: str, heads: range, key_heads: range) -> RankPart | None:
    """Returns the part of a parameter for a rank's value heads and key heads."""
    name = matrix.removeprefix("delta_").removeprefix("kernel_")
    if name in ("q", "k"):
        return _scale_range("outputs", key_heads, a.key_size)
    values = dict.fromkeys(("v", "z", "z_high"), a.value_size)
    decays = dict.fromkeys(("a", "a_high", "dt"), a.decays)
    size = {**values, **decays, "b": 1, "a_log": 1}.get(name)
    return None if size is None else _scale_range("outputs", heads, size)


def _mamba2_part(a: Mamba2Spec, matrix: str, heads: range, groups: range) -> RankPart | None:
    """Returns the part of a parameter for a rank's heads and groups."""
    name = matrix.removeprefix("mamba_").removeprefix("kernel_")
    if name in ("b", "c"):
        return _scale_range("outputs", groups, a.state_size)
    size = {"z": a.head_size, "x": a.head_size, "norm": a.head_size}.get(name)
    if name in ("dt", "dt_offset", "a_log", "d"):
        size = 1
    return None if size is None else _scale_range("outputs", heads, size)


def _mamba1_part(matrix: str, channels: range, groups: range) -> RankPart | None:
    """Returns the part of a parameter for a rank's channels, or groups of channels."""
    _, _, group = matrix.partition(".")
    if group:
        return None if int(group) in groups else NOTHING
    if matrix.endswith("_norm") or not matrix.startswith("mamba_"):
        return None
    return _scale_range("inputs" if matrix == "mamba_low" else "outputs", channels)


def _rg_lru_part(a: RgLruSpec, matrix: str, blocks: range) -> RankPart | None:
    """Returns the part of a parameter for a rank's blocks."""
    name = matrix.removeprefix("lru_")
    gates = dict.fromkeys(("enter", "enter_offset", "forget", "forget_offset"), 1)
    channels = dict.fromkeys(("x", "y", "kernel", "decay"), a.value_size)
    size = {**gates, **channels}.get(name)
    return None if size is None else _scale_range("outputs", blocks, size)


def _mlstm_part(a: MlstmSpec, matrix: str, heads: range) -> RankPart | None:
    """Returns the part of a parameter for a rank's heads."""
    name = matrix.removeprefix("mlstm_")
    size = {"q": a.key_size, "k": a.key_size, "v": a.value_size, "z": a.value_size}.get(name)
    if matrix.startswith("mlstm_"):
        size = {"i": 1, "f": 1, "norm": a.value_size}.get(name, size)
    return None if size is None else _scale_range("outputs", heads, size)


def _scale_range(axis: Literal["outputs", "inputs"], units: range, size: int = 1) -> RankPart:
    return RankPart(axis, units.start * size, units.stop * size)
