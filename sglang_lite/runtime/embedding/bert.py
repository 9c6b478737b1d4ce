"""Encoders of the BERT family (Devlin et al. 2018, arXiv:1810.04805), for texts concatenated without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from sglang_lite.runtime.embedding.bert_spec import BertSpec
from sglang_lite.runtime.embedding.lengths import equal_lengths, positions
from sglang_lite.runtime.embedding.linear import Weights
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    attention_norm: _Norm
    up: Linear  # includes the activation
    down: Linear
    norm: _Norm


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
        self._spec, self._device = spec, device
        weights = _BertWeights(spec, source, dtype, device)
        hidden = spec.hidden_size
        self._words = weights.matrix("embeddings.word_embeddings", spec.vocab_size, hidden)
        self._positions = weights.matrix("embeddings.position_embeddings", spec.max_positions, hidden)
        self._types = weights.matrix("embeddings.token_type_embeddings", spec.type_vocab_size, hidden)
        self._norm = weights.norm("embeddings.LayerNorm")
        self._layers = [weights.layer(f"encoder.layer.{i}.") for i in progress(range(spec.num_layers))]
        for part in ("weight", "bias"):  # used by a classifier only, which has taken it by now
            source.ignore(f"{weights.prefix}pooler.dense.{part}")
        source.check_all_used()

    def __call__(self, ids: NDArray[np.int32], types: NDArray[np.int32], lengths: list[int]) -> torch.Tensor:
        """Computes hidden states [T, hidden_size] of concatenated texts.

        Args:
            ids, types: token ids and token types of all texts, [T] each.
            lengths: number of tokens of each text; texts of equal length that are adjacent are computed as one batch.
        """
        places = positions(lengths) + self._spec.first_position
        at, kinds, where = (torch.from_numpy(a.astype(np.int64)).to(self._device) for a in (ids, types, places))
        x = self._norm(self._words[at] + self._positions[where] + self._types[kinds])
        groups = equal_lengths(lengths)
        for layer in self._layers:
            x = layer.attention_norm(layer.output(self._attention(layer.qkv(x), groups)).add_(x))
            x = layer.norm(layer.down(layer.up(x)).add_(x))
        return x

    def _attention(self, qkv: torch.Tensor, groups: list[tuple[int, int]]) -> torch.Tensor:
        """Attention outputs [T, H] from queries, keys and values [T, 3 H]; tokens attend only within their own text."""
        heads, out, at = self._spec.num_heads, [], 0
        for count, length in groups:
            rows = qkv[at : at + count * length].view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(rows[0], rows[1], rows[2])
            out.append(found.transpose(1, 2).reshape(count * length, -1))
            at += count * length
        return torch.cat(out)


class _BertWeights:
    """Reader of an encoder's tensors by the names of its checkpoint."""

    def __init__(self, spec: BertSpec, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._weights = spec, Weights(source, dtype, device)
        self.prefix = spec.prefix if source.has(f"{spec.prefix}embeddings.word_embeddings.weight") else ""

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._weights.take(f"{self.prefix}{name}.weight", (rows, columns))

    def norm(self, name: str) -> _Norm:
        """Layer norm; old checkpoints name its parts gamma and beta."""
        name, size = self.prefix + name, (self._spec.hidden_size,)
        old = self._weights.source.has(f"{name}.gamma")
        weight, bias = (f"{name}.{part}" for part in (("gamma", "beta") if old else ("weight", "bias")))
        return _Norm(self._weights.take(weight, size), self._weights.take(bias, size), self._spec.norm_eps)

    def layer(self, name: str) -> _Layer:
        hidden, inner = self._spec.hidden_size, self._spec.intermediate_size
        return _Layer(
            qkv=self._linear([f"{name}attention.self.{part}" for part in ("query", "key", "value")], hidden, hidden),
            output=self._linear([f"{name}attention.output.dense"], hidden, hidden),
            attention_norm=self.norm(f"{name}attention.output.LayerNorm"),
            up=self._linear([f"{name}intermediate.dense"], inner, hidden, gelu=self._spec.gelu),
            down=self._linear([f"{name}output.dense"], hidden, inner),
            norm=self.norm(f"{name}output.LayerNorm"),
        )

    def _linear(self, names: list[str], outputs: int, inputs: int, gelu: str | None = None) -> Linear:
        return self._weights.linear([self.prefix + name for name in names], outputs, inputs, gelu=gelu)
