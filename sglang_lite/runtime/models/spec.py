"""Specification of a decoder: a table of layers, and what the whole model has in common. Needs no torch.

One record drives one parametrised decoder (`decoder.py`). `read_config.py` and `read_gguf.py` make it of a model's
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane
from sglang_lite.runtime.models.config_fields import Json


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, how much of the head turns, and how frequencies are scaled.

    Attributes:
        kind: "none": nothing turns.
        rotary_dim: None for the whole head.
        params: `factor` and what else the kind needs, by transformers' names.
        interleaved: the checkpoint has the numbers of a pair side by side, not half a head apart.
    """

    theta: float = 10_000.0
    kind: str = "default"
    rotary_dim: int | None = None
    params: Mapping[str, Json] = field(default_factory=dict)
    interleaved: bool = False


NO_ROPE = RopeSpec(kind="none", rotary_dim=2)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of a layer.

    Attributes:
        scale: factor of the scores.
        window: most positions that a token sees, itself included, in each direction that it looks; None for all.
        softcap: scores become softcap * tanh(scores / softcap).
        qk_norm: queries and keys are normalised by norms of the model's kind: each head by one that all heads have in
            common ("head") or by its own ("heads"), or the "whole" projection.
        qk_norm_bias: those add one.
        clip: bound of queries, keys and values, to either side.
        sinks: each head has a score more, whose weight goes nowhere.
        causal: a token sees what is before it, and nothing that is after it.
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    rope: RopeSpec
    window: int | None = None
    softcap: float | None = None
    qk_norm: Literal["", "head", "heads", "whole"] = ""
    qk_norm_bias: bool = False
    clip: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    causal: bool = True

    @property
    def planes(self) -> tuple[Plane, ...]:
        return Plane(self.kv_heads, self.key_size), Plane(self.kv_heads, self.value_size)

    @property
    def pair_products(self) -> int:
        """Multiplications for a token that another one sees."""
        return self.heads * (self.key_size + self.value_size)

    @property
    def decode_products(self) -> int:
        """`pair_products` where few tokens are new."""
        return self.pair_products

    @property
    def held(self) -> int:
        """Numbers of a token that its computation holds at once."""
        return (self.heads + 2 * self.kv_heads) * self.key_size * 2

    def numbers(self, hidden: int) -> int:
        """Numbers of its matrices."""
        return hidden * (self.heads + self.kv_heads) * (self.key_size + self.value_size)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention of a layer (DeepSeek-V2, arXiv:2405.04434): all heads' keys and values are products of one
    vector a token, the latent. It alone is cached, beside a part of the keys that is turned and that heads share.

    Attributes:
        rank: numbers of a latent.
        query_rank: numbers of a vector of which queries are products; None: they are products of what comes in.
        nope_size, rope_size: numbers of a head's query that are not turned, and that are.
        value_size: numbers of a head's value.
        scale: factor of the scores.
        bias: of the products that make latents.
        norm_eps: of the norms of latents.
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
    norm_eps: float = 1e-6
    kv_heads: ClassVar[int] = 1  # as attention finds them in the cache
    window: ClassVar[None] = None
    sinks: ClassVar[bool] = False
    causal: ClassVar[bool] = True

    @property
    def key_size(self) -> int:
        """Numbers of a token in the cache: the latent, which is its value there, too, and the turned part."""
        return self.rank + self.rope_size

    @property
    def query_size(self) -> int:
        return self.nope_size + self.rope_size

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(1, self.key_size),)

    @property
    def pair_products(self) -> int:
        """Multiplications for a token that another one sees, by keys and values."""
        return self.heads * (self.query_size + self.value_size)

    @property
    def decode_products(self) -> int:
        """Multiplications for a token that another one sees, by latents."""
        return self.heads * (self.key_size + self.rank)

    @property
    def held(self) -> int:
        """Numbers of a token that its computation holds at once."""
        made = (self.query_rank or 0) + self.key_size
        return made + self.heads * (self.query_size + 2 * self.key_size + self.value_size)

    def numbers(self, hidden: int) -> int:
        """Numbers of its matrices."""
        queries = self.heads * self.query_size
        made = hidden * queries if self.query_rank is None else self.query_rank * (hidden + queries)
        return (
            made
            + hidden * self.key_size
            + self.heads * (self.rank * (self.nope_size + self.value_size) + self.value_size * hidden)
        )


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A feed-forward.

    Attributes:
        activation: "silu", "gelu", "gelu_tanh" or "relu2".
        gated: the activation is that of a gate, which what goes up is multiplied by; else of what goes up.
    """

    size: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True

    def numbers(self, hidden: int) -> int:
        """Numbers of its matrices."""
        return (3 if self.gated else 2) * hidden * self.size


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Gated feed-forwards, of which a router chooses some for each token.

    Attributes:
        count, size: of the experts, and of each.
        top_k: experts of a token.
        activation: "silu", "gelu" or "gelu_tanh"; or "clamped": gate sigmoid(alpha gate) (up + 1), after the gate has
            been bounded by `limit` from above and `up` from both sides.
        scoring: the function that makes scores of the router's logits.
        groups, kept_groups: experts are chosen within the best of so many groups of equal size.
        group_top: best scores of a group whose sum says how good it is.
        correction: a bias of each expert is added to its score for the choice, not for the weight.
        normalise: weights of a token are divided by their sum.
        scale: factor of the weights.
        router_bias, bias: of the router and of the experts' matrices.
        shared_size: of a feed-forward that every token takes besides; 0 for none.
        shared_gate: its output is multiplied by the sigmoid of a number that a matrix of its own gives.
    """

    count: int
    top_k: int
    size: int
    activation: str = "silu"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 1
    correction: bool = False
    normalise: bool = False
    scale: float = 1.0
    router_bias: bool = False
    bias: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    shared_size: int = 0
    shared_gate: bool = False

    def numbers(self, hidden: int, experts: float | None = None) -> int:
        """Numbers of its matrices.

        Args:
            experts: how many of them are counted; None for all.
        """
        chosen = self.count if experts is None else experts
        return int(hidden * (3 * (chosen * self.size + self.shared_size) + self.count + self.shared_gate))


