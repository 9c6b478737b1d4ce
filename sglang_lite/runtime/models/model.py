"""The interface of models, as engine, memory and runners see them: a decoder, or a script in its place."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeGuard

import torch

from sglang_lite.runtime.attention.base import StepAttention
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import AttentionSpec, LatentSpec, ModelSpec

Cache: TypeAlias = Any  # of keys and values: each model's own, which its runner passes through


class Model(Protocol):
    """A model that is run from tensors.

    Attributes:
        fused: it is a `DeviceModel`.
    """

    fused: bool

    @property
    def device(self) -> torch.device: ...

    @property
    def spec(self) -> ModelSpec | None:
        """Shape that another checkpoint must have to take this one's place; None where there is no checkpoint."""
        ...

    @property
    def format(self) -> str:
        """Number format of its computation."""
        ...

    @property
    def rounds(self) -> bool:
        """True where the same row computed beside others often gives another token."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a cache."""
        ...

    def allocate_cache(self, slots: int) -> Cache:
        """A cache of keys and values for that many tokens."""
        ...

    def copy_slots(self, cache: Cache, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values from token slots to others; int64 [N] each. All are read before one is written."""
        ...

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: Cache) -> torch.Tensor:
        """Hidden states [T, …] of new tokens, whose keys and values it stores."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [R, V] of hidden states [R, …]."""
        ...


class DeviceModel(Model, Protocol):
    """A model that is made of kernels, which take a device plan.

    Attributes:
        kv_scales: of a cache in 8 bits.
        uncapturable: why its steps can't be part of a CUDA graph; None where they can.
    """

    kv_scales: KVScales | None
    uncapturable: str | None

    @property
    def precision(self) -> Precision: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_layout(self) -> KVLayout: ...

    @property
    def attentions(self) -> tuple[AttentionSpec | LatentSpec, ...]:
        """Attention of each layer."""
        ...

    @property
    def widest(self) -> int:
        """Numbers of a token that a step holds at once, at most."""
        ...

    @property
    def products(self) -> int:
        """Numbers of the layers' matrices that a token is multiplied by."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """True where all layers see a whole prefix, so that rows can read a common one together."""
        ...

    @property
    def logit_softcap(self) -> float | None:
        """Logits become softcap * tanh(raw logits / softcap)."""
        ...

    def run(self, plan: DevicePlan, cache: KVCache, attention: StepAttention) -> torch.Tensor:
        """Hidden states [T, …] of a plan's tokens, whose keys and values it stores."""
        ...

    def raw_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] of hidden states, in the model's format and before soft-capping; written into `out`, where it
        is given."""
        ...


def is_fused(model: Model) -> TypeGuard[DeviceModel]:
    return model.fused
