"""All layers of a decoder for few tokens on a CPU, whose products are with matrices in blocks, in one call of
`few_tokens_step.cpp`; and attention alone. Their twins are torch's operators in `Decoder`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_lite.runtime.kernels.block_product import BlockProduct, Matrix
from sglang_lite.runtime.kernels.few_tokens import ATTENTION, ReadSlots, attended, name_of
from sglang_lite.runtime.kernels.kv_cache import KVCache

SOURCE = Path(__file__).with_suffix(".cpp")
PARTS = 3  # of a product, at most
BLOCK = 32  # of which a head's size is a multiple
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class StepLayer(ctypes.Structure):
    """A layer: its products, norms and attention."""

    _fields_ = [
        *((name, Matrix * PARTS) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", _INT),
        ("table", _INT),
        ("scale", _FLOAT),
    ]

    @classmethod
    def of(
        cls,
        products: Iterable[Sequence[BlockProduct]],
        norms: Iterable[torch.Tensor | None],
        *,
        dtype: torch.dtype,
        window: int | None,
        table: int,
        scale: float,
    ) -> StepLayer:
        """
        Args:
            products: for queries, keys and values; for attention's output; for gates and ups; down: each of up to
                `PARTS` along the outputs.
            norms: weights before attention, before the feed-forward, of each head's query, and of its key.
            dtype: of activations and norms.
            table: index of the rotary table.
            scale: of attention's scores.
        """
        matrices = [(Matrix * PARTS)(*(part.matrices[dtype] for part in parts)) for parts in products]
        return cls(*matrices, *(None if norm is None else norm.data_ptr() for norm in norms), window or 0, table, scale)


class _Step(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(StepLayer)),
        *((name, ctypes.POINTER(_POINTER)) for name in ("keys", "values", "cos", "sin")),
        ("turned", ctypes.POINTER(_INT)),
        *((name, _POINTER) for name in ("store_at", "reads", "firsts", "lengths", "x", "last_norm", "out")),
        ("slots", _LONG),
        *((name, _INT) for name in ("count", "tokens", "hidden", "queries", "kv", "size", "gates", "longest")),
        ("eps", _FLOAT),
    ]


@dataclass(frozen=True, slots=True)
class StepLayers:
    """A model's layers, of one shape.

    Attributes:
        layers: what they point to is kept by whoever made them.
        norm: weight of the norm behind them.
        eps: of all norms.
        heads: of queries.
        gates: of a feed-forward.
    """

    layers: ctypes.Array[StepLayer]
    norm: torch.Tensor
    eps: float
    heads: int
    gates: int


class FewTokensTogether:
    """Functions on all of torch's threads.

    Args:
        library: of `few_tokens_step.cpp`.
        activations, cache: formats, of `few_tokens.FORMATS`.
    """

    def __init__(self, library: ctypes.CDLL, activations: torch.dtype, cache: torch.dtype) -> None:
        both = f"{name_of(activations)}_{name_of(cache)}"
        self._step, self._attend = library[f"step_{both}"], library[f"attend_{both}"]
        self._step.argtypes = [ctypes.POINTER(_Step), ctypes.c_int]
        self._attend.argtypes = [*ATTENTION, ctypes.c_int]

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        reads: ReadSlots,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        """Attention, as `FewTokens.attend` gives it."""
        return attended(self._attend, q, keys, values, reads, window, scale, torch.get_num_threads())

    def run(
        self,
        model: StepLayers,
        x: torch.Tensor,
        turns: Sequence[tuple[torch.Tensor, torch.Tensor]],
        store_at: torch.Tensor,
        reads: ReadSlots,
        cache: KVCache,
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] behind the last norm, of tokens' embeddings x.

        Args:
            turns: cos and sin of the positions, of each rotary table.
            store_at: int64 [T]: the token slots.
            reads: of the tokens.
        """
        out = torch.empty_like(x)
        kv, slots, size = cache.k[0].shape
        step = _Step(
            model.layers, _addresses(cache.k), _addresses(cache.v), _addresses([cos for cos, _ in turns]),
            _addresses([sin for _, sin in turns]), (_INT * len(turns))(*(cos.shape[-1] for cos, _ in turns)),
            store_at.data_ptr(), reads.addresses.data_ptr(), reads.firsts.data_ptr(), reads.lengths.data_ptr(),
            x.data_ptr(), model.norm.data_ptr(), out.data_ptr(), slots, len(model.layers), *x.shape, model.heads, kv,
            size, model.gates, reads.longest, model.eps,
        )  # fmt: skip
        self._step(step, torch.get_num_threads())
        return out


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_POINTER * len(tensors))(*(x.data_ptr() for x in tensors))
