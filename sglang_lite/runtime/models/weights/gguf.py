"""Weights of a GGUF file (gguf_file.py) as tensors with Hugging Face names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.parameters import ParameterSpec, parameters
from sglang_lite.runtime.models.read_gguf import FAMILIES
from sglang_lite.runtime.models.spec import AttentionSpec, LatentSpec, ModelSpec
from sglang_lite.runtime.models.weights.gguf_blocks import IN_FOUR_BITS, READERS, GgufBlocks
from sglang_lite.runtime.models.weights.gguf_file import GgufFile, GgufTensor
from sglang_lite.runtime.models.weights.source import EncodedMatrix, Weight, WeightSource

_FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies, for all layers


class GgufSource(WeightSource):
    """Source of the tensors of a GGUF file, by Hugging Face name.

    llama.cpp orders the rows of q and k of `llama` models for adjacent rotary pairs; they are moved
    back to the order of two halves that the decoder uses. If a family groups queries, keys and
    values by head in one matrix, llama.cpp stores all queries first; they are grouped again.

    Args:
        file: opened file.
        spec: specification of the file's model.

    Raises:
        ModelError: the file has a tensor that the model does not have.
    """

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self._tensors = named_tensors(file, spec)
        self._by_head: dict[str, _ByHead] = {}
        interleaved = FAMILIES[file.metadata["general.architecture"]].interleaved
        for parameter in (p for p in parameters(spec) if p.role in ("q", "k", "q_bias", "k_bias")):
            assert parameter.layer is not None
            attention = spec.layers[parameter.layer].attention
            assert isinstance(attention, AttentionSpec | LatentSpec), "it has queries and keys"
            piece = parameter.slices[0]
            heads = attention.heads if parameter.role.startswith("q") else attention.kv_heads
            if piece.groups > 1:
                self._by_head[piece.name] = _ByHead(piece.groups, 3, outer=False)
            elif interleaved:
                self._by_head[piece.name] = _ByHead(heads, 2, outer=True)
        self._conv_kernels = {p.slices[0].name for p in parameters(spec) if p.role == "conv_kernel"}
        super().__init__(str(file.path), dict.fromkeys(self._tensors, file.path))

    @property
    def has_packed_matrices(self) -> bool:
        return any(tensor.kind in IN_FOUR_BITS for tensor in self._tensors.values())

    def _read_stored(self, name: str, file: Path) -> Weight:
        tensor = self._tensors[name]
        if isinstance(tensor, LatentHeads):
            return tensor.matrix()
        by_head = self._by_head.get(name)
        order = slice(None) if by_head is None else by_head.order(tensor.shape[0])
        data = tensor.data()
        if len(tensor.shape) == 1:
            return _Rows(data, tensor).decode(0, 1)[0][order]
        if name in self._conv_kernels:  # converters leave out the axis of 1
            return _Rows(data, tensor).decode(0, tensor.shape[0]).unsqueeze(1)
        if tensor.kind not in READERS:
            return _Rows(data[order], tensor)
        return GgufBlocks(torch.from_numpy(data[order]), tensor.kind, tensor.shape[1])


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Matrix that projects latents to keys and values, stored as two stacks with one matrix per
    head.

    Attributes:
        keys: stack of shape (heads, rank, key size).
        values: stack of shape (heads, value size, rank).
    """

    keys: GgufTensor
    values: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.keys.shape[0] * (self.keys.shape[2] + self.values.shape[1]), self.values.shape[
            2
        ]

    @property
    def kind(self) -> str:
        return self.values.kind

    @property
    def size(self) -> int:
        return self.keys.size + self.values.size

    def matrix(self) -> torch.Tensor:
        """Returns the whole matrix, of shape `shape`, in float32. Each head's rows for keys precede
        those for values.
        """
        parts = []
        for head in range(self.keys.shape[0]):
            keys = self.keys.matrix_of_stack(head)
            values = self.values.matrix_of_stack(head)
            parts += [_Rows(keys.data(), keys).decode(0, keys.shape[0]).T]
            parts += [_Rows(values.data(), values).decode(0, values.shape[0])]
        return torch.cat(parts)


