"""Layers of models that read texts, for texts concatenated without padding: encoders of the BERT
family (Devlin et al. 2018, arXiv:1810.04805), and decoders without their heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from sglang_lite.runtime.embedding.spec import BertSpec
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layers.linear import Linear, stack_weights
from sglang_lite.runtime.models.lora.cpu_step import CpuLoraStep
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.source import EncodedMatrix, WeightSource

_ROWS = 4096  # number of rows for which oneDNN's weight layout is chosen


def positions_in_texts(lengths: list[int]) -> NDArray[np.int64]:
    """Returns the position of each token in its text, int64 [T]."""
    return np.concatenate([np.arange(length) for length in lengths])


def group_equal_lengths(lengths: list[int]) -> list[tuple[int, int]]:
    """Returns runs of equal lengths as (number of texts, length) pairs."""
    return [(len(list(run)), length) for length, run in groupby(lengths)]


class Weights:
    """Reads a checkpoint's tensors in the dtype and on the device of the computation.

    Args:
        source: source of the tensors; each is taken once.
        dtype, device: dtype and device of the tensors.
        prefix: prefix of all names.
    """

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, prefix: str = ""
    ) -> None:
        self.source = source
        self._dtype = dtype
        self._device = device
        self._prefix = prefix

    def take_tensor(self, name: str, *shape: int) -> torch.Tensor:
        found = self.source.take_tensor(self._prefix + name, shape)
        tensor = (
            stack_weights([found], torch.float32) if isinstance(found, EncodedMatrix) else found
        )
        return tensor.to(self._device, self._dtype)

    def make_linear(
        self,
        names: Sequence[str],
        outputs: int,
        inputs: int,
        *,
        gelu: str | None = None,
        bias: bool = True,
    ) -> Linear:
        """Returns a linear layer over matrices [outputs, inputs] that are stacked along their
        outputs.

        Args:
            names: names of the modules that hold the matrices.
            outputs, inputs: shape of each matrix.
            gelu: torch's name of the GELU approximation of an activation that follows, or None for
                no activation.
            bias: whether the modules have biases.
        """
        weight = torch.cat([self.take_tensor(f"{name}.weight", outputs, inputs) for name in names])
        offset = (
            torch.cat([self.take_tensor(f"{name}.bias", outputs) for name in names])
            if bias
            else None
        )
        if self._device.type == "cpu" and self._dtype == torch.float32:
            return _make_packed_linear(weight, offset, gelu)
        if gelu is None:
            return lambda x: F.linear(x, weight, offset)
        return lambda x: F.gelu(F.linear(x, weight, offset), approximate=gelu)

    def make_norm(self, name: str, size: int, eps: float) -> Linear:
        """Returns a layer norm. Old checkpoints name its parts gamma and beta."""
        names = (
            ("gamma", "beta")
            if self.source.has_tensor(f"{self._prefix}{name}.gamma")
            else ("weight", "bias")
        )
        weight, bias = (self.take_tensor(f"{name}.{part}", size) for part in names)
        return lambda x: F.layer_norm(x, (size,), weight, bias, eps)


def _make_packed_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, gelu: str | None
) -> Linear:
    """Returns a linear layer that uses oneDNN with packed weights and a fused activation, which is
    twice as fast as torch's.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)  # noqa: SLF001 # torch has no other name for it
    after: tuple[str, list[object], str] = ("none", [], "") if gelu is None else ("gelu", [], gelu)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, *after)  # noqa: SLF001 # torch has no other name for it


