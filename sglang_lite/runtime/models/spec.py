"""Specification of a decoder: a table of layers, and the properties of the whole model. Needs no
torch.

One record configures the parametrised decoder (`decoder.py`). `read_config.py` and `read_gguf.py`
create the record from a model's files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from sglang_lite.runtime.kernels.kv_layout import PANEL, KVLayout, Plane, StatePlanes
from sglang_lite.runtime.models.config_fields import Json


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, rotated part of the head, and frequency scaling.

    Attributes:
        theta: base of the frequencies.
        kind: kind of frequency scaling: "default", "linear", "llama3", "yarn", "longrope" or "ntk",
            which multiplies the base by a power of `alpha`; "proportional", which rotates only the
            first `partial_rotary_factor` of the pairs, with the frequencies of a whole head; "none"
            for no rotation.
        rotary_dim: number of rotated elements of a head, or None for the whole head.
        params: `factor` and the further parameters of the kind, under transformers' names.
        interleaved: whether the checkpoint stores the two elements of a rotary pair side by side,
            not half a head apart.
        axes: for each rotary pair, which of a token's three positions rotates it: 0 for time, 1 for
            the row, 2 for the column of an image (M-RoPE, arXiv:2409.12191). Empty if tokens have
            one position.
        query_growth, query_span, query_shift: queries at position p are multiplied by 1 +
            query_growth * log(1 + floor((p + query_shift) / query_span)), so that attention stays
            sharp in long texts (Llama 4).
        query_floor: whether they are multiplied by 1 + query_growth * log(max((p + query_shift) /
            query_span, 1)) instead (Inkling).
    """

    theta: float = 10_000.0
    kind: str = "default"
    rotary_dim: int | None = None
    params: Mapping[str, Json] = field(default_factory=dict)
    interleaved: bool = False
    axes: tuple[int, ...] = ()
    query_growth: float = 0.0
    query_span: int = 1
    query_shift: int = 0
    query_floor: bool = False


NO_ROPE = RopeSpec(kind="none", rotary_dim=2)


