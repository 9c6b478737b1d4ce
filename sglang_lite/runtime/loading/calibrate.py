"""Scaling of a model's matrices by what their inputs are, before they are rounded (AWQ, Lin et al., arXiv:2306.00978).

Rounding costs most in the columns that meet large inputs. A matrix's columns are multiplied by factors that grow with
their inputs, and what makes these inputs is divided by them: the model computes the same, and less of it is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.parameters import CheckpointSlice, layer_parameters
from sglang_lite.runtime.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec

_TOKENS = 512  # of a text
_TEXTS = 128
_ROWS = 256  # of inputs, by which factors are compared
_EXPONENTS = torch.linspace(0, 1, 21)


class Divided(NamedTuple):
    """Rows of a tensor that are divided by `factors`, after `offset` has been added to them."""

    rows: slice
    factors: torch.Tensor
    offset: float


@dataclass(slots=True)
class Scaling:
    """Changes of a checkpoint's tensors, by name.

    Attributes:
        columns: float32 [inputs], factors of a matrix's columns.
        divided: rows of tensors that are divided.
        squares: float32 [inputs], mean squares of what the matrix is multiplied with then.
    """

    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    divided: dict[str, list[Divided]] = field(default_factory=dict)
    squares: dict[str, torch.Tensor] = field(default_factory=dict)

    def scaled(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as float32 with its changes, or as it is if it has none."""
        if name in self.columns:
            tensor = tensor.float() * self.columns[name]
        for rows, factors, offset in self.divided.get(name, ()):
            tensor = tensor.float()
            by = factors if tensor.ndim == 1 else factors.unsqueeze(1)
            tensor[rows] = (tensor[rows] + offset) / by - offset
        return tensor


@dataclass(slots=True)
class _Inputs:
    """Statistics of a product's inputs.

    Attributes:
        magnitudes, squares: float64 [inputs], sums over all rows.
        rows: some of the rows.
        count: rows in all.
    """

    magnitudes: torch.Tensor
    squares: torch.Tensor
    rows: list[torch.Tensor] = field(default_factory=list)
    count: int = 0


class _Recorder:
    """A linear layer that notes its inputs, and every `stride`-th row of them."""

    def __init__(self, linear: Linear, stride: int) -> None:
        self._linear, self._stride = linear, stride
        self.seen: _Inputs | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        if self.seen is None:
            self.seen = _Inputs(wide.new_zeros(x.shape[1]), wide.new_zeros(x.shape[1]))
        self.seen.magnitudes += wide.abs().sum(0)
        self.seen.squares += wide.square().sum(0)
        self.seen.rows.append(x[-self.seen.count % self._stride :: self._stride].float())
        self.seen.count += len(x)
        return self._linear(x)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Matrices with common inputs.

    Attributes:
        product: which of a layer's products they make up: "qkv", "output", "gate_up" or "down".
        roles: their roles.
        maker: role of the norm, or the matrix, whose outputs are the inputs; None if these can't be divided.
        heads, times: the inputs are the maker's outputs, a head's as many times after each other.
    """

    product: str
    roles: tuple[str, ...]
    maker: str | None
    heads: int = 1
    times: int = 1


def read_texts(file: Path) -> list[str]:
    """Reads texts of a JSONL file: a string a line, or an object with a string "text".

    Raises:
        ParameterError: the file can't be read, is empty, or a line is something else.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            "calibrate", f"{file} can't be read: {error}", hint="Give a JSONL file of texts."
        ) from None
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line) if line.strip() else ""
        except ValueError:
            content = None
        text = content.get("text") if isinstance(content, dict) else content
        if not isinstance(text, str):
            raise ParameterError(
                "calibrate", f"{file}: line {number} is no JSON string and no object with a string \"text\".",
                hint='Write {"text": …} on each line.',
            )  # fmt: skip
        texts += [text] if text else []
    if not texts:
        raise ParameterError("calibrate", f"{file} has no text.", hint="Give some dozen texts of a few hundred words.")
    return texts[:_TEXTS]


def calibrate(
    folder: Path,
    spec: ModelSpec,
    texts: Sequence[str],
    read: Callable[[str], torch.Tensor],
    lossy: Callable[[torch.Tensor], torch.Tensor],
) -> Scaling:
    """Finds factors for a model's matrices from what its layers are given while it reads texts, on a CPU.

    Experts, and latent attention, stay as they are.

    Args:
        folder: the model.
        spec: its specification.
        texts: texts, of which the first 512 tokens are read.
        read: reads a tensor of the checkpoint by name.
        lossy: rounds a float32 matrix and returns its values.
    """
    found = Scaling()
    for i, seen in enumerate(_run(folder, texts)):
        parameters = {p.role: p.slices[0] for p in layer_parameters(spec, i)}
        for shared in _shared(spec, spec.layers[i]):
            if (inputs := seen.get(shared.product)) is not None and set(shared.roles) <= parameters.keys():
                _scale(found, shared, inputs, parameters, spec.norm_offset, read, lossy)
    return found


