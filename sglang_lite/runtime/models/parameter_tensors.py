"""Tensors of a checkpoint by parameter, wherever it stores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.parameters import CheckpointSlice, ParameterSpec
from sglang_lite.runtime.models.weights.source import EncodedMatrix, EncodedStack, Weight, WeightSource

Table: TypeAlias = dict[tuple[str, int | None], ParameterSpec]  # parameters of a layer, by role and expert


class ParameterTensors:
    """Tensors of parameters, some of which are parts of a tensor that several parameters share.

    Args:
        source: source of the weights; each tensor is taken once.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._stacks: dict[str, torch.Tensor | EncodedStack] = {}  # tensors that hold several parameters, by name

    def forget_stacks(self) -> None:
        """Frees the tensors of which parts were taken; called when a layer has taken all of its parts."""
        self._stacks.clear()

    def slice_of(self, parameter: ParameterSpec) -> CheckpointSlice:
        """Slice in which the checkpoint stores a parameter; the first possible one if it stores none.

        Raises:
            ModelError: the checkpoint has the parameter twice.
        """
        found = [p for p in parameter.slices if p.name in self._stacks or self._source.has(p.name)]
        if len(found) > 1:
            raise ModelError(
                f"{self._source.label}: both {found[0].name} and {found[1].name} are there, and only one can be meant.",
                hint="The checkpoint mixes two ways to store experts; write it anew in one of them.",
            )
        return found[0] if found else parameter.slices[0]

    def take(self, parameter: ParameterSpec) -> Weight:
        piece = self.slice_of(parameter)
        if not piece.part:
            return self._source.take(piece.name, piece.shape)
        if piece.name not in self._stacks:
            taken = self._source.take_stack(piece.name, piece.shape)
            self._stacks[piece.name] = taken.decode(0, piece.shape[0]) if isinstance(taken, EncodedMatrix) else taken
        whole = self._stacks[piece.name]
        if isinstance(whole, EncodedStack):
            expert, outputs = piece.part[0], piece.part[-1]
            assert isinstance(expert, int)
            assert isinstance(outputs, slice)
            return whole.matrix(expert, outputs)
        if piece.groups > 1:
            return whole.view(piece.groups, -1, *whole.shape[1:])[:, *piece.part].flatten(0, 1)
        part = whole[piece.part]
        return part.t() if piece.inputs is not None and piece.outputs > piece.inputs else part

    def vector(self, parameter: ParameterSpec) -> torch.Tensor:
        vector = self.take(parameter)
        assert isinstance(vector, torch.Tensor), "only matrices are encoded"
        return vector

    def numbers(self, parameter: ParameterSpec) -> torch.Tensor:
        """Vector or small matrix as float32."""
        taken = self.take(parameter)
        return taken.decode(0, taken.shape[0]) if isinstance(taken, EncodedMatrix) else taken.float()

    def matrices(self, parameters: Sequence[ParameterSpec]) -> list[Weight]:
        """Matrices to be stacked along their outputs, as a list; a single matrix if they are stored stacked."""
        slices = [self.slice_of(p) for p in parameters]
        if len({piece.name for piece in slices}) == 1 and len(slices[0].shape) == 2 and slices[0].groups == 1:
            return [self._source.take(slices[0].name, slices[0].shape)]
        return [self.take(p) for p in parameters]

    def bias(self, parameters: Table, roles: tuple[str, ...], expert: int | None = None) -> torch.Tensor | None:
        """Bias of stacked matrices, zero for those that have none; None if none has one."""
        biases = [parameters.get((f"{role}_bias", expert)) for role in roles]
        if not any(biases):
            return None
        sizes = [parameters[role, expert].shape[0] for role in roles]
        return torch.cat([torch.zeros(n) if p is None else self.vector(p).float() for n, p in zip(sizes, biases)])