@dataclass(frozen=True, slots=True)
class DistanceBiasSpec:
    """Bias of a layer's scores that depends on the query's token and its distance to the key
    (Inkling).

    Each token has a vector r for each head, projected from the hidden state like the query. The
    bank maps it to numbers that are added to the scaled scores of the keys at distances 0, 1, …:

        score[h, distance] += r[h] @ bank[:, distance]

    Keys from distance `extent` on have no bias. If positions scale queries, they scale r, too.

    Attributes:
        rank: elements of r.
        extent: number of distances.
        clip: largest norm of r after multiplication by learnt numbers; None to do neither.
    """

    rank: int
    extent: int
    clip: float | None = None


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """Short convolutions of a layer's keys and values, before any norm, and of the outputs of both
    of its blocks (Inkling).

    Each channel is convolved by itself and added to the result:

        out[t] = factor * (x[t] + sum over k of kernel[k] * x[t - taps + 1 + k])

    A sequence's state consists of the last inputs of the convolutions.

    Attributes:
        taps: number of tokens that a convolution covers, the current one included; at least 2.
        hidden: elements of a hidden state.
        learns_factor: whether the output of the feed-forward is also multiplied by a learnt number.
        scaled: whether the factor is (taps + 1) ** -0.5, or, for keys and values if `dynamic`,
            (2 * taps + 1) ** -0.5; else it is 1.
        dynamic: whether the kernels of keys and values also have a part for each token and head,
            which is projected from the hidden state like the key or the value.
    """

    taps: int
    hidden: int
    learns_factor: bool = True
    scaled: bool = False
    dynamic: bool = False

    @property
    def copies(self) -> int:
        """Number of copies of the last keys and values in the state."""
        return self.taps - 1 if self.dynamic else 1


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of a layer.

    Attributes:
        heads, kv_heads: number of query heads, and of key-value heads.
        key_size, value_size: elements of a head's query and key, and of its value.
        scale: factor of the scores.
        rope: rotary embedding of queries and keys.
        window: largest number of positions that a token attends to in each permitted direction,
            itself included; None for no limit.
        chunked: whether each token attends only to its own chunk instead, which begins at the last
            multiple of `window`.
        softcap: cap c of the scores, which become c * tanh(scores / c), or None.
        qk_norm: norm of queries and keys, of the kind `ModelSpec.norm`: "head" for each head, with
            shared weights, "heads" for each head, with its own weights, "whole" for the whole
            projection, "" for none.
        qk_norm_weight, qk_norm_bias: whether these norms have weights, and biases.
        norms_rotated: whether these norms, if they are per head, apply to rotated queries and keys.
        clip: bound of the absolute values of queries, keys and values, or None.
        value_norm: whether the values of each head are normalised, by an RMS norm without weights.
        keys_as_values: whether values are the projected keys, before any norm; then there is no
            projection of values.
        keys_of: index of an earlier layer whose keys and values this layer reads; it then projects
            only queries. None if it has its own keys and values.
        qkv_bias, output_bias: whether the input projections and the output projection have biases.
        output_gate: whether outputs are multiplied by the sigmoid of a learnt projection of the layer's
            input.
        gate_by_head: whether the gate has one number for all elements of a head.
        sinks: whether each head has an extra learnt score in its softmax, with no value attached.
        causal: whether a token attends only to itself and earlier tokens.
        slopes: for each head, the number by which its scores grow with each position of the key
            (ALiBi, arXiv:2108.12409); empty for none.
        output_scale: factor of the outputs, before the output projection.
        taps: numbers of tokens that the two convolutions of queries and keys cover, the current one
            included, as `layers.cca` describes; None for no convolutions.
        norm_limit: largest norm of a head's query or key, or None. Queries are first multiplied by
            learnt numbers.
        token_sinks: whether each token has an extra score in the softmax of each head, with no
            value attached, projected from the hidden state.
        separate: whether queries, keys and values are projected from different inputs.
        distance_bias: bias of the scores by distance, or None.
        short_convs: short convolutions of the layer, or None.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    rope: RopeSpec
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    qk_norm: Literal["", "head", "heads", "whole"] = ""
    qk_norm_weight: bool = True
    qk_norm_bias: bool = False
    norms_rotated: bool = False
    clip: float | None = None
    value_norm: bool = False
    keys_as_values: bool = False
    keys_of: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    gate_by_head: bool = False
    sinks: bool = False
    causal: bool = True
    slopes: tuple[float, ...] = ()
    output_scale: float = 1.0
    taps: tuple[int, int] | None = None
    norm_limit: float | None = None
    token_sinks: bool = False
    separate: bool = False
    distance_bias: DistanceBiasSpec | None = None
    short_convs: ShortConvSpec | None = None

    @property
    def planes(self) -> tuple[Plane, ...]:
        if self.keys_of is not None:
            return (Plane(1, 0),)
        return Plane(self.kv_heads, self.key_size), Plane(self.kv_heads, self.value_size)

    @property
    def projected_keys(self) -> int:
        """Outputs of the projection of keys."""
        return 0 if self.keys_of is not None else self.kv_heads * self.key_size

    @property
    def projected_values(self) -> int:
        """Outputs of the projection of values."""
        own = self.keys_of is None and not self.keys_as_values
        return self.kv_heads * self.value_size if own else 0

    @property
    def state(self) -> StatePlanes | None:
        """State of the convolutions: the last inputs of all short ones; or those of the two of
        `taps`, with a copy for each tap of the second one.
        """
        if self.short_convs is not None:
            channels = self.short_convs.copies * (self.projected_keys + self.projected_values)
            channels += 2 * self.short_convs.hidden
            return StatePlanes(self.short_convs.taps - 1, channels, (1,))
        if self.taps is None:
            return None
        first, second = self.taps
        channels = (self.heads + self.kv_heads) * self.key_size
        earlier = max(first + second - 2, 1)
        return StatePlanes(earlier, second * channels + self.projected_values // 2, (1,))

    @property
    def bias_projection(self) -> int:
        """Outputs of the projection to the vectors r of the distance bias."""
        return 0 if self.distance_bias is None else self.heads * self.distance_bias.rank

    @property
    def projections(self) -> int:
        """Outputs of the projections of queries, keys and values."""
        return self.heads * self.key_size + self.projected_keys + self.projected_values

    @property
    def gate_size(self) -> int:
        """Numbers of a head's output gate."""
        return self.output_gate * (1 if self.gate_by_head else self.value_size)

    @property
    def products_per_pair(self) -> int:
        """Multiplications per pair of a query token and a key token."""
        return self.heads * (self.key_size + self.value_size)

    @property
    def absorbed_products_per_pair(self) -> int:
        """Same as `products_per_pair`, since only latent attention can absorb queries."""
        return self.products_per_pair

    @property
    def activation_elements(self) -> int:
        """Activation elements that attention needs per token at its peak."""
        convolved = 0 if self.state is None else 8 * self.state.channels
        bias = 0 if self.distance_bias is None else 2 * self.heads * self.distance_bias.extent
        return (self.heads + 2 * self.kv_heads) * self.key_size * 2 + convolved + bias

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        keys = self.heads * self.key_size + self.projected_keys
        values = self.heads * self.value_size + self.projected_values
        gates = self.heads * (self.gate_size + self.token_sinks) + self.bias_projection
        if self.short_convs is not None and self.short_convs.dynamic:
            gates += 2 * self.kv_heads * self.short_convs.taps
        return hidden * (keys + values + gates)


# for models without attention: kernels are prepared for it, but none is launched
NO_ATTENTION = AttentionSpec(1, 1, 64, 64, 0.125, NO_ROPE)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention (MLA) of a layer (DeepSeek-V2, arXiv:2405.04434).

    Keys and values of all heads are projections of one vector per token, the latent. The cache
    holds only the latent and a rotated part of the keys that all heads share.

    Attributes:
        heads: number of heads.
        rank: elements of a latent.
        query_rank: elements of the low-rank vector that queries are projected from, or None if they
            are projected directly from the hidden state.
        nope_size, rope_size: elements of a head's query without, and with, rotary embedding.
        value_size: elements of a head's value.
        scale: factor of the scores.
        rope: rotary embedding of the rotated parts.
        bias: whether the projections to latents and low-rank queries have biases.
        output_bias: whether the output projection has a bias.
        output_gate: whether the outputs of each head are multiplied by the sigmoid of a learnt
            projection of the layer's input.
        norm_eps: epsilon of the norms of latents and low-rank queries.
    """

    heads: int
    rank: int
    query_rank: int | None
    nope_size: int
    rope_size: int
    value_size: int
    scale: float
    rope: RopeSpec
    bias: bool = False
    output_bias: bool = False
    output_gate: bool = False
    norm_eps: float = 1e-6
    kv_heads: ClassVar[int] = 1  # as attention kernels see the cache
    window: ClassVar[None] = None
    chunked: ClassVar[bool] = False
    slopes: ClassVar[tuple[float, ...]] = ()
    sinks: ClassVar[bool] = False
    causal: ClassVar[bool] = True

    @property
    def key_size(self) -> int:
        """Elements of a token in the cache: the latent, which is also the cached value, and the
        rotated key part.
        """
        return self.rank + self.rope_size

    @property
    def query_size(self) -> int:
        return self.nope_size + self.rope_size

    @property
    def gate_size(self) -> int:
        """Numbers of all heads' output gates."""
        return self.output_gate * self.heads

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(1, self.key_size),)

    @property
    def products_per_pair(self) -> int:
        """Multiplications per pair of a query token and a key token, with expanded keys and values."""
        return self.heads * (self.query_size + self.value_size)

    @property
    def absorbed_products_per_pair(self) -> int:
        """Multiplications per pair of a query token and a key token, with queries absorbed into the
        latents.
        """
        return self.heads * (self.key_size + self.rank)

    @property
    def activation_elements(self) -> int:
        """Activation elements that attention needs per token at its peak."""
        made = (self.query_rank or 0) + self.key_size
        return made + self.heads * (self.query_size + 2 * self.key_size + self.value_size)

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        queries = self.heads * self.query_size
        made = hidden * queries if self.query_rank is None else self.query_rank * (hidden + queries)
        return (
            made
            + hidden * (self.key_size + self.gate_size)
            + self.heads
            * (self.rank * (self.nope_size + self.value_size) + self.value_size * hidden)
        )