@torch.inference_mode()
def _run(folder: Path, texts: Sequence[str]) -> list[dict[str, _Inputs]]:
    """Inputs of each layer's products."""
    loaded = load_model(EngineConfig(device="cpu"), folder)
    model = loaded.model
    if not isinstance(model, Decoder):
        raise ModelError(f"{folder}: its layers can't be watched.", hint="Quantise it without calibrate.")
    ids = [loaded.tokenizer.encode(text)[: min(_TOKENS, loaded.context_length)] for text in texts]
    stride = -(-sum(map(len, ids)) // _ROWS)
    recorders: list[dict[str, _Recorder]] = []
    for layer in model.layers:
        own = {"qkv": _Recorder(layer.qkv, stride), "output": _Recorder(layer.output, stride)}
        layer.qkv, layer.output = own["qkv"], own["output"]
        if isinstance(fed := layer.feed_forward, FeedForward):
            own |= {"gate_up": _Recorder(fed.gate_up, stride), "down": _Recorder(fed.down, stride)}
            layer.feed_forward = replace(fed, gate_up=own["gate_up"], down=own["down"])
        recorders.append(own)
    for row in filter(None, ids):
        at = torch.arange(len(row))
        plan = AttentionPlan(at, (), (ExtendRow(0, len(row), slice(0, len(row))),))
        model.forward(torch.tensor(row), at, plan, model.allocate_cache(len(row)))
    return [{name: each.seen for name, each in own.items() if each.seen is not None} for own in recorders]


def _shared(spec: ModelSpec, layer: LayerSpec) -> Iterator[_Shared]:
    """Matrices of a layer with common inputs."""
    normed = spec.norm_weight and layer.norms != "after" and layer.parallel != "one norm"
    attention, fed = layer.attention, layer.feed_forward
    if isinstance(attention, AttentionSpec):
        yield _Shared("qkv", ("q", "k", "v"), "input_norm" if normed else None)
        linear = attention.clip is None and attention.key_size == attention.value_size
        repeated = attention.kv_heads, attention.heads // attention.kv_heads
        yield _Shared("output", ("o",), "v" if linear else None, *repeated)
    if isinstance(fed, DenseSpec):
        yield _Shared("gate_up", ("gate", "up") if fed.gated else ("up",), "mlp_norm" if normed else None)
        yield _Shared("down", ("down",), "up" if fed.gated else None)


def _scale(
    found: Scaling,
    shared: _Shared,
    inputs: _Inputs,
    parameters: dict[str, CheckpointSlice],
    offset: float,
    read: Callable[[str], torch.Tensor],
    lossy: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Adds factors of matrices with common inputs."""
    names = {parameters[role].name for role in shared.roles}
    magnitudes, squares = ((each / inputs.count).float() for each in (inputs.magnitudes, inputs.squares))
    factors = torch.ones_like(magnitudes)
    maker = None if shared.maker is None else parameters.get(shared.maker)
    if maker is not None and shared.maker is not None and maker.groups == 1:
        by_maker = magnitudes.view(shared.heads, shared.times, -1).mean(1)
        matrices, rows = [read(name).float() for name in names], torch.cat(inputs.rows)
        tried = [_spread(by_maker, exponent, shared.times) for exponent in _EXPONENTS]
        factors = min(tried, key=lambda each: sum(_loss(matrix, rows, each, lossy) for matrix in matrices))
        made = factors.view(shared.heads, shared.times, -1)[:, 0].flatten()
        for piece, added in (
            (maker, offset if maker.inputs is None else 0.0),
            (parameters.get(f"{shared.maker}_bias"), 0.0),
        ):
            if piece is not None:
                part = piece.part[0] if piece.part else slice(None)
                assert isinstance(part, slice)
                found.divided.setdefault(piece.name, []).append(Divided(part, made, added))
    for name in names:
        found.columns[name], found.squares[name] = factors, squares / factors.square()


def _spread(magnitudes: torch.Tensor, exponent: torch.Tensor, times: int) -> torch.Tensor:
    """Factors [heads * times * size] of inputs that are as large as magnitudes [heads, size]."""
    factors = magnitudes.clamp_min(magnitudes.max() * 1e-4).clamp_min(1e-20).pow(exponent)
    factors /= (factors.max() * factors.min()).sqrt()
    return factors.unsqueeze(1).expand(-1, times, -1).flatten()


def _loss(
    matrix: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor, lossy: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """Squared error of rows times a matrix that is rounded with factors."""
    scaled = matrix * factors
    return ((rows / factors) @ (lossy(scaled) - scaled).t()).square().sum().item()
