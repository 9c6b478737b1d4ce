"""Model that reads texts: layers, pooling, and heads that turn hidden states into vectors or
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.embedding.layers import Bert, PackedDecoder, Weights, group_equal_lengths
from sglang_lite.runtime.embedding.sentence_transformers import DenseLayer
from sglang_lite.runtime.embedding.spec import BertSpec, Classifier, EncoderSpec
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.lora.cpu_step import CpuLoraStep
from sglang_lite.runtime.models.weights.source import WeightSource


class Encoder:
    """Model that turns texts into vectors, or into one number per label.

    Args:
        spec: specification of the model.
        source: source of the model's weights.
        dense: sources of the weights of the spec's dense layers, in order.
        dtype, device: dtype and device of weights and activations; dense layers are computed in
            float32.
        progress: wraps the iteration over layers while they are loaded.

    Raises:
        ModelError: a tensor is missing, has a wrong shape, or is not used by the model.
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
        self.spec = spec
        self.dtype = dtype
        self.device = device
        hidden = spec.layers.hidden_size
        # Comes before the layers, which check that no tensor is left.
        self._head = (
            None
            if spec.classifier is None
            else _make_head(Weights(source, dtype, device), spec.classifier, hidden)
        )
        self._dense = [
            _make_dense(Weights(each, torch.float32, device), layer)
            for each, layer in zip(dense, spec.dense)
        ]
        self._layers: Bert | PackedDecoder
        if isinstance(spec.layers, BertSpec):
            self._layers = Bert(spec.layers, source, dtype, device, progress)
        else:
            self._layers = PackedDecoder(spec.layers, source, dtype, device, spec.limit, progress)

    def __call__(
        self,
        ids: NDArray[np.int32],
        types: NDArray[np.int32],
        lengths: list[int],
        lora: CpuLoraStep | None = None,
    ) -> torch.Tensor:
        """Computes float32 [N, width]: vectors of texts, or one number per label.

        Args:
            ids, types: token ids and token types of all texts, [T] each.
            lengths: number of tokens in each text; adjacent texts of equal length are computed as
                one batch.
            lora: adapters of the tokens, for a decoder's layers, or None.
        """
        x = self._pool_texts(self._layers(ids, types, lengths, lora), group_equal_lengths(lengths))
        for layer in self._dense:
            x = layer(x)
        return x if self._head is None else self._head(x.to(self.dtype)).float()

    def _pool_texts(self, x: torch.Tensor, groups: list[tuple[int, int]]) -> torch.Tensor:
        """Returns the pooled vectors of texts, float32 [N, H]."""
        out = []
        at = 0
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


def _make_head(weights: Weights, classifier: Classifier, hidden: int) -> Linear:
    outer = weights.make_linear(
        [classifier.outer], len(classifier.labels), hidden, bias=classifier.bias
    )
    if not classifier.inner:
        return outer
    inner = weights.make_linear([classifier.inner], hidden, hidden)
    return lambda x: outer(torch.tanh(inner(x)))


def _make_dense(weights: Weights, layer: DenseLayer) -> Linear:
    product = weights.make_linear(["linear"], layer.outputs, layer.inputs, bias=layer.bias)
    activation: torch.nn.Module = getattr(torch.nn, layer.activation)()
    weights.source.check_all_used()
    return lambda x: activation(product(x))