class _WithoutKeys:
    """Base of mixers that cache nothing for each token."""

    __slots__ = ()
    window: ClassVar[None] = None
    rope: ClassVar[RopeSpec] = NO_ROPE
    planes: ClassVar[tuple[Plane, ...]] = (Plane(1, 0),)
    output_gate: ClassVar[bool] = False
    sinks: ClassVar[bool] = False
    causal: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Gated short convolution, which some layers have in the place of attention (LFM2,
    arXiv:2511.23404).

    With projections b, c and x of a token's hidden state, its output is

        c[t] * (bias + sum over k of kernel[:, k] * (b * x)[t - window + 1 + k])

    The cache holds b * x of each token, like keys that are seen within a window. So a cached prefix
    can be continued after any of its tokens.

    Attributes:
        size: elements of each of the three projections, which are the channels.
        window: number of tokens that the kernel covers, the current one included.
        bias: whether the projections, the kernel and the output projection have biases.
    """

    size: int
    window: int
    bias: bool = False
    key_size: ClassVar[int] = 1  # of each channel
    value_size: ClassVar[int] = 1
    rope: ClassVar[RopeSpec] = NO_ROPE
    output_gate: ClassVar[bool] = False
    sinks: ClassVar[bool] = False
    causal: ClassVar[bool] = True

    @property
    def heads(self) -> int:
        """Number of parts that ranks can share: the channels."""
        return self.size

    @property
    def kv_heads(self) -> int:
        return self.size

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(1, self.size),)

    @property
    def activation_elements(self) -> int:
        """Activation elements that the convolution needs per token at its peak."""
        return 4 * self.size

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        return 4 * hidden * self.size


@dataclass(frozen=True, slots=True)
class DeltaSpec(_WithoutKeys):
    """Linear attention by the gated delta rule, which some layers have in the place of attention
        (Gated DeltaNet, arXiv:2412.06464).

        Queries, keys and values are projections of a token's hidden state, convolved over the last
        `taps` tokens of each channel. Each value head has a state, which maps keys to values. A token
        changes it and reads it, with q and k normalised, by

            S <- exp(-exp(a_log) * softplus(a + dt)) S
            S <- S + k (beta (v - S^T k))^T,  beta = beta_scale * sigmoid(b)
            out = rms_norm(S^T q) * silu(z)

        with further projections a, b and z. A sequence has one state, of a constant size, for all of
        its tokens.

        With `by_element`, it is Kimi Delta Attention (arXiv:2510.26692): a has a number for each element
    of a key, so that elements decay at different rates, and sigmoid(z) is the gate.

        Attributes:
            key_heads, value_heads: number of heads of queries and keys, and of values. Each key head
                serves consecutive value heads.
            key_size, value_size: elements of a head's key, and of its value.
            taps: number of tokens that the convolution covers, the current one included.
            norm_eps: epsilon of the norm of each value head's outputs.
            beta_scale: factor of beta. With 2, a token may also reverse the value that its key maps to.
            by_element: whether each element of a key decays by itself.
            gate_rank: elements of the low-rank vectors that a and z are projected from; 0 for none.
            decay_bound: number x, at most 0, with which exp(x * sigmoid(exp(a_log) * (a + dt))) is the
                decay instead; None for none.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    norm_eps: float
    beta_scale: float = 1.0
    by_element: bool = False
    gate_rank: int = 0
    decay_bound: float | None = None

    @property
    def heads(self) -> int:
        return self.value_heads

    @property
    def kv_heads(self) -> int:
        """Number of parts that ranks can share: key heads, each with its value heads."""
        return self.key_heads

    @property
    def channels(self) -> int:
        """Number of channels that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def gate_sizes(self) -> tuple[int, int, int]:
        """Numbers of outputs of the projections of the hidden state to z, b and a. With
        `gate_rank`, z and a stand for their low-rank vectors.
        """
        if self.gate_rank:
            return self.gate_rank, self.value_heads, self.gate_rank
        values = self.value_heads * self.value_size
        return values, self.value_heads, self.value_heads * self.decays

    @property
    def decays(self) -> int:
        """Numbers of a head's decay."""
        return self.key_size if self.by_element else 1

    @property
    def state(self) -> StatePlanes:
        return StatePlanes(
            self.taps - 1, self.channels, (self.value_heads, self.key_size, self.value_size)
        )

    @property
    def activation_elements(self) -> int:
        """Activation elements that the layer needs per token at its peak. Some are in float32."""
        decays = 4 * self.value_heads * self.decays
        return 6 * self.channels + 3 * self.value_heads * self.value_size + decays

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        values = self.value_heads * self.value_size
        high = self.gate_rank * self.value_heads * (self.value_size + self.key_size)
        return hidden * (self.channels + values + sum(self.gate_sizes)) + high


@dataclass(frozen=True, slots=True)
class LightningSpec(_WithoutKeys):
    """Linear attention whose heads decay at constant rates, which some layers have in the place of
    attention (Lightning Attention, arXiv:2401.04658).

    Queries, keys and values are projections of a token's hidden state. Each head has a state, which
    maps keys to values. A token changes it and reads it by

        S <- exp(-slope) S + silu(v) silu(k)^T
        out = rms_norm(S silu(q)) * sigmoid(z)

    with a further projection z. Outputs of all heads are normalised together. A sequence has one
    state, of a constant size, for all of its tokens.

    Attributes:
        size: elements of a head's query, key and value.
        slopes: for each head, the negative logarithm of its decay.
        norm_size: number of outputs that are normalised together, on all ranks.
        norm_eps: epsilon of this norm.
        output_scale: factor of the outputs, before the output projection.
    """

    size: int
    slopes: tuple[float, ...]
    norm_size: int
    norm_eps: float
    output_scale: float = 1.0

    @property
    def heads(self) -> int:
        return len(self.slopes)

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def value_size(self) -> int:
        return self.size

    @property
    def inner_size(self) -> int:
        """Elements of the queries of all heads."""
        return self.heads * self.size

    @property
    def state(self) -> StatePlanes:
        return StatePlanes(0, self.inner_size, (self.heads, self.size, self.size))

    @property
    def activation_elements(self) -> int:
        """Activation elements that the layer needs per token at its peak. Some are in float32."""
        return 12 * self.inner_size

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        return 5 * hidden * self.inner_size