FeedForwardSpec: TypeAlias = DenseSpec | ExpertsSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer: attention, then a feed-forward, each added to what came in.

    Attributes:
        norms: what is normalised: what comes in ("before"), what goes out ("after"), or both.
        residual_scale: factor of what is added.
        parallel: the feed-forward takes what attention takes, and both are added together: both by "one norm" or each
            by its own, "two norms".
    """

    attention: AttentionSpec | LatentSpec
    feed_forward: FeedForwardSpec
    norms: Literal["before", "after", "both"] = "before"
    residual_scale: float = 1.0
    parallel: Literal["", "one norm", "two norms"] = ""

    @property
    def hidden_norms(self) -> tuple[str, ...]:
        """Norms of hidden states that it has, by the roles of `parameters.py`."""
        before = ("input_norm",) if self.parallel == "one norm" else ("input_norm", "mlp_norm")
        after = ("attention_out_norm", "mlp_out_norm")
        return {"before": before, "after": after, "both": before + after}[self.norms]

    def numbers(self, hidden: int) -> int:
        """Numbers of its matrices."""
        return self.attention.numbers(hidden) + self.feed_forward.numbers(hidden)

    def products(self, hidden: int) -> int:
        """Numbers of its matrices that a token is multiplied by: of experts, those that are chosen for it."""
        fed = self.feed_forward
        return self.attention.numbers(hidden) + (
            fed.numbers(hidden) if isinstance(fed, DenseSpec) else fed.numbers(hidden, fed.top_k)
        )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        architecture: the family, of `families.FAMILIES`, whose names its checkpoints have.
        max_positions: longest sequence.
        rms_eps: of all norms of hidden states, whatever their kind.
        norm: kind of those: "rms", or "layer", which takes the mean off first (arXiv:1607.06450).
        norm_weight, norm_bias: they multiply by one, and add one.
        norm_offset: 1.0 where they multiply by (1 + weight).
        head_bias: of the product that gives logits.
        embedding_scale, logit_scale: factors of embeddings and logits.
        logit_softcap: logits become softcap * tanh(logits / softcap).
        draft_layers: layers that a checkpoint may have behind its own to draft tokens with; they are left out.
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
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    draft_layers: int = 0

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout(tuple(layer.attention.planes for layer in self.layers))

    @property
    def causal(self) -> bool:
        """True where no token sees what is after it: the model can generate."""
        return all(layer.attention.causal for layer in self.layers)

    @property
    def latent(self) -> bool:
        """True where some layer's attention is latent."""
        return any(isinstance(layer.attention, LatentSpec) for layer in self.layers)

    @property
    def ropes(self) -> list[RopeSpec]:
        """Rotary embeddings of the layers, each once."""
        ropes: list[RopeSpec] = []
        for layer in self.layers:
            if layer.attention.rope not in ropes:
                ropes.append(layer.attention.rope)
        return ropes
