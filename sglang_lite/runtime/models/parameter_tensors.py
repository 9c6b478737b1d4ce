"""Reads a model's parameters from a checkpoint. A parameter may be a whole tensor there, or a slice
of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.parameters import CheckpointSlice, ParameterSpec
from sglang_lite.runtime.models.sharding import RankPart
from sglang_lite.runtime.models.weights.source import (
    EncodedMatrix,
    EncodedStack,
    Stored,
    Weight,
    WeightSource,
)

# parameters of a layer, by role and expert
Table: TypeAlias = dict[tuple[str, int | None], ParameterSpec]


def slice_parameter(whole: torch.Tensor, piece: CheckpointSlice) -> torch.Tensor:
    """Returns a parameter's slice of `whole`. `whole` is the checkpoint's tensor, or another tensor
    with the same outputs, such as LoRA's B.
    """
    if piece.groups > 1:
        return whole.view(piece.groups, -1, *whole.shape[1:])[:, *piece.part].flatten(0, 1)
    part = whole[piece.part]
    return part.t() if piece.is_transposed else part


class ParameterTensors:
    """Reads the tensors of parameters from a source. Several parameters may be parts of one tensor.

    Args:
        source: source of the weights; each tensor is taken once.
        cut: function that returns the part of a parameter that this rank has, or None for the
            whole.
    """

    def __init__(
        self, source: WeightSource, cut: Callable[[ParameterSpec], RankPart | None] = lambda _: None
    ) -> None:
        self._source = source
        self._cut = cut
        self._stacks: dict[str, Stored] = {}  # tensors that hold several parameters, by name

    def forget_stacks(self) -> None:
        """Frees the tensors that were kept because several parameters share them. Called when all
        these parameters have been taken.
        """
        self._stacks.clear()

    def find_stored_slice(self, parameter: ParameterSpec) -> CheckpointSlice:
        """Returns the slice of the checkpoint that holds a parameter. If the checkpoint lacks the
        parameter, returns the first slice that could hold it.

        Raises:
            ModelError: the checkpoint has the parameter twice.
        """
        found = [
            p for p in parameter.slices if p.name in self._stacks or self._source.has_tensor(p.name)
        ]
        if len(found) > 1:
            raise ModelError(
                f"{self._source.label}: both {found[0].name} and {found[1].name} are there, and only one can be meant.",
                hint="The checkpoint mixes two ways to store experts; write it anew in one of them.",
            )
        return found[0] if found else parameter.slices[0]

    def take_parameter(self, parameter: ParameterSpec) -> Weight:
        """Takes the tensor of a parameter, or this rank's part of it.

        Raises:
            ModelError: the tensor is missing or has another shape, or its encoding can't be split
                at the bounds of the rank's part.
        """
        weight = self._take_whole_parameter(parameter)
        part = self._cut(parameter)
        if part is None:
            return weight
        at = slice(part.start, part.stop)
        every = slice(None)
        if isinstance(weight, torch.Tensor):
            own = weight[at] if part.axis == "outputs" else weight[:, at]
            # On a GPU a view would keep the memory of the whole, and kernels take no strides.
            return (
                own
                if own.device.type == "cpu"
                else own.clone(memory_format=torch.contiguous_format)
            )
        try:
            return weight.slice_part(at) if part.axis == "outputs" else weight.slice_part(every, at)
        except ValueError as error:
            raise ModelError(
                f"{self._source.label}: {self.find_stored_slice(parameter).name} can't be cut for a rank: {error}.",
                hint="Use another tp_size, or a checkpoint in another format.",
            ) from error

    def is_cut_for_rank(self, parameter: ParameterSpec) -> bool:
        """Returns whether this rank has a part of a parameter, whose tensor may hold others."""
        part = self._cut(parameter)
        return part is None or part.size > 0

    def has_part(self, parameter: ParameterSpec) -> bool:
        """Returns whether this rank has a part of a parameter. If not, its tensor is marked as
        used.
        """
        if self.is_cut_for_rank(parameter):
            return True
        for piece in parameter.slices:
            self._source.ignore_tensor(piece.name)
        return False

    def skip_other_ranks(self, parameters: Iterable[ParameterSpec]) -> None:
        """Marks the tensors of other ranks' parameters as used. Must be called last, since such a
        tensor may also hold parameters of this rank.
        """
        for parameter in parameters:
            self.has_part(parameter)

    def _take_whole_parameter(self, parameter: ParameterSpec) -> Weight:
        piece = self.find_stored_slice(parameter)
        if not piece.part:
            return self._source.take_tensor(piece.name, piece.shape)
        if piece.name not in self._stacks:
            taken = self._source.take_tensor_or_stack(piece.name, piece.shape)
            if isinstance(taken, EncodedMatrix) and (piece.groups > 1 or len(piece.part) > 1):
                taken = taken.decode(0, piece.shape[0])
            self._stacks[piece.name] = taken
        whole = self._stacks[piece.name]
        if isinstance(whole, EncodedMatrix):
            (outputs,) = piece.part
            assert isinstance(outputs, slice)
            return whole.slice_part(outputs)
        if isinstance(whole, EncodedStack):
            expert = piece.part[0]
            outputs = piece.part[-1]
            assert isinstance(expert, int)
            assert isinstance(outputs, slice)
            return whole.matrix(expert, outputs)
        part = slice_parameter(whole, piece)
        # kernels take no strides; experts' matrices are copied into a stack anyway
        return part.contiguous() if piece.is_transposed and len(piece.shape) == 2 else part

    def take_vector(self, parameter: ParameterSpec) -> torch.Tensor:
        vector = self.take_parameter(parameter)
        assert isinstance(vector, torch.Tensor), "only matrices are encoded"
        return vector

    def numbers(self, parameter: ParameterSpec) -> torch.Tensor:
        """Takes a vector or small matrix as float32."""
        taken = self.take_parameter(parameter)
        return (
            taken.decode(0, taken.shape[0]) if isinstance(taken, EncodedMatrix) else taken.float()
        )

    def matrices(self, parameters: Sequence[ParameterSpec]) -> list[Weight]:
        """Takes matrices that will be stacked along their outputs. Returns a list, with a single
        matrix if the checkpoint stores them already stacked.
        """
        slices = [self.find_stored_slice(p) for p in parameters]
        if any(self._cut(p) for p in parameters):
            return [self.take_parameter(p) for p in parameters]
        if (
            len({piece.name for piece in slices}) == 1
            and len(slices[0].shape) == 2
            and slices[0].groups == 1
            and not slices[0].is_transposed
        ):
            return [self._source.take_tensor(slices[0].name, slices[0].shape)]
        return [self.take_parameter(p) for p in parameters]

    def bias(
        self, parameters: Table, roles: tuple[str, ...], expert: int | None = None
    ) -> torch.Tensor | None:
        """Takes the bias of stacked matrices, with zeros for matrices without one. Returns None if
        none has a bias.
        """
        given = [parameters.get((f"{role}_bias", expert)) for role in roles]
        biases = [None if bias is None or not self.has_part(bias) else bias for bias in given]
        if not any(biases):
            return None
        sizes = [self._count_rank_outputs(parameters[role, expert]) for role in roles]
        taken = [None if each is None else self.take_vector(each).float() for each in biases]
        device = next(each.device for each in taken if each is not None)
        return torch.cat(
            [
                torch.zeros(n, device=device) if each is None else each
                for n, each in zip(sizes, taken)
            ]
        )

    def _count_rank_outputs(self, parameter: ParameterSpec) -> int:
        part = self._cut(parameter)
        return parameter.shape[0] if part is None or part.axis == "inputs" else part.size
