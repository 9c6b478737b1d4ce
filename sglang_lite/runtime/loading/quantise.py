"""Folders of quantised weights, as compressed-tensors packs them, from folders of plain ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.loading.calibrate import Scaling, calibrate, read_texts
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.loading.new_folder import copy_description, new_folder, write_tensors
from sglang_lite.runtime.models.config_fields import read_json
from sglang_lite.runtime.models.parameters import parameters
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.folder import weight_files
from sglang_lite.runtime.models.weights.quantised_formats import read_quantisation
from sglang_lite.runtime.models.weights.source import canonical

_PLAIN = ("router", "shared_expert_gate")  # roles of small matrices that decide much
_CLIPS = torch.linspace(1.0, 0.6, 17)  # shares of the largest number of a block that are tried as its scale


def quantise(
    model: str,
    out: Path,
    *,
    to: Literal["int4", "int8"] = "int4",
    group: int = 128,
    texts: Path | None = None,
    progress: Callable[[Iterable[Path]], Iterable[Path]] = iter,
) -> None:
    """Writes a model with its layers' matrices rounded to 4 or 8 bits, which vLLM, SGLang and transformers read, too.

    Each block gets the scale with the smallest squared error. Embeddings, heads, routers, norms and experts that are
    stored in one tensor stay as they are, but that norms, values and ups take up factors of what they are multiplied
    with if there are texts. Nothing is left in `out` if writing fails.

    Args:
        model: folder of safetensors, or hub id.
        out: folder to be made.
        to: bits of a number.
        group: inputs of a block, which divide those of every matrix.
        texts: JSONL file of texts, which the model reads before: errors then count by the inputs that they meet
            (`calibrate.py`). None to look at weights alone.
        progress: wraps the files of weights.

    Raises:
        ModelError: the model is no folder of plain safetensors of a known architecture, or can't be written.
        ParameterError: a group divides no matrix's inputs, `out` is there already, or the texts can't be read.
    """
    folder = resolve(model)
    if not folder.is_dir() or weight_files(folder)[0] != "safetensors":
        raise ModelError(f"{folder}: only folders of safetensors are quantised.", hint="Give the unquantised model.")
    if names := read_quantisation(folder).matrices.names:
        raise ModelError(
            f"{folder}: the weights are quantised already ({names[0]}).", hint="Give the unquantised model."
        )
    spec = read_spec(folder)
    if not isinstance(spec, ModelSpec):
        raise ModelError(f"{folder}: {spec.architecture} is run by transformers' code, so its matrices are not known.")
    matrices, bits = _matrices(spec, group), 4 if to == "int4" else 8
    with new_folder(out) as written:
        scaling = Scaling() if texts is None else _scaling(folder, spec, read_texts(texts), bits, group)
        _write(folder, written, matrices, scaling, bits, group, progress)


def _matrices(spec: ModelSpec, group: int) -> frozenset[str]:
    """Names of the matrices to be quantised. Raises ParameterError if the groups don't divide their inputs."""
    found = set()
    for parameter in parameters(spec):
        piece = parameter.slices[0]
        if parameter.layer is None or piece.inputs is None or len(piece.shape) != 2 or parameter.role in _PLAIN:
            continue
        if group < 1 or piece.shape[1] % group:
            dividing = [size for size in (32, 64, 128, 256) if piece.shape[1] % size == 0]
            raise ParameterError(
                "group", f"{group} does not divide the {piece.shape[1]} inputs of {piece.name}.",
                hint=f"These would: {', '.join(map(str, dividing)) or 'none'}.",
            )  # fmt: skip
        found.add(piece.name)
    return frozenset(found)


def _write(
    folder: Path,
    out: Path,
    matrices: frozenset[str],
    scaling: Scaling,
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
                stored = handle.get_tensor(name)
                module, known = name.removesuffix(".weight"), canonical(name)
                tensor = scaling.scaled(known, stored)
                if known in matrices:
                    packed = _packed(tensor, bits, group, stored.dtype, scaling.squares.get(known))
                    state |= {f"{module}.{part}": each for part, each in packed.items()}
                else:
                    state[name] = tensor.to(stored.dtype)
                    if tensor.ndim == 2 and module != name:
                        plain.add(module)
        write_tensors(state, out / file.name)
        files |= dict.fromkeys(state, file.name)
    copy_description(folder, out)
    for index in out.glob("*.safetensors.index.json"):
        size = sum((out / name).stat().st_size for name in set(files.values()))
        index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2))
    weights = {"type": "int", "num_bits": bits, "strategy": "group", "group_size": group, "symmetric": True}
    config = read_json(out / "config.json") | {
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": sorted(plain),
        }
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2))


def _scaling(folder: Path, spec: ModelSpec, texts: Sequence[str], bits: int, group: int) -> Scaling:
    """Changes of the tensors by which less is lost."""
    from safetensors import safe_open

    files: dict[str, tuple[Path, str]] = {}
    for file in weight_files(folder)[1]:
        with safe_open(file, framework="pt") as handle:
            files |= {canonical(name): (file, name) for name in handle.keys()}  # noqa: SIM118 # no mapping

    def read(name: str) -> torch.Tensor:
        file, stored = files[name]
        with safe_open(file, framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(stored)
            return tensor

    def lossy(matrix: torch.Tensor) -> torch.Tensor:
        numbers, scale = _rounded(matrix, bits, group, torch.float32, clips=_CLIPS[:1])
        blocks = numbers.view(len(matrix), -1, group).float() - (1 << bits - 1)
        return blocks.mul_(scale.unsqueeze(-1)).view(matrix.shape)

    return calibrate(folder, spec, texts, read, lossy)


def _packed(
    weight: torch.Tensor, bits: int, group: int, dtype: torch.dtype, squares: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Tensors of a matrix as compressed-tensors' pack-quantized has them, with scales of a dtype."""
    numbers, scale = _rounded(weight, bits, group, dtype, squares)
    words = numbers.view(len(weight), -1, 32 // bits).int()
    packed = words[:, :, 0].clone()
    for i in range(1, 32 // bits):
        packed |= words[:, :, i] << bits * i
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def _rounded(
    weight: torch.Tensor,
    bits: int,
    group: int,
    dtype: torch.dtype,
    squares: torch.Tensor | None = None,
    clips: torch.Tensor = _CLIPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers uint8 [rows, columns], of which 2**(bits - 1) stands for 0, and scales [rows, blocks] in a dtype.

    Args:
        squares: float32 [columns], by which errors of columns count; None if they count alike.
        clips: shares of a block's largest number that are tried as its scale.
    """
    half = 2 ** (bits - 1)
    blocks = weight.float().view(len(weight), -1, group)
    importance = torch.ones(()) if squares is None else squares.view(-1, group)
    largest = blocks.abs().amax(-1).clamp_min(1e-8)
    best, scale = torch.full_like(largest, torch.inf), largest
    for clip in clips:
        tried = (largest * clip / (half - 0.5)).to(dtype).float().clamp_min(torch.finfo(dtype).tiny)
        values = (blocks / tried.unsqueeze(-1)).round_().clamp_(-half, half - 1).mul_(tried.unsqueeze(-1))
        error = values.sub_(blocks).square_().mul_(importance).sum(-1)
        scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
    numbers = (blocks / scale.unsqueeze(-1)).round_().clamp_(-half, half - 1).add_(half)
    return numbers.to(torch.uint8).view(weight.shape), scale.to(dtype)