@dataclass(frozen=True, slots=True)
class Mamba2Spec(_WithoutKeys):
    """Selective state space of Mamba 2, which some layers have in the place of attention, or beside
    it (arXiv:2405.21060).

    Projections x, b and c of a token's hidden state are convolved over the last `taps` tokens of
    each channel. Each head has a state, and shares b and c with the other heads of its group. A
    token changes the state and reads it by

        step = clip(softplus(dt + dt_offset), step_limits)
        S <- exp(-exp(a_log) step) S + step x b^T
        out = norm((S c + d x) * silu(z))

    with further projections dt and z. A sequence has one state, of a constant size, for all of its
    tokens.

    Attributes:
        heads, groups: number of heads, and of groups of consecutive heads.
        head_size: elements of a head's x.
        state_size: elements of a group's b.
        taps: number of tokens that the convolution covers, the current one included.
        norm: where outputs are normalised, in groups: "after" the gate, "before" it, or "" for
            nowhere.
        norm_eps: epsilon of this norm.
        conv_bias: whether the convolution has a bias.
        bias, output_bias: whether the input projections and the output projection have biases.
        step_limits: least and largest step.
        scales: factors of the projections z, x, b, c and dt; empty for none.
        output_scale: factor of the outputs, before the output projection.
        sharers: number of ranks that share a group's heads.
    """

    heads: int
    groups: int
    head_size: int
    state_size: int
    taps: int
    norm_eps: float
    norm: Literal["", "after", "before"] = "after"
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, ...] = ()
    output_scale: float = 1.0
    sharers: int = 1

    @property
    def kv_heads(self) -> int:
        """Number of parts that ranks can share: groups, each with its heads."""
        return self.groups

    @property
    def value_size(self) -> int:
        return self.head_size

    @property
    def inner_size(self) -> int:
        """Elements of x of all heads."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Number of channels that are convolved: x, b and c."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def projections(self) -> tuple[int, ...]:
        """Outputs of the projections z, x, b, c and dt."""
        shared = self.groups * self.state_size
        return self.inner_size, self.inner_size, shared, shared, self.heads

    @property
    def state(self) -> StatePlanes:
        return StatePlanes(
            self.taps - 1, self.channels, (self.heads, self.head_size, self.state_size)
        )

    @property
    def activation_elements(self) -> int:
        """Activation elements that the layer needs per token at its peak. Some are in float32."""
        return 4 * self.channels + 6 * self.inner_size

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        return hidden * (sum(self.projections) + self.inner_size)


@dataclass(frozen=True, slots=True)
class Mamba1Spec(_WithoutKeys):
    """Selective state space of Mamba, which some layers have in the place of attention
    (arXiv:2312.00752).

    A projection x of a token's hidden state is convolved over the last `taps` tokens of each
    channel. Projections of x are low, a low-rank vector, and b and c, which all channels share. Each
    channel has a state, which a token changes and reads by

        step = softplus(W low + dt_offset)
        S <- exp(-exp(a_log) step) S + step x b
        out = (S c + d x) * silu(z)

    with a further projection z of the hidden state. A sequence has one state, of a constant size,
    for all of its tokens. With `groups`, each group of channels has its own low, b and c, which are
    projections of the group's x (Zamba).

    Attributes:
        size: number of channels.
        state_size: elements of a channel's state.
        rank: elements of low.
        taps: number of tokens that the convolution covers, the current one included.
        norm_eps: epsilon of RMS norms of low, b and c, or None for no norms.
        norm_weight: whether these norms have weights.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections of the hidden state and the output projection have biases.
        groups: number of groups of consecutive channels.
        sharers: number of ranks that share a group's channels.
    """

    size: int
    state_size: int
    rank: int
    taps: int
    norm_eps: float | None
    norm_weight: bool = True
    conv_bias: bool = True
    bias: bool = False
    groups: int = 1
    sharers: int = 1
    value_size: ClassVar[int] = 1  # of each channel

    @property
    def heads(self) -> int:
        """Number of channels."""
        return self.size

    @property
    def kv_heads(self) -> int:
        """Number of parts that ranks can share: the channels, or groups of them."""
        return self.size if self.groups == 1 else self.groups

    @property
    def low_sizes(self) -> tuple[int, int, int]:
        """Elements of low, b and c."""
        return self.rank, self.state_size, self.state_size

    @property
    def state(self) -> StatePlanes:
        return StatePlanes(self.taps - 1, self.size, (self.size, self.state_size))

    @property
    def activation_elements(self) -> int:
        """Activation elements that the layer needs per token at its peak. Some are in float32."""
        return 12 * self.size + 2 * self.groups * sum(self.low_sizes)

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        return self.size * (3 * hidden + sum(self.low_sizes) + self.rank)


@dataclass(frozen=True, slots=True)
class RgLruSpec(_WithoutKeys):
    """Real-gated linear recurrent unit (RG-LRU), which some layers have in the place of attention
    (Griffin, arXiv:2402.19427).

    A projection x of a token's hidden state is convolved over the last `taps` tokens of each
    channel. Consecutive channels form blocks, whose gates are projections of the block. Each channel
    has a number as its state, which a token changes and reads by

        enter, forget = sigmoid(x We + be), sigmoid(x Wf + bf)
        a = exp(-8 softplus(decay) forget)
        S <- a S + sqrt(1 - a^2) enter x;  S <- enter x for a sequence's first token
        out = S * gelu(y)

    with a further projection y of the hidden state. A sequence has one state, of a constant size,
    for all of its tokens. All projections have biases.

    Attributes:
        heads: number of blocks.
        value_size: channels of a block.
        taps: number of tokens that the convolution covers, the current one included.
    """

    heads: int
    value_size: int
    taps: int

    @property
    def kv_heads(self) -> int:
        """Number of parts that ranks can share: the blocks."""
        return self.heads

    @property
    def size(self) -> int:
        """Number of channels."""
        return self.heads * self.value_size

    @property
    def state(self) -> StatePlanes:
        return StatePlanes(self.taps - 1, self.size, (self.size, 1))

    @property
    def activation_elements(self) -> int:
        """Activation elements that the layer needs per token at its peak. Some are in float32."""
        return 16 * self.size

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        return self.size * (3 * hidden + 2 * self.value_size)


@dataclass(frozen=True, slots=True)
class WkvSpec(_WithoutKeys):
    """Time mixing, which RWKV's layers have in place of attention (arXiv:2305.13048).

    A token's normalised hidden state h and that of the token before, h', are mixed by learnt vectors:
    x_k = mix_k h + (1 - mix_k) h', and x_v and x_r likewise. They are projected to k, v and r. A
    channel's output is a weighted average of the values so far, with a bonus for the current one:

        out = sigmoid(r) (A + exp(first + k) v) / (B + exp(first + k))
        A <- exp(-exp(decay)) A + exp(k) v
        B <- exp(-exp(decay)) B + exp(k)

    A and B are kept divided by the exponential of a third number, so that nothing overflows. A
    sequence has one state, of a constant size, for all of its tokens.

    Attributes:
        inputs: elements of h.
        size: number of channels.
    """

    inputs: int
    size: int
    value_size: ClassVar[int] = 1  # of each channel

    @property
    def heads(self) -> int:
        """Number of channels."""
        return self.size

    @property
    def kv_heads(self) -> int:
        return self.size

    @property
    def state(self) -> StatePlanes:
        """The tail has the inputs of time mixing, and then those of channel mixing."""
        return StatePlanes(1, 2 * self.inputs, (3, self.size))

    @property
    def activation_elements(self) -> int:
        """Activation elements that the layer needs per token at its peak."""
        return 10 * self.inputs + 5 * self.size

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices, those of channel mixing's gate included."""
        return 4 * hidden * self.size + hidden * hidden


