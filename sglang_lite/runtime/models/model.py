"""Interfaces of models for the engine, the memory manager and the runners. Implemented by decoders
and by test doubles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

import torch

from sglang_lite.runtime.attention.base import StepAttention
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.kv_layout import KVLayout, SoundPrefix
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import AttentionSpec, LatentSpec, ModelSpec
from sglang_lite.runtime.parallel.shared_steps import Steps

if TYPE_CHECKING:
    from sglang_lite.runtime.models.gpu_ranks import LogitParts  # imports Triton

Cache: TypeAlias = Any  # KV cache, of a type that only the model knows; runners pass it through


class Model(Protocol):
    """Model that computes hidden states and logits from token tensors."""

    @property
    def fused(self) -> bool:
        """True if the model is a `DeviceModel`."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def spec(self) -> ModelSpec | None:
        """Specification that a checkpoint must match to replace the weights, or None if the model
        has no checkpoint.
        """
        ...

    @property
    def format(self) -> str:
        """Name of the dtype that the model computes in, such as "bfloat16"."""
        ...

    @property
    def batch_sensitive(self) -> bool:
        """True if rounding is so coarse that the token chosen for a row often depends on the other
        rows in its batch.
        """
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in the KV cache."""
        ...

    @property
    def window(self) -> int | None:
        """Longest window, in tokens, of the layers whose keys and values may be on separate pages.
        None if there are no such layers.
        """
        ...

    @property
    def window_bytes(self) -> int:
        """Bytes that one token takes in the layers whose keys and values may be on separate pages.
        Included in `token_bytes`.
        """
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in recurrent layers (linear attention, state spaces); 0 if
        the model has none.
        """
        ...

    def allocate_cache(self, slots: int, window_slots: int = 0, states: int = 0) -> Cache:
        """Allocates a KV cache for `slots` tokens. Layers with a window get `window_slots` tokens
        instead, unless that is 0. Recurrent layers get places for `states` states.
        """
        ...

    def copy_slots(self, cache: Cache, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values between token slots, int64 [N] each. No slot may be both source
        and target.
        """
        ...

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: Cache
    ) -> torch.Tensor:
        """Computes hidden states [T, …] of new tokens and stores the tokens' keys and values in the
        cache.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [R, V] of hidden states [R, …]."""
        ...


class DeviceModel(Model, Protocol):
    """Model built from fused kernels, driven by a device plan.

    Attributes:
        kv_scales: scales of an 8-bit KV cache, or None if the cache is not in 8 bits.
        uncapturable: reason why the model's steps can't be captured in a CUDA graph, or None if
            they can.
        rope_axes: `RotaryPositions.axes` for the model's plans; None if a token has a single
            position.
        both_ways: whether attention reads `DevicePlan.limits`, because image tokens attend to later
            tokens.
        sound: tokens of the sound that begins each sequence, if text attends to sound and text
            separately.
        parts: how ranks share the logits; None if there is one rank.
        steps: steps to begin before each `run`; shared if the feed-forwards are divided among
            replicas.
    """

    kv_scales: KVScales | None
    uncapturable: str | None
    both_ways: bool
    sound: SoundPrefix | None

    @property
    def rope_axes(self) -> torch.Tensor | None: ...

    @property
    def parts(self) -> LogitParts | None: ...

    @property
    def steps(self) -> Steps: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_layout(self) -> KVLayout: ...

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec, ...]:
        """Attention specification of each layer, in order. A layer without attention is listed with
        the specification of another layer.
        """
        ...

    @property
    def activation_elements(self) -> int:
        """Upper bound on the activation elements that a step needs per token at its peak, used to
        reserve memory.
        """
        ...

    @property
    def active_parameters(self) -> int:
        """Number of weight elements that each token is multiplied by, and so of multiplications per
        token.
        """
        ...

    @property
    def shares_prefixes(self) -> bool:
        """True if every layer attends to the whole prefix, so that rows can read the pages of a
        common prefix together.
        """
        ...

    @property
    def logit_softcap(self) -> float | None:
        """Cap c of the logits, which become c * tanh(raw logits / c), or None if they are not
        capped.
        """
        ...

    def run(self, plan: DevicePlan, cache: KVCache, attention: StepAttention) -> torch.Tensor:
        """Computes hidden states [T, …] of the plan's tokens and stores the tokens' keys and values
        in the cache. With several stages, returns the rows after this rank's layers.
        """
        ...

    def finish_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns hidden states [R, …] after the model's last layer, given rows that `run`
        returned.
        """
        ...

    def raw_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits [R, V] for rows of the result of `run`, in the model's dtype and before
        soft-capping. With `parts`, they cover only this rank's part of the vocabulary. They are
        written to `out` if given.
        """
        ...


def is_fused(model: Model) -> TypeGuard[DeviceModel]:
    return model.fused