class Bert:
    """Layers of a BERT-like encoder.

    Args:
        spec: shape of the encoder.
        source: source of the weights.
        dtype, device: dtype and device of weights and activations.
        progress: wraps the iteration over layers while they are loaded.

    Raises:
        ModelError: a tensor is missing, has a wrong shape, or is not used by the model.
    """

    def __init__(
        self,
        spec: BertSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[Iterable[int]], Iterable[int]],
    ) -> None:
        self._spec = spec
        self._device = device
        prefix = (
            spec.prefix
            if source.has_tensor(f"{spec.prefix}embeddings.word_embeddings.weight")
            else ""
        )
        weights = Weights(source, dtype, device, prefix)
        hidden = spec.hidden_size
        self._words = weights.take_tensor(
            "embeddings.word_embeddings.weight", spec.vocab_size, hidden
        )
        self._positions = weights.take_tensor(
            "embeddings.position_embeddings.weight", spec.max_positions, hidden
        )
        self._types = weights.take_tensor(
            "embeddings.token_type_embeddings.weight", spec.type_vocab_size, hidden
        )
        self._norm = weights.make_norm("embeddings.LayerNorm", hidden, spec.norm_eps)
        self._layers = [
            _BertLayer.read_layer(weights, f"encoder.layer.{i}.", spec)
            for i in progress(range(spec.num_layers))
        ]
        for part in ("weight", "bias"):  # used only by a classifier, which has already taken it
            source.ignore_tensor(f"{prefix}pooler.dense.{part}")
        source.check_all_used()

    def __call__(
        self,
        ids: NDArray[np.int32],
        types: NDArray[np.int32],
        lengths: list[int],
        lora: CpuLoraStep | None,
    ) -> torch.Tensor:
        """Computes hidden states [T, hidden_size] of concatenated texts.

        Args:
            ids, types: token ids and token types of all texts, [T] each.
            lengths: number of tokens of each text; texts of equal length that are adjacent are
                computed as one batch.
            lora: None, as these layers take no adapters.
        """
        assert lora is None, "refused with the settings"
        places = positions_in_texts(lengths) + self._spec.first_position
        at, kinds, where = (
            torch.from_numpy(a.astype(np.int64)).to(self._device) for a in (ids, types, places)
        )
        x = self._norm(self._words[at] + self._positions[where] + self._types[kinds])
        groups = group_equal_lengths(lengths)
        for layer in self._layers:
            x = layer.attention_norm(
                layer.output(self._attend_within_texts(layer.qkv(x), groups)).add_(x)
            )
            x = layer.norm(layer.down(layer.up(x)).add_(x))
        return x

    def _attend_within_texts(
        self, qkv: torch.Tensor, groups: list[tuple[int, int]]
    ) -> torch.Tensor:
        """Computes attention outputs [T, H] from queries, keys and values [T, 3 H]. Tokens attend
        only within their own text.
        """
        heads = self._spec.num_heads
        out = []
        at = 0
        for count, length in groups:
            rows = (
                qkv[at : at + count * length]
                .view(count, length, 3, heads, -1)
                .permute(2, 0, 3, 1, 4)
            )
            found = F.scaled_dot_product_attention(rows[0], rows[1], rows[2])
            out.append(found.transpose(1, 2).reshape(count * length, -1))
            at += count * length
        return torch.cat(out)


@dataclass(frozen=True, slots=True)
class _BertLayer:
    qkv: Linear
    output: Linear
    attention_norm: Linear
    up: Linear  # includes the activation
    down: Linear
    norm: Linear

    @classmethod
    def read_layer(cls, weights: Weights, name: str, spec: BertSpec) -> _BertLayer:
        hidden = spec.hidden_size
        inner = spec.intermediate_size
        eps = spec.norm_eps
        return cls(
            qkv=weights.make_linear(
                [f"{name}attention.self.{part}" for part in ("query", "key", "value")],
                hidden,
                hidden,
            ),
            output=weights.make_linear([f"{name}attention.output.dense"], hidden, hidden),
            attention_norm=weights.make_norm(f"{name}attention.output.LayerNorm", hidden, eps),
            up=weights.make_linear([f"{name}intermediate.dense"], inner, hidden, gelu=spec.gelu),
            down=weights.make_linear([f"{name}output.dense"], hidden, inner),
            norm=weights.make_norm(f"{name}output.LayerNorm", hidden, eps),
        )


class PackedDecoder:
    """Decoder without its head, used as the layers of an encoder. It reads each text once as a
    whole and keeps no keys or values between calls.

    Args:
        spec: specification of the decoder.
        source: source of the weights.
        dtype, device: dtype and device of weights and activations.
        limit: maximum number of tokens in a text.
        progress: wraps the iteration over layers while they are loaded.

    Raises:
        ModelError: a tensor is missing, has a wrong shape, or is not used by the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        limit: int,
        progress: Callable[[Iterable[int]], Iterable[int]],
    ) -> None:
        self._decoder = Decoder(
            spec, source, Precision(dtype, dtype, dtype), device, limit, progress, head=False
        )

    def __call__(
        self,
        ids: NDArray[np.int32],
        types: NDArray[np.int32],
        lengths: list[int],
        lora: CpuLoraStep | None,
    ) -> torch.Tensor:
        """Computes hidden states [T, hidden_size]. Takes the arguments of `Bert`, and optionally
        adapters of the tokens. Ignores token types.
        """
        ends = pairwise(accumulate(lengths, initial=0))
        rows = tuple(ExtendRow(start, end, slice(start, end)) for start, end in ends)
        plan = AttentionPlan(torch.arange(len(ids)), (), rows, lora=lora)
        at, where = (
            torch.from_numpy(a.astype(np.int64)) for a in (ids, positions_in_texts(lengths))
        )
        return self._decoder.forward(at, where, plan, self._make_shared_cache(len(ids)))

    def _make_shared_cache(self, tokens: int) -> KVCache:
        """Returns a cache with room for one layer, shared by all layers: each layer finishes
        reading before the next one writes.
        """
        dtype = self._decoder.precision.cache
        device = self._decoder.device
        layers = self._decoder.kv_layout.layers
        if self._decoder.spec.has_linked_layers:  # other layers read its keys later
            return KVCache.allocate(self._decoder.kv_layout, tokens, dtype, device)
        rooms = {
            planes: KVCache.allocate(KVLayout((planes,)), tokens, dtype, device)
            for planes in set(layers)
        }
        return KVCache(
            tuple(rooms[planes].k[0] for planes in layers),
            tuple(rooms[planes].v[0] for planes in layers),
        )
