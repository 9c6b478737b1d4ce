"""Reading of a model's weights: walks the table of parameters, and makes products and tables of what it finds."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.layers.linear import (
    Linear,
    RowByRow,
    has_one_path,
    make_head,
    make_linear,
    stacked,
    stacked_shape,
)
from sglang_lite.runtime.models.layers.rope import RotaryTable, halves_apart
from sglang_lite.runtime.models.parameters import Parameter, Place, layer_parameters, parameters
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import DenseSpec, LayerSpec, ModelSpec
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.source import Encoded, Weight, WeightSource

logger = logging.getLogger("sglang_lite")


@dataclass(slots=True)
class Layer:
    """Weights of a layer; None for what its spec does not have.

    Attributes:
        rope: index of its rotary table.
    """

    spec: LayerSpec
    rope: int
    input_norm: torch.Tensor | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear
    post_mlp_norm: torch.Tensor | None


class WeightReader:
    """Takes a model's tensors out of a source.

    Args:
        spec: of the model.
        source: its weights; each is taken once.
        precision: numeric formats.
        device: of the weights.
        fused: products are those of a GPU.
    """

    def __init__(
        self, spec: ModelSpec, source: WeightSource, precision: Precision, device: torch.device, *, fused: bool
    ) -> None:
        self.spec, self.source, self.precision, self.device = spec, source, precision, device
        self.fused = fused
        self._of_model = {p.role: p for p in parameters(spec) if p.layer is None}
        self._ropes = spec.ropes
        self._stacks: dict[str, torch.Tensor] = {}  # tensors that hold parameters of several experts
        self._few: Any = None
        self._one_path: dict[tuple[int, int], bool] = {}

    def rotary_tables(self, positions: int) -> list[RotaryTable]:
        """A table for each of the spec's ropes."""
        name, divisors = "rope_freqs.weight", None  # of GGUF files, for all layers
        if self.source.has(name):
            divisors = self.source.take(name, ((self._ropes[0].rotary_dim or self._head_size()) // 2,))
            assert isinstance(divisors, torch.Tensor), "only matrices are encoded"
        p = self.precision
        return [RotaryTable(r, self._head_size(), positions, p.compute, self.device, divisors) for r in self._ropes]

    def _head_size(self) -> int:
        return self.spec.layers[0].attention.key_size

    def embedding_and_head(self) -> tuple[torch.Tensor, Linear]:
        """The table of token embeddings and the product that gives logits; one tensor where both need it as it is."""
        p = self.precision
        embedding = stacked([self._take(self._of_model["embedding"])], p.weights, self.device)
        if not self.spec.tied_embeddings:
            return embedding, self._head(self._take(self._of_model["head"]))
        if self.source.has("lm_head.weight"):
            # `.bin` files repeat the table. A head that differs is meant, whatever the config says: so transformers.
            shape = (self.spec.vocab_size, self.spec.hidden_size)
            table = stacked([self.source.take("lm_head.weight", shape)], p.weights, self.device)
            return embedding, self._head(embedding if torch.equal(table, embedding) else table)
        return embedding, self._head(embedding)

    def norm(self) -> torch.Tensor:
        """Weight of the norm before the head."""
        return self._norm(self._of_model["norm"])

    def layer(self, index: int) -> Layer:
        spec = self.spec.layers[index]
        assert isinstance(spec.feed_forward, DenseSpec)
        table = {p.role: p for p in layer_parameters(self.spec, index)}
        norms = {role: self._norm(p) for role, p in table.items() if role.endswith("norm")}
        layer = Layer(
            spec=spec,
            rope=self._ropes.index(spec.attention.rope),
            input_norm=norms.get("input_norm"),
            qkv=self._linear(table, ("q", "k", "v"), halves_apart(spec.attention)),
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            output=self._linear(table, ("o",)),
            post_attention_norm=norms.get("attention_out_norm"),
            mlp_norm=norms.get("mlp_norm"),
            gate_up=self._linear(table, ("gate", "up")),
            down=self._linear(table, ("down",)),
            post_mlp_norm=norms.get("mlp_out_norm"),
        )
        self._stacks.clear()
        return layer

    # ------------------------------------------------------------------------------------------- tensors

    def _place(self, parameter: Parameter) -> Place:
        """Where the checkpoint has it: the first place, where it has none."""
        found = [p for p in parameter.places if p.name in self._stacks or self.source.has(p.name)]
        if len(found) > 1:
            raise ModelError(
                f"{self.source.label}: both {found[0].name} and {found[1].name} are there, and only one can be meant.",
                hint="The checkpoint mixes two ways to store experts; write it anew in one of them.",
            )
        return found[0] if found else parameter.places[0]

    def _take(self, parameter: Parameter) -> Weight:
        place = self._place(parameter)
        if not place.part:
            return self.source.take(place.name, place.shape)
        if place.name not in self._stacks:
            whole = self.source.take(place.name, place.shape)
            self._stacks[place.name] = whole.decode(0, place.shape[0]) if isinstance(whole, Encoded) else whole
        part = self._stacks[place.name][place.part]
        return part.t() if place.inputs is not None and place.outputs > place.inputs else part

    def _vector(self, parameter: Parameter) -> torch.Tensor:
        vector = self._take(parameter)
        assert isinstance(vector, torch.Tensor), "only matrices are encoded"
        return vector

    def _norm(self, parameter: Parameter) -> torch.Tensor:
        return self._vector(parameter).float().add(self.spec.norm_offset).to(self.device, self.precision.compute)

    def _matrices(self, parameters: Iterable[Parameter]) -> list[Weight]:
        """Matrices that are stacked along their outputs; as one where the checkpoint has them so."""
        places = [self._place(p) for p in parameters]
        if len({place.name for place in places}) == 1:
            return [self.source.take(places[0].name, places[0].shape)]
        return [self._take(p) for p in parameters]

    # ------------------------------------------------------------------------------------------ products

    def _linear(
        self, table: dict[str, Parameter], roles: tuple[str, ...], order: torch.Tensor | None = None
    ) -> Linear:
        """The product with matrices that are stacked along their outputs.

        Args:
            order: of the outputs, where it is another one than the checkpoint's.
        """
        parts = self._matrices([table[role] for role in roles])
        biases = [self._vector(table[f"{role}_bias"]) for role in roles if f"{role}_bias" in table]
        bias = torch.cat(biases) if biases else None
        if order is not None:
            parts, bias = [stacked(parts, torch.float32)[order]], None if bias is None else bias[order]
        return self._make(parts, bias)

    def _head(self, weight: Weight) -> Linear:
        p = self.precision
        if self.fused or p.int8 or p.weights == torch.float32:
            return self._make([weight], None, quantise=False)
        return self._steady(make_head([weight], one_path=p.one_path), *stacked_shape([weight]))

    def _make(self, parts: list[Weight], bias: torch.Tensor | None, *, quantise: bool = True) -> Linear:
        p = self.precision
        if self.fused:
            from sglang_lite.runtime.kernels.gemv import FewRows  # needs Triton
            from sglang_lite.runtime.models.layers.gpu_linear import Fp8Linear, GpuLinear

            self._few = self._few or FewRows(self.device)
            bias = None if bias is None else bias.to(self.device, p.weights)
            outputs, inputs = stacked_shape(parts)
            eight_bits = p.fp8 or (p.keep_fp8 and all(isinstance(part, ScaledRows) for part in parts))
            if eight_bits and quantise and not (outputs % 16 or inputs % 16):
                return Fp8Linear(parts, bias, self._few, self.device)
            return GpuLinear(stacked(parts, p.weights, self.device), bias, self._few)
        linear = make_linear(
            parts,
            None if bias is None else bias.to(p.compute),
            quantise=p.int8,
            dtype=p.weights,
            device=self.device,
            one_path=p.one_path,
        )
        return self._steady(linear, *stacked_shape(parts))

    def _steady(self, linear: Linear, outputs: int, inputs: int) -> Linear:
        """The product as it is where rows do not influence each other or may do so, else row by row. Each shape is
        tried once."""
        if not self.precision.one_path:
            return linear
        if (outputs, inputs) not in self._one_path:
            steady = has_one_path(linear, inputs, self.precision.compute)
            self._one_path[outputs, inputs] = steady
            if not steady:
                logger.warning(
                    "deterministic: on this machine a product [%d, %d] in %s depends on how many rows it has, and is "
                    "computed row by row, which is slow.", outputs, inputs, self.precision.compute,
                )  # fmt: skip
        return linear if self._one_path[outputs, inputs] else RowByRow(linear)
