"""A model that reads texts: layers, and what makes numbers of their hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.embedding.bert import Bert
from sglang_lite.runtime.embedding.bert_spec import BertSpec
from sglang_lite.runtime.embedding.lengths import equal_lengths
from sglang_lite.runtime.embedding.packed_decoder import PackedDecoder
from sglang_lite.runtime.embedding.products import Product, Weights
from sglang_lite.runtime.embedding.sentence_transformers import DenseLayer
from sglang_lite.runtime.embedding.spec import Classifier, EncoderSpec
from sglang_lite.runtime.models.weights.source import WeightSource


class Layers(Protocol):
    """Layers of a model, over texts that lie one after another."""

    def __call__(self, ids: NDArray[np.int32], types: NDArray[np.int32], lengths: list[int]) -> torch.Tensor: ...


class Encoder:
    """
    Args:
        spec: its shape.
        source: of its weights.
        dense: of those of each of the spec's dense layers.
        dtype, device: of weights and activations; dense layers are computed in float32.
        progress: gets the layers that are loaded and gives them back one by one.

    Raises:
        ModelError: a tensor is missing, over, or of another shape.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        source: WeightSource,
        dense: Sequence[WeightSource],
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[Iterable[int]], Iterable[int]] = lambda layers: layers,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        hidden = spec.layers.hidden_size
        # Before the layers, which leave no tensor over.
        self._head = None if spec.classifier is None else _head(Weights(source, dtype, device), spec.classifier, hidden)
        self._dense = [_dense(Weights(each, torch.float32, device), layer) for each, layer in zip(dense, spec.dense)]
        self._layers: Layers
        if isinstance(spec.layers, BertSpec):
            self._layers = Bert(spec.layers, source, dtype, device, progress)
        else:
            self._layers = PackedDecoder(spec.layers, source, dtype, device, spec.limit, progress)

    def __call__(self, ids: NDArray[np.int32], types: NDArray[np.int32], lengths: list[int]) -> torch.Tensor:
        """float32 [N, width]: vectors of texts, or their numbers by label.

        Args:
            ids, types: [T], of all texts.
            lengths: of each text in tokens; those that are equal lie beside each other.
        """
        x = self._pooled(self._layers(ids, types, lengths), equal_lengths(lengths))
        for layer in self._dense:
            x = layer(x)
        return x if self._head is None else self._head(x.to(self.dtype)).float()

    def _pooled(self, x: torch.Tensor, groups: list[tuple[int, int]]) -> torch.Tensor:
        """float32 [N, H]."""
        out, at = [], 0
        for count, length in groups:
            rows = x[at : at + count * length].view(count, length, -1)
            match self.spec.pooling:
                case "mean":
                    out.append(rows.mean(1, dtype=torch.float32))
                case "cls":
                    out.append(rows[:, 0].float())
                case "last":
                    out.append(rows[:, -1].float())
            at += count * length
        return torch.cat(out)


def _head(weights: Weights, classifier: Classifier, hidden: int) -> Product:
    outer = weights.product([classifier.outer], len(classifier.labels), hidden, bias=classifier.bias)
    if not classifier.inner:
        return outer
    inner = weights.product([classifier.inner], hidden, hidden)
    return lambda x: outer(torch.tanh(inner(x)))


def _dense(weights: Weights, layer: DenseLayer) -> Product:
    product = weights.product(["linear"], layer.outputs, layer.inputs, bias=layer.bias)
    activation: torch.nn.Module = getattr(torch.nn, layer.activation)()
    weights.source.finish()
    return lambda x: activation(product(x))