@dataclass(frozen=True, slots=True)
class MlstmSpec(_WithoutKeys):
    """Matrix memory, which xLSTM's layers have in place of attention (mLSTM, arXiv:2405.04517).

    Queries, keys and values are projections of a token's hidden state. Each head has a memory C,
    which maps keys to values, a normaliser n and a running maximum m. A token updates and then
    reads them:

        i, f = cap(i), log(sigmoid(cap(f))),  cap(x) = gate_cap * tanh(x / gate_cap)
        m' = max(f + m, i)
        C <- exp(f + m - m') C + exp(i - m') k v^T
        n <- exp(f + m - m') n + exp(i - m') k
        h = C^T q / (max(|n q|, exp(-m')) + eps),  with q scaled by key_size ** -0.5
        out = layer_norm(h) * sigmoid(z)

    with further projections i, f and z. A sequence has one state, of a constant size, for all of its
    tokens. For each head, it holds C [key_size, value_size], then the copies of n, then those of m:
    one copy for every `PANEL` columns of C.

    Attributes:
        heads: number of heads.
        key_size, value_size: elements of a head's query and key, and of its value.
        gate_cap: largest absolute value of cap(i) and cap(f).
        eps: epsilon of the division.
        norm_eps: epsilon of the norm of each head's outputs.
    """

    heads: int
    key_size: int
    value_size: int
    gate_cap: float
    eps: float
    norm_eps: float

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def projections(self) -> tuple[int, ...]:
        """Outputs of the projections q, k, v, z, i and f."""
        keys = self.heads * self.key_size
        values = self.heads * self.value_size
        return keys, keys, values, values, self.heads, self.heads

    @property
    def state(self) -> StatePlanes:
        panels = -(-self.value_size // PANEL)
        numbers = self.key_size * self.value_size + panels * (self.key_size + 1)
        return StatePlanes(0, self.heads, (self.heads, numbers))

    @property
    def activation_elements(self) -> int:
        """Activation elements that the layer needs per token at its peak. Some are in float32."""
        return 2 * sum(self.projections) + 8 * self.heads * self.value_size

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        return hidden * (sum(self.projections) + self.heads * self.value_size)


@dataclass(frozen=True, slots=True)
class NoMixerSpec(_WithoutKeys):
    """Stands in for attention in a layer that is only a feed-forward (Nemotron-H)."""

    activation_elements: ClassVar[int] = 0

    def weight_elements(self, hidden: int) -> int:
        return 0


StateSpec: TypeAlias = (
    DeltaSpec | LightningSpec | Mamba2Spec | Mamba1Spec | RgLruSpec | WkvSpec | MlstmSpec
)
SharedMixerSpec: TypeAlias = AttentionSpec | LatentSpec | ConvSpec | StateSpec  # over ranks
MixerSpec: TypeAlias = SharedMixerSpec | NoMixerSpec


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """Dense feed-forward of a layer.

    Attributes:
        size: intermediate size; 0 for no feed-forward.
        activation: "silu", "gelu", "gelu_tanh"; without a gate also "relu", "relu2", or "xielu", which
            has learnt parameters (arXiv:2411.13010).
        bias: whether the projections have biases.
        gated: whether the up projection is multiplied by an activated gate; if False, the
            activation applies to the up projection.
        gate_scale: factor of the gate, before the activation.
        inner_scale: factor of the input of the down projection.
        mixed: whether inputs are mixed with those of the token before, as in `WkvSpec`, and outputs
            are multiplied by the sigmoid of a projection (channel mixing of RWKV).
    """

    size: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True
    gate_scale: float = 1.0
    inner_scale: float = 1.0
    mixed: bool = False

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices."""
        return (3 if self.gated else 2) * hidden * self.size


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Mixture of experts of a layer: feed-forwards, some of which a router chooses for each token.

    Attributes:
        count: number of experts.
        top_k: number of experts chosen for each token.
        size: intermediate size of an expert.
        activation: "silu", "gelu" or "gelu_tanh"; or "clamped" for gate * sigmoid(alpha * gate) *
            (up + 1), with the gate clamped to at most `limit` and up to ±`limit` first; or
            "softcapped" for cap(gate, alpha) * sigmoid(gate) * cap(up, limit), with cap(x, c) = c *
            tanh(x / c); or "relu2" without a gate.
        gated: whether experts have gates, as in DenseSpec.
        scoring: function that maps router logits to scores; or "sparsemixer", which chooses two experts
            as `layers.experts.sparse_mixer` describes.
        jitter: parameter of "sparsemixer".
        groups, kept_groups: number of equal groups of experts, and number of best groups that
            experts are chosen from.
        group_top: number of a group's best scores that are summed to rank the group.
        correction: whether a learnt bias is added to each expert's score for the choice, but not
            for the weight.
        normalise: whether a token's weights are divided by their sum.
        scale: factor of the weights.
        weigh_input: whether an expert's weight multiplies its input, not its output.
        router_bias, bias: whether the router and the experts' matrices have biases.
        alpha, limit: parameters of the "clamped" and "softcapped" activations.
        shared_size: intermediate size of the shared expert that every token passes through; 0 for
            none.
        shared_scale: factor of the shared expert's output.
        shared_gate: whether the shared expert's output is multiplied by the sigmoid of a learnt
            projection of the token.
        apart: whether the router, the experts and the shared expert each have an input norm of
            their own, and the outputs of the last two are normalised before they are added. The
            router's norm then has a learnt weight, times hidden_size ** -0.5.
        expert_scales: whether each expert has a learnt factor of its weight.
        router_size: elements of the router's hidden layers; 0 for none.
        carries: whether the router also reads the hidden layer of the router in the layer before.
        skips: whether the router may choose that no expert gets a token.
        always: number of shared experts, which are the last of `count`. They are also the last of
            each token's `top_k`, and the router weighs them like the others.
        own: experts whose matrices a rank has, in order; None for all.
    """

    count: int
    top_k: int
    size: int
    activation: str = "silu"
    gated: bool = True
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = 0.0
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 1
    correction: bool = False
    normalise: bool = False
    scale: float = 1.0
    weigh_input: bool = False
    router_bias: bool = False
    bias: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    shared_size: int = 0
    shared_scale: float = 1.0
    shared_gate: bool = False
    apart: bool = False
    expert_scales: bool = False
    router_size: int = 0
    carries: bool = False
    skips: bool = False
    always: int = 0
    own: tuple[int, ...] | None = None
    gate_scale: ClassVar[float] = 1.0
    inner_scale: ClassVar[float] = 1.0

    @property
    def classes(self) -> int:
        """Number of the router's logits."""
        return self.count + self.skips

    @property
    def experts(self) -> Sequence[int]:
        """Experts whose matrices this rank has."""
        return range(self.count) if self.own is None else self.own

    def weight_elements(self, hidden: int, experts: float | None = None) -> int:
        """Counts the elements of the weight matrices.

        Args:
            hidden: size of the hidden state.
            experts: number of experts to count; None for those of this rank.
        """
        chosen = len(self.experts) if experts is None else experts
        matrices = 3 if self.gated else 2
        fed = matrices * (chosen * self.size + self.shared_size)
        return int(hidden * (fed + self.count + self.shared_gate))


FeedForwardSpec: TypeAlias = DenseSpec | ExpertsSpec
NO_FEED_FORWARD = DenseSpec(0)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Block of a layer whose attention and feed-forward only change the input of its state space
    (Zamba, arXiv:2405.16712). With e, the token's embedding as it enters the first layer:

        h = attention(norm([x, e]))
        h = feed_forward(norm(h)) @ W
        x <- x + state_space(norm(x + h))

    Several layers may share the weights of attention, the feed-forward and the first two norms.
    Each layer has its own keys and values, its own W and, to the first projections of both, its own
    low-rank additions (arXiv:2411.15242).

    Attributes:
        weights_of: index of the earlier layer whose shared weights this layer uses; None for its
            own.
        attention_rank: rank of the additions to queries, keys and values; 0 for none.
        feed_forward_rank: rank of the addition to the gate and up projections; 0 for none.
    """

    weights_of: int | None = None
    attention_rank: int = 0
    feed_forward_rank: int = 0

    def weight_elements(self, hidden: int, attention: AttentionSpec, feed_forward: int) -> int:
        """Counts the elements of the layer's own matrices in the block.

        Args:
            hidden: size of the hidden state.
            attention: the block's attention.
            feed_forward: intermediate size of its feed-forward.
        """
        return (
            hidden * hidden
            + self.attention_rank * (6 * hidden + attention.projections)
            + self.feed_forward_rank * (hidden + 2 * feed_forward)
        )


@dataclass(frozen=True, slots=True)
class DepthSpec:
    """How a layer reads earlier layers, if each block of layers has its own sum (attention
    residuals, Inkling 2).

    A block's layers add their outputs to one sum, which starts at zero. Each input of a layer
    attends over the sums of the earlier blocks and the sum of the current block so far; the
    embedding is the first block. The query is a learnt vector, and keys and values are the
    normalised sums. The feed-forward has one such input, and attention has `queries` of them.

    Some layers may run several times, in passes. Each pass begins with the sums before the first
    one. In later passes, a message also changes each input: it attends over the blocks of the
    previous pass, as `layers.message_gates` describes.

    Attributes:
        sources: places of the sums of the blocks that were complete before the layer.
        writes_to: place where a layer that begins a block stores the previous block's sum, or None.
        queries: number of attention's inputs that are read like this: one for queries, keys and
            values together, or three; 0 if the input is the embedding itself.
        norms: number of norms of attention's inputs, one or three.
        gate_rank: rank of the gates of messages, or 0 if the layer runs only once.
        loop_index: index of the layer among those that run several times.
        saves_to: place where a pass's first layer stores the previous pass's last sum, or None.
        restarts_from: place of the sum from which a pass's first layer starts, or None.
        messages: places of the previous pass's sums, the last one at the end; empty for no message.
    """

    sources: tuple[int, ...]
    writes_to: int | None
    queries: int
    norms: int = 1
    gate_rank: int = 0
    loop_index: int = 0
    saves_to: int | None = None
    restarts_from: int | None = None
    messages: tuple[int, ...] = ()

    @property
    def complete(self) -> tuple[int, ...]:
        """Places of the sums that are complete when the layer's feed-forward runs."""
        return self.sources if self.writes_to is None else (*self.sources, self.writes_to)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Transformer layer: attention, then a feed-forward, each added to the residual. One of the two
    may be missing.

    Attributes:
        attention: specification of the attention, or of the mixer in its place.
        feed_forward: specification of the feed-forward.
        norms: "before" to normalise a block's input, "after" its output, or "both"; "residual" to
            normalise the residual itself before each block.
        kept: with norms of the residual, its factors when the outputs of attention and of the
            feed-forward are added to it.
        residual_scale: factor of a block's output before it is added to the residual.
        parallel: "" if the feed-forward follows attention. Otherwise both read the same residual
            and are added to it together, with "one norm" for both or "two norms".
        beside: state space that reads the same input as attention, and whose output is added to
            attention's (Falcon-H1), or None. With `block`, it runs after attention and the
            feed-forward.
        scaled: whether the layer's result, residual included, is multiplied by a learnt number.
        result_scale: constant factor of the layer's result, residual included.
        input_size: elements of an input that the layer gets for each token besides the residual; 0
            for none. At the layer's end, the residual is multiplied by a matrix and activated. The
            result is multiplied by this input, projected, normalised and added to the residual.
        residual_weights: whether a block's output and the residual are each shifted and scaled, by
            learnt vectors, before they are added.
        block: what attention and the feed-forward are if only `beside` reads their output; None if
            they are added to the residual.
        depth: how the layer reads earlier layers, or None if all layers share one residual.
        repeats: index of an earlier layer whose weights this layer shares, or None.
        stored_as: number of the layer in a checkpoint, or None if it is the layer's index.
    """

    attention: MixerSpec
    feed_forward: FeedForwardSpec
    norms: Literal["before", "after", "both", "residual"] = "before"
    kept: tuple[float, float] = (1.0, 1.0)
    residual_scale: float = 1.0
    parallel: Literal["", "one norm", "two norms"] = ""
    beside: Mamba2Spec | Mamba1Spec | None = None
    scaled: bool = False
    result_scale: float = 1.0
    input_size: int = 0
    residual_weights: bool = False
    block: BlockSpec | None = None
    depth: DepthSpec | None = None
    repeats: int | None = None
    stored_as: int | None = None

    @property
    def state(self) -> StatePlanes | None:
        """State that the layer keeps of a sequence, or None."""
        if (mixer := self.state_mixer) is not None:
            return mixer.state
        return self.attention.state if isinstance(self.attention, AttentionSpec) else None

    @property
    def state_mixer(self) -> StateSpec | None:
        """The mixer that keeps a state, or None if the layer has none."""
        return self.attention if isinstance(self.attention, StateSpec) else self.beside

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """Attention, or the mixer in its place, followed by the mixer beside it, if any."""
        return (self.attention,) if self.beside is None else (self.attention, self.beside)

    @property
    def hidden_norms(self) -> tuple[str, ...]:
        """Norms of hidden states in this layer, as roles of `parameters.py`."""
        before: tuple[str, ...] = ("input_norm", "mlp_norm")
        if self.parallel == "one norm":
            before = ("input_norm",)
        elif self.depth is not None and self.depth.norms > 1:
            before = ("input_norm", "key_input_norm", "value_input_norm", "mlp_norm")
        after = ("attention_out_norm", "mlp_out_norm")
        roles = {"after": after, "both": before + after}.get(self.norms, before)
        fed = [role for role in roles if role.startswith("mlp_")]
        mixed = [role for role in roles if role not in fed]
        if self.feeds_apart:
            fed += ["experts_norm", "shared_out_norm", "experts_out_norm"]
        if self.input_size:
            fed.append("inputs_norm")
        return (*(mixed if self.mixes else ()), *(fed if self.feeds else ()))

    @property
    def mixes(self) -> bool:
        """True if the layer has attention, or something in its place."""
        return not isinstance(self.attention, NoMixerSpec)

    @property
    def feeds_apart(self) -> bool:
        """True if the experts and the shared expert have separate norms."""
        return isinstance(self.feed_forward, ExpertsSpec) and self.feed_forward.apart

    @property
    def feeds(self) -> bool:
        """True if the layer has a feed-forward."""
        return self.feed_forward.size > 0

    def attention_inputs(self, hidden: int) -> int:
        """Returns the number of elements of attention's input."""
        return hidden if self.block is None else 2 * hidden

    def weight_elements(self, hidden: int) -> int:
        """Counts the elements of the weight matrices, without those shared from another layer."""
        if self.repeats is not None:
            return 0
        if self.block is not None and self.block.weights_of is not None:
            assert self.beside is not None
            return self.beside.weight_elements(hidden) + self._block_elements(hidden)
        return self._mixer_elements(hidden) + self.feed_forward.weight_elements(hidden)

    def active_weight_elements(self, hidden: int) -> int:
        """Counts the matrix elements that a token is multiplied by, with only the chosen experts."""
        fed = self.feed_forward
        return self._mixer_elements(hidden) + (
            fed.weight_elements(hidden)
            if isinstance(fed, DenseSpec)
            else fed.weight_elements(hidden, fed.top_k)
        )

    def _mixer_elements(self, hidden: int) -> int:
        inputs = 2 * hidden * self.input_size
        mixers = sum(mixer.weight_elements(hidden) for mixer in self.mixers)
        if self.block is None:
            return inputs + mixers
        assert isinstance(self.attention, AttentionSpec)
        return mixers + hidden * self.attention.projections + self._block_elements(hidden)

    def _block_elements(self, hidden: int) -> int:
        assert self.block is not None
        assert isinstance(self.attention, AttentionSpec)
        return self.block.weight_elements(hidden, self.attention, self.feed_forward.size)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Decoder-only transformer.

    Attributes:
        architecture: key of the family in `families.FAMILIES`, which defines the tensor names of
            its checkpoints.
        vocab_size: number of tokens, padding included.
        hidden_size: elements of a hidden state.
        max_positions: longest sequence, in tokens.
        rms_eps: epsilon of all norms of hidden states, of either kind.
        layers: specification of each layer.
        tied_embeddings: whether the head uses the embedding table.
        norm: kind of the norms: "rms", or "layer", which subtracts the mean first
            (arXiv:1607.06450).
        norm_weight, norm_bias: whether the norms have weights, and biases.
        norm_offset: number added to stored norm weights; 1.0 if norms multiply by (1 + weight).
        head_bias: whether the head has a bias.
        embedding_norm: whether embeddings are normalised before the first layer.
        embedding_weights: whether embeddings are shifted and scaled by learnt vectors.
        embedding_scale, logit_scale: factors of embeddings and logits.
        logit_softcap: cap c of the logits, which become c * tanh(logits / c), or None.
        eos_ids: tokens that end a sequence.
        bos_id: token that begins a sequence, or None.
        learned_positions: number of positions that have a learnt vector, which is added to a token's
            embedding; 0 for none.
        position_offset: number of rows before that of position 0 in the table of these vectors.
        layer_input_tokens: number of tokens in the table of the layers' inputs; 0 for none.
        real_tokens: number of tokens that have logits, if the vocabulary is padded; 0 for all.
        draft_layers: number of extra layers after the model's own, for drafting tokens, that a
            checkpoint may contain; they are not loaded.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    rms_eps: float
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    norm_offset: float = 0.0
    head_bias: bool = False
    embedding_norm: bool = False
    embedding_weights: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    learned_positions: int = 0
    position_offset: int = 0
    layer_input_tokens: int = 0
    real_tokens: int = 0
    draft_layers: int = 0

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec, ...]:
        """Attention specifications of the layers that have attention, in order."""
        mixers = (layer.attention for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec | LatentSpec))

    @property
    def first_attention(self) -> AttentionSpec | LatentSpec:
        """Attention of the first layer that has it; `NO_ATTENTION` if none has."""
        return next(iter(self.attentions), NO_ATTENTION)

    @property
    def layer_input_size(self) -> int:
        """Elements of the inputs of all layers, for each token."""
        return sum(layer.input_size for layer in self.layers)

    @property
    def has_linked_layers(self) -> bool:
        """True if layers can't run one by one, because some read another layer's keys or get inputs
        besides the residual.
        """
        others = self.layer_input_size > 0 or self.router_size > 0
        return others or bool(self.key_readers) or self.reads_embeddings or self.blocks > 0

    @property
    def blocks(self) -> int:
        """Number of places for the sums of blocks of layers; 0 if layers share one residual."""
        depths = [layer.depth for layer in self.layers if layer.depth is not None]
        columns = [column for each in depths for column in each.complete]
        return (
            max((*columns, *(x.saves_to for x in depths if x.saves_to is not None)), default=-1) + 1
        )

    @property
    def looped_layers(self) -> int:
        """Number of layers that run several times."""
        depths = (layer.depth for layer in self.layers)
        return max((x.loop_index + 1 for x in depths if x is not None and x.gate_rank), default=0)

    @property
    def repeated_layers(self) -> Mapping[int, int]:
        """Maps the index of each layer that shares an earlier layer's weights to that layer's."""
        layers = enumerate(self.layers)
        return {i: layer.repeats for i, layer in layers if layer.repeats is not None}

    @property
    def router_size(self) -> int:
        """Elements of the routers' hidden layers, which each layer's router passes to the next."""
        fed = (layer.feed_forward for layer in self.layers)
        return max((x.router_size for x in fed if isinstance(x, ExpertsSpec)), default=0)

    @property
    def reads_embeddings(self) -> bool:
        """True if layers read tokens' embeddings besides the residual."""
        return any(layer.block is not None for layer in self.layers)

    @property
    def borrowed_blocks(self) -> Mapping[int, int]:
        """Layers whose block has the weights of an earlier layer's block, with the index of that
        layer.
        """
        blocks = ((i, layer.block) for i, layer in enumerate(self.layers))
        return {i: x.weights_of for i, x in blocks if x is not None and x.weights_of is not None}

    @property
    def key_readers(self) -> tuple[int, ...]:
        """Indices of the layers that read another layer's keys and values."""
        mixers = enumerate(layer.attention for layer in self.layers)
        return tuple(i for i, x in mixers if isinstance(x, AttentionSpec) and x.keys_of is not None)

    @property
    def states(self) -> tuple[StatePlanes | None, ...]:
        """State that each layer keeps of a sequence; None for a layer without a recurrent state."""
        return tuple(layer.state for layer in self.layers)

    @property
    def has_running_maxima(self) -> bool:
        """True if states contain a running maximum of exponents, as in RWKV and xLSTM."""
        return any(isinstance(layer.attention, WkvSpec | MlstmSpec) for layer in self.layers)

    @property
    def kv_layout(self) -> KVLayout:
        windows = tuple(layer.attention.window for layer in self.layers)
        planes = tuple(layer.attention.planes for layer in self.layers)
        return KVLayout(planes, windows if any(windows) else ())

    @property
    def causal(self) -> bool:
        """True if every layer is causal, so that the model can generate."""
        return all(layer.attention.causal for layer in self.layers)

    @property
    def latent(self) -> bool:
        """True if any layer has latent attention."""
        return any(isinstance(layer.attention, LatentSpec) for layer in self.layers)

    @property
    def ropes(self) -> list[RopeSpec]:
        """Distinct rotary embeddings of the layers with attention; at least one."""
        ropes: list[RopeSpec] = []
        for attention in self.attentions or (NO_ATTENTION,):
            if attention.rope not in ropes:
                ropes.append(attention.rope)
        return ropes