def named_tensors(file: GgufFile, spec: ModelSpec) -> dict[str, GgufTensor | LatentHeads]:
    """Returns the tensors of a file by the names that `parameters` gives them.

    Stacks of experts, or of one norm per head, are split into their parts.

    Raises:
        ModelError: the file has a tensor that the model does not have, or a stack of the wrong
            size.
    """
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    arch = next(
        arch
        for arch, name in MODEL_ARCH_NAMES.items()
        if name == file.metadata["general.architecture"]
    )
    table = get_tensor_name_map(arch, len(spec.layers))
    named: dict[str, GgufTensor | LatentHeads] = {}
    sizes = _stack_sizes(spec)
    left = set(file.tensors) - {_FREQUENCIES}
    for parameter in parameters(spec):
        name = parameter.slices[0].name
        found = [
            table.get_name(theirs, (".weight", ".bias"))
            for theirs in _names_for_converter(parameter)
        ]
        if not all(each in file.tensors for each in found):
            continue
        left -= set(found)
        tensors = [file.tensors[each] for each in found]
        if len(tensors) == 2:
            named[name] = _latent_heads(tensors[0], tensors[1], file)
        elif (at := _index_in_stack(parameter)) is None:
            named[name] = tensors[0]
        elif tensors[0].shape[:1] != (
            size := sizes[parameter.layer, parameter.role.partition(".")[0]],
        ):
            raise ModelError(
                f"{file.path}: {found[0]} has the shape {tensors[0].shape}, and {size} parts are needed.",
                hint="Fetch the file again.",
            )
        else:
            named[name] = tensors[0].matrix_of_stack(at)
    if left:
        raise ModelError(
            f"{file.path}: the tensor {min(left)!r} is of no supported architecture.",
            hint="Fetch the file again, or use the HF folder.",
        )
    if _FREQUENCIES in file.tensors:
        named[_FREQUENCIES] = file.tensors[_FREQUENCIES]
    return named


def _index_in_stack(parameter: ParameterSpec) -> int | None:
    """Returns the index of a parameter in the file's stack of experts or head norms, or None for
    separate parameters.
    """
    head = parameter.role.partition(".")[2]
    return int(head) if head else parameter.expert


def _stack_sizes(spec: ModelSpec) -> Counter[tuple[int | None, str]]:
    """Returns the number of parameters in each stack, by layer and role."""
    stacked = (each for each in parameters(spec) if _index_in_stack(each) is not None)
    return Counter((each.layer, each.role.partition(".")[0]) for each in stacked)


def _names_for_converter(parameter: ParameterSpec) -> list[str]:
    """Returns the names of a parameter's tensors before llama.cpp's converter renames them.

    Latent attention's keys and values have two names. A parameter in a stack has the stack's name.
    """
    name = parameter.slices[0].name
    if parameter.role == "kv_b":
        return [name.replace("kv_b_proj", part) for part in ("k_b_proj", "v_b_proj")]
    if parameter.role == "sinks":
        return [f"{name}.weight"]
    if parameter.role == "correction":
        return [name.replace("_correction_bias", "_correction.bias")]
    at = _index_in_stack(parameter)
    return [name.replace(f".experts.{at}.", ".experts.").replace(f".norms.{at}.", ".")]


def _latent_heads(keys: GgufTensor, values: GgufTensor, file: GgufFile) -> LatentHeads:
    """Combines the stacks of keys and values into a `LatentHeads`. Raises ModelError if their
    shapes don't match.
    """
    shapes = keys.shape, values.shape
    if (
        len(keys.shape) != 3
        or len(values.shape) != 3
        or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2])
    ):
        raise ModelError(
            f"{file.path}: {keys.name} and {values.name} have the shapes {shapes[0]} and {shapes[1]}.",
            hint="Fetch the file again.",
        )
    return LatentHeads(keys, values)


class _Rows(EncodedMatrix):
    """Matrix stored as bytes in any GGUF type. If it is quantised, gguf's own code decodes it."""

    def __init__(self, data: np.ndarray[Any, Any], tensor: GgufTensor) -> None:
        super().__init__(tensor.shape)
        self._data = data
        self._kind = tensor.kind

    def decode(self, start: int, end: int) -> torch.Tensor:
        data = self._data[start:end]
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if self._kind in plain:
            return torch.from_numpy(np.array(data)).view(plain[self._kind]).float()
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(data, GGMLQuantizationType[self._kind]))


@dataclass(frozen=True, slots=True)
class _ByHead:
    """Row order of a matrix in a GGUF file that arranges the parts of its heads differently from
    the model. For example, all queries may come before all keys.

    Attributes:
        heads: number of heads.
        parts: number of parts of a head that are separate in the model: two halves, or query, key
            and value.
        outer: True if the file has [heads, rows of a part, parts], False if it has [parts, heads,
            rows of a part].
    """

    heads: int
    parts: int
    outer: bool

    def order(self, rows: int) -> np.ndarray[Any, np.dtype[np.intp]] | slice:
        """Returns a permutation that brings the rows to [heads, parts, rows of a part]."""
        if rows % (self.parts * self.heads):  # a wrong shape, which the caller rejects
            return slice(None)
        if self.outer:
            return np.arange(rows).reshape(self.heads, -1, self.parts).swapaxes(1, 2).reshape(-1)
        return np.arange(rows).reshape(self.parts, self.heads, -1).swapaxes(0, 1).reshape(-1)
