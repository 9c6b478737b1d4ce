"""Runs all layers of a decoder for few tokens on a CPU, in one call of `cpu_small_batch_step.cpp`.
The matrices are in quantised blocks. The library also has multithreaded attention. The references
are torch's operators in `Decoder`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_lite.runtime.kernels.block_product import BlockProduct, Matrix
from sglang_lite.runtime.kernels.cpu_small_batch import (
    ATTENTION,
    ReadSlots,
    call_attention,
    dtype_name,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache

SOURCE = Path(__file__).with_suffix(".cpp")
PARTS = 3  # maximum number of matrices that a product is split into
BLOCK = 32  # divisor of a head's size
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_LONG = ctypes.c_int64
_FLOAT = ctypes.c_float


class StepLayer(ctypes.Structure):
    """C structure of a layer: its linear layers, norms and attention settings."""

    _fields_ = [
        *((name, Matrix * PARTS) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        ("window", _INT),
        ("table", _INT),
        ("scale", _FLOAT),
    ]

    @classmethod
    def from_products(
        cls,
        products: Iterable[Sequence[BlockProduct]],
        norms: Iterable[torch.Tensor | None],
        *,
        dtype: torch.dtype,
        window: int | None,
        table: int,
        scale: float,
    ) -> StepLayer:
        """Builds the structure of a layer.

        Args:
            products: products for queries, keys and values; for attention's output; for gates and
                ups; and for down. Each is a sequence of up to `PARTS` matrices along the outputs.
            norms: weights of the norms before attention, before the feed-forward, of each head's
                query, and of its key.
            dtype: data type of activations and norms.
            window: window of attention, or None.
            table: index of the rotary table.
            scale: factor of attention's scores.
        """
        matrices = [
            (Matrix * PARTS)(*(part.matrices[dtype] for part in parts)) for parts in products
        ]
        return cls(
            *matrices,
            *(None if norm is None else norm.data_ptr() for norm in norms),
            window or 0,
            table,
            scale,
        )


PRODUCTS = ("qkv", "output", "gate_up", "down")  # that adapters may change


class AdapterDelta(ctypes.Structure):
    """C structure of the matrices with which an adapter changes a linear layer: A [parts, rank,
    inputs] and B [rank, outputs], contiguous, in the data type of activations. All fields are zero
    if the adapter doesn't change the layer.
    """

    _fields_ = [("a", _POINTER), ("b", _POINTER), ("rank", _LONG)]


class _Adapters(ctypes.Structure):
    _fields_ = [
        ("deltas", ctypes.POINTER(AdapterDelta)),
        *((name, _POINTER) for name in ("tokens", "starts")),
        *((name, _INT) for name in ("count", "rank")),
    ]


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """LoRA adapters of a step's tokens.

    Attributes:
        deltas: for each layer and each of PRODUCTS the adapters' parts. The owner must keep the
            memory that they point to alive.
        tokens: int32, tokens of the first adapter, then those of the second, and so on; those
            without one are left out.
        starts: int32 [adapters + 1], first of each adapter's tokens in `tokens`, and the end.
        rank: the largest rank.
    """

    deltas: ctypes.Array[AdapterDelta]
    tokens: torch.Tensor
    starts: torch.Tensor
    rank: int


class _Step(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(StepLayer)),
        *((name, ctypes.POINTER(_POINTER)) for name in ("keys", "values", "cos", "sin")),
        ("rope_dims", ctypes.POINTER(_INT)),
        *((name, _POINTER * 2) for name in ("store_at", "reads", "firsts")),
        ("slots", _LONG * 2),
        *((name, _POINTER) for name in ("lengths", "x", "last_norm", "out")),
        ("adapters", ctypes.POINTER(_Adapters)),
        *(
            (name, _INT)
            for name in ("count", "tokens", "hidden", "queries", "kv", "size", "gates", "longest")
        ),
        ("eps", _FLOAT),
    ]


@dataclass(frozen=True, slots=True)
class StepLayers:
    """Layers of a model, all of the same shape.

    Attributes:
        layers: structures of the layers. The owner must keep the memory that they point to alive.
        norm: weight of the norm after the layers.
        eps: epsilon of all norms.
        heads: number of query heads.
        gates: number of gates of a feed-forward.
    """

    layers: ctypes.Array[StepLayer]
    norm: torch.Tensor
    eps: float
    heads: int
    gates: int


class ThreadedSmallBatchOps:
    """Functions for few tokens that run on all of torch's threads.

    Args:
        library: compiled `cpu_small_batch_step.cpp`.
        activations, cache: data types, a pair in `cpu_small_batch.FORMATS`.
    """

    def __init__(self, library: ctypes.CDLL, activations: torch.dtype, cache: torch.dtype) -> None:
        both = f"{dtype_name(activations)}_{dtype_name(cache)}"
        self._step = library[f"step_{both}"]
        self._attend = library[f"attend_{both}"]
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
        """Computes the same as `SmallBatchOps.attend`, on all threads."""
        return call_attention(
            self._attend, q, keys, values, reads, window, scale, torch.get_num_threads()
        )

    def run(
        self,
        model: StepLayers,
        x: torch.Tensor,
        ropes: Sequence[tuple[torch.Tensor, torch.Tensor]],
        store_at: tuple[torch.Tensor, torch.Tensor],
        reads: tuple[ReadSlots, ReadSlots],
        cache: KVCache,
        adapters: StepAdapters | None = None,
    ) -> torch.Tensor:
        """Runs all layers. Returns the hidden states [T, hidden_size] after the last norm.

        Args:
            model: layers of the model.
            x: embeddings [T, hidden_size] of the tokens.
            ropes: cos and sin of the positions, for each rotary table.
            store_at: int64 [T], token slot of each token, in layers without a window and in those
                with one.
            reads: token slots that each token reads, likewise.
            cache: KV cache (written).
            adapters: adapters of the tokens, or None if none has one.
        """
        out = torch.empty_like(x)
        kv, _, size = cache.k[0].shape
        kinds = cache.windowed
        slots = [
            cache.k[kinds.index(kind) if kind in kinds else 0].shape[1] for kind in (False, True)
        ]
        lora = None
        if adapters is not None:
            lora = ctypes.pointer(
                _Adapters(
                    adapters.deltas,
                    adapters.tokens.data_ptr(),
                    adapters.starts.data_ptr(),
                    len(adapters.starts) - 1,
                    adapters.rank,
                )
            )
        cos, sin = zip(*ropes, strict=True)
        dims = [each.shape[-1] for each in cos]
        whole, windowed = reads
        keys, values, cosines, sines, stored, read, firsts = _addresses(
            cache.k,
            cache.v,
            cos,
            sin,
            store_at,
            (whole.addresses, windowed.addresses),
            (whole.firsts, windowed.firsts),
        )
        step = _Step(
            model.layers,
            keys,
            values,
            cosines,
            sines,
            (_INT * len(dims))(*dims),
            stored,
            read,
            firsts,
            (_LONG * 2)(*slots),
            whole.lengths.data_ptr(),
            x.data_ptr(),
            model.norm.data_ptr(),
            out.data_ptr(),
            lora,
            len(model.layers),
            *x.shape,
            model.heads,
            kv,
            size,
            model.gates,
            whole.longest,
            model.eps,
        )
        self._step(step, torch.get_num_threads())
        return out


def _addresses(*lists: Sequence[torch.Tensor]) -> list[ctypes.Array[ctypes.c_void_p]]:
    """Returns an array of the addresses of each list's tensors."""
    return [(_POINTER * len(each))(*map(torch.Tensor.data_ptr, each)) for each in lists]
