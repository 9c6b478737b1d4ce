"""Encoders of BERT's family (Devlin et al. 2018, arXiv:1810.04805), over texts that lie one after another, unpadded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from sglang_lite.runtime.encoding.spec import Classifier, EncoderSpec
from sglang_lite.runtime.models.layers.linear import stacked
from sglang_lite.runtime.models.weights.source import Encoded, WeightSource

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Product
    output: Product
    attention_norm: _Norm
    up: Product  # with its activation
    down: Product
    norm: _Norm


class Encoder:
    """
    Args:
        spec: its shape.
        source: of its weights.
        dtype, device: of weights and activations.
        progress: gets the layers that are loaded and gives them back one by one.

    Raises:
        ModelError: a tensor is missing, over, or of another shape.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[Iterable[int]], Iterable[int]] = lambda layers: layers,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        weights = _Weights(source, spec, dtype, device)
        hidden = spec.hidden_size
        self._words = weights.matrix("embeddings.word_embeddings", spec.vocab_size, hidden)
        self._positions = weights.matrix("embeddings.position_embeddings", spec.max_positions, hidden)
        self._types = weights.matrix("embeddings.token_type_embeddings", spec.type_vocab_size, hidden)
        self._norm = weights.norm("embeddings.LayerNorm")
        self._layers = [weights.layer(f"encoder.layer.{i}.") for i in progress(range(spec.num_layers))]
        self._head = None if spec.classifier is None else weights.head(spec.classifier)
        if self._head is None:
            weights.leave_out("pooler.dense", hidden)
        source.finish()

    def __call__(self, ids: np.ndarray, types: np.ndarray, lengths: list[int]) -> torch.Tensor:
        """float32 [N, width]: vectors of texts, or their numbers by label.

        Args:
            ids, types: int32 [T], of all texts.
            lengths: of each text in tokens; those that are equal lie beside each other.
        """
        spec = self.spec
        positions = np.concatenate([np.arange(length) for length in lengths]) + spec.first_position
        at, kinds, places = (torch.from_numpy(a.astype(np.int64)).to(self.device) for a in (ids, types, positions))
        x = self._norm(self._words[at] + self._positions[places] + self._types[kinds])
        groups = _equal(lengths)
        for layer in self._layers:
            x = layer.attention_norm(layer.output(self._attention(layer.qkv(x), groups)).add_(x))
            x = layer.norm(layer.down(layer.up(x)).add_(x))
        if self._head is not None:
            return self._head(x[_starts(lengths, self.device)]).float()
        return self._pooled(x, groups)

    def _attention(self, qkv: torch.Tensor, groups: list[tuple[int, int]]) -> torch.Tensor:
        """[T, H] of queries, keys and values [T, 3 H]; each text looks at itself."""
        heads, out, at = self.spec.num_heads, [], 0
        for count, length in groups:
            rows = qkv[at : at + count * length].view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(rows[0], rows[1], rows[2])
            out.append(found.transpose(1, 2).reshape(count * length, -1))
            at += count * length
        return torch.cat(out)

    def _pooled(self, x: torch.Tensor, groups: list[tuple[int, int]]) -> torch.Tensor:
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


class _Weights:
    """An encoder's tensors, by the names of its checkpoint."""

    def __init__(self, source: WeightSource, spec: EncoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._spec, self._dtype, self._device = source, spec, dtype, device
        self._prefix = spec.prefix if source.has(f"{spec.prefix}embeddings.word_embeddings.weight") else ""

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = self._source.take(name, shape)
        tensor = stacked([found], torch.float32) if isinstance(found, Encoded) else found
        return tensor.to(self._device, self._dtype)

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._take(f"{self._prefix}{name}.weight", (rows, columns))

    def norm(self, name: str) -> _Norm:
        """Layer norm; old checkpoints call its parts gamma and beta."""
        name, size = self._prefix + name, (self._spec.hidden_size,)
        old = self._source.has(f"{name}.gamma")
        weight, bias = (f"{name}.{part}" for part in (("gamma", "beta") if old else ("weight", "bias")))
        return _Norm(self._take(weight, size), self._take(bias, size), self._spec.norm_eps)

    def layer(self, name: str) -> _Layer:
        hidden, inner = self._spec.hidden_size, self._spec.intermediate_size
        queries = [f"{self._prefix}{name}attention.self.{part}" for part in ("query", "key", "value")]
        return _Layer(
            qkv=self._product(queries, hidden, hidden),
            output=self._product([f"{self._prefix}{name}attention.output.dense"], hidden, hidden),
            attention_norm=self.norm(f"{name}attention.output.LayerNorm"),
            up=self._product([f"{self._prefix}{name}intermediate.dense"], inner, hidden, gelu=self._spec.gelu),
            down=self._product([f"{self._prefix}{name}output.dense"], hidden, inner),
            norm=self.norm(f"{name}output.LayerNorm"),
        )

    def head(self, classifier: Classifier) -> Product:
        hidden, labels = self._spec.hidden_size, len(classifier.labels)
        inner = self._product([classifier.inner], hidden, hidden)
        outer = self._product([classifier.outer], labels, hidden)
        return lambda x: outer(torch.tanh(inner(x)))

    def leave_out(self, name: str, size: int) -> None:
        """Takes a layer of which nothing is used, where a checkpoint has it."""
        for part, shape in (("weight", (size, size)), ("bias", (size,))):
            if self._source.has(f"{self._prefix}{name}.{part}"):
                self._source.take(f"{self._prefix}{name}.{part}", shape)

    def _product(self, names: list[str], outputs: int, inputs: int, gelu: str | None = None) -> Product:
        weight = torch.cat([self._take(f"{name}.weight", (outputs, inputs)) for name in names])
        bias = torch.cat([self._take(f"{name}.bias", (outputs,)) for name in names])
        if self._device.type == "cpu" and self._dtype == torch.float32:
            return _packed(weight, bias, gelu)
        if gelu is None:
            return lambda x: F.linear(x, weight, bias)
        return lambda x: F.gelu(F.linear(x, weight, bias), approximate=gelu)


_ROWS = 4096  # that oneDNN's layout of weights is chosen for


def _packed(weight: torch.Tensor, bias: torch.Tensor, gelu: str | None) -> Product:
    """A product through oneDNN, with weights in its own layout and the activation in it: twice as fast as torch's."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)  # noqa: SLF001 # torch has no other name for it
    after: tuple[str, list[object], str] = ("none", [], "") if gelu is None else ("gelu", [], gelu)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, *after)  # noqa: SLF001 # torch has no other name for it


def _equal(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of equal lengths: how many, and which."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return runs


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)
