"""Quantises folders of plain weights, and writes them in the packed format of compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.loading.calibrate import calibrate, read_texts
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.loading.new_folder import copy_supporting_files, new_folder, write_tensors
from sglang_lite.runtime.loading.rounding import (
    Rounded,
    RoundingGrid,
    round_to_nearest,
    round_with_feedback,
)
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.parameters import ROUTER_MATRICES, parameters
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.folder import weight_files
from sglang_lite.runtime.models.weights.quantised_formats import read_quantisation
from sglang_lite.runtime.models.weights.source import canonical_name

_Packed: TypeAlias = dict[str, torch.Tensor]  # tensors of a matrix, by the suffixes of their names
# roles of small but sensitive matrices
_PLAIN = ("router", "shared_expert_gate", *ROUTER_MATRICES)


def quantise(
    model: str,
    out: Path,
    *,
    to: Literal["int4", "int8"] = "int4",
    group: int = 128,
    texts: Path | None = None,
    progress: Callable[[Iterable[Path]], Iterable[Path]] = iter,
) -> None:
    """Writes a model with its layers' matrices rounded to 4 or 8 bits, in a form that vLLM, SGLang
    and transformers also read.

    Each block gets the scale with the smallest squared error. With texts, this is the error of the
    matrix's products with the inputs that it gets while the model reads the texts, and each
    column's rounding error is compensated in later columns (`rounding.py`). Embeddings, heads,
    routers, norms and experts that are stored in one tensor stay unchanged. Nothing is left in
    `out` if writing fails.

    Args:
        model: folder of safetensors, or hub id.
        out: folder to create.
        to: type of the rounded numbers.
        group: number of inputs in a block, which must divide every matrix's number of inputs.
        texts: JSONL file of texts that the model reads first (`calibrate.py`). None to use only the
            weights.
        progress: wraps the iterable of weight files.

    Raises:
        ModelError: the model is not a folder of plain safetensors of a known architecture, can't be
            written, or has inputs that are not finite or whose moments do not fit in memory.
        ParameterError: the group does not divide a matrix's inputs, `out` already exists, or the
            texts can't be read.
    """
    folder = resolve(model)
    if not folder.is_dir() or weight_files(folder)[0] != "safetensors":
        raise ModelError(
            f"{folder}: only folders of safetensors are quantised.",
            hint="Give the unquantised model.",
        )
    if names := read_quantisation(folder).matrices.names:
        raise ModelError(
            f"{folder}: the weights are quantised already ({names[0]}).",
            hint="Give the unquantised model.",
        )
    spec = read_spec(folder)
    if not isinstance(spec, ModelSpec):
        raise ModelError(
            f"{folder}: {spec.architecture} is run by transformers' code, so its matrices are not known."
        )
    matrices = _matrices_to_quantise(spec, group)
    bits = 4 if to == "int4" else 8
    with new_folder(out) as written:
        calibrated = (
            {}
            if texts is None
            else _round_with_calibration(folder, spec, read_texts(texts), bits, group, written)
        )
        _write_quantised(folder, written, matrices, calibrated, bits, group, progress)


def _matrices_to_quantise(spec: ModelSpec, group: int) -> frozenset[str]:
    """Returns the names of the matrices to quantise. Raises ParameterError if the groups don't
    divide their inputs.
    """
    found = set()
    for parameter in parameters(spec):
        piece = parameter.slices[0]
        if (
            parameter.layer is None
            or piece.inputs is None
            or len(piece.shape) != 2
            or parameter.role in _PLAIN
        ):
            continue
        if piece.is_transposed:
            raise ModelError(
                f"{piece.name} has inputs before outputs, and such matrices are not quantised into a folder.",
                hint='Use quantization="int8" or "int4", which rounds them while loading.',
            )
        if group < 1 or piece.shape[1] % group:
            dividing = [size for size in (32, 64, 128, 256) if piece.shape[1] % size == 0]
            raise ParameterError(
                "group",
                f"{group} does not divide the {piece.shape[1]} inputs of {piece.name}.",
                hint=f"These would: {', '.join(map(str, dividing)) or 'none'}.",
            )
        found.add(piece.name)
    return frozenset(found)


def _write_quantised(
    folder: Path,
    out: Path,
    matrices: frozenset[str],
    calibrated: dict[str, _Packed],
    bits: int,
    group: int,
    progress: Callable[[Iterable[Path]], Iterable[Path]],
) -> None:
    from safetensors import safe_open

    files: dict[str, str] = {}
    plain = set[str]()
    for file in progress(sorted(weight_files(folder)[1])):
        state: dict[str, torch.Tensor] = {}
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 # no mapping
                tensor = handle.get_tensor(name)
                module = name.removesuffix(".weight")
                known = canonical_name(name)
                if known in matrices:
                    packed = calibrated.pop(known, None) or _pack_matrix(
                        round_to_nearest(tensor, RoundingGrid(bits, group, tensor.dtype)), bits
                    )
                    state |= {f"{module}.{part}": each for part, each in packed.items()}
                else:
                    state[name] = tensor
                    if tensor.ndim == 2 and module != name:
                        plain.add(module)
        write_tensors(state, out / file.name)
        files |= dict.fromkeys(state, file.name)
    copy_supporting_files(folder, out)
    for index in out.glob("*.safetensors.index.json"):
        size = sum((out / name).stat().st_size for name in set(files.values()))
        index.write_text(
            json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2)
        )
    weights = {
        "type": "int",
        "num_bits": bits,
        "strategy": "group",
        "group_size": group,
        "symmetric": True,
    }
    config = read_json(out / "config.json") | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": sorted(plain),
        }
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))


def _round_with_calibration(
    folder: Path, spec: ModelSpec, texts: Sequence[str], bits: int, group: int, scratch: Path
) -> dict[str, _Packed]:
    """Rounds matrices so that their outputs on the texts change little, and returns the rounded
    matrices by name. Rounds only the matrices whose inputs the calibration records.
    """
    from safetensors import safe_open

    files: dict[str, tuple[Path, str]] = {}
    for file in weight_files(folder)[1]:
        with safe_open(file, framework="pt") as handle:
            files |= {canonical_name(name): (file, name) for name in handle.keys()}  # noqa: SIM118 # no mapping

    def read(name: str) -> torch.Tensor:
        file, stored = files[name]
        with safe_open(file, framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(stored)
            return tensor

    found: dict[str, _Packed] = {}

    def round_and_store(names: Sequence[str], moments: torch.Tensor) -> None:
        matrices = list(map(read, names))
        rounded = round_with_feedback(
            torch.cat(matrices), moments, RoundingGrid(bits, group, matrices[0].dtype)
        )
        sizes = list(map(len, matrices))
        for name, numbers, scale in zip(
            names, rounded.numbers.split_with_sizes(sizes), rounded.scale.split_with_sizes(sizes)
        ):
            found[name] = _pack_matrix(Rounded(numbers, scale), bits)

    calibrate(folder, spec, texts, round_and_store, scratch)
    return found


def _pack_matrix(matrix: Rounded, bits: int) -> _Packed:
    """Packs a matrix into the tensors of compressed-tensors' pack-quantized format."""
    words = (matrix.numbers.int() + (1 << bits - 1)).view(len(matrix.numbers), -1, 32 // bits)
    packed = words[:, :, 0].clone()
    for i in range(1, 32 // bits):
        packed |= words[:, :, i] << bits * i
    return {
        "weight_packed": packed,
        "weight_scale": matrix.scale,
        "weight_shape": torch.tensor(matrix.numbers.shape),
    }
