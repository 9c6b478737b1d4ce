"""Calibration for quantisation: computes second moments of the inputs to a model's matrices while
the model reads texts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import IO, TypeAlias

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.memory_check import check_free_memory
from sglang_lite.runtime.models.parameters import (
    input_projection_roles,
    layer_parameters,
    output_projection_role,
)
from sglang_lite.runtime.models.spec import DenseSpec, ModelSpec
from sglang_lite.runtime.models.weight_reader import Layer

_TOKENS = 512  # most tokens of a text
_TEXTS = 128
_ROWS = 4096  # tokens that are run together

Take: TypeAlias = Callable[[Sequence[str], torch.Tensor], None]


def read_texts(file: Path) -> list[str]:
    """Reads texts from a JSONL file. Each line is a string, or an object with a string "text".

    Raises:
        ParameterError: the file can't be read or is empty, or a line is something else.
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
                "calibrate",
                f'{file}: line {number} is no JSON string and no object with a string "text".',
                hint='Write {"text": …} on each line.',
            )
        texts += [text] if text else []
    if not texts:
        raise ParameterError(
            "calibrate",
            f"{file} has no text.",
            hint="Give some dozen texts of a few hundred words.",
        )
    return texts[:_TEXTS]


@torch.inference_mode()
def calibrate(
    folder: Path, spec: ModelSpec, texts: Sequence[str], take: Take, scratch: Path
) -> None:
    """Runs a model over texts and reports the second moments of the inputs to its matrices.

    The model runs on a CPU in float32, layer by layer, and each layer batch by batch. Memory holds
    only the moments of one layer and one batch of texts: the outputs of a layer are kept in a file.
    Experts and the inner matrices of latent attention are not calibrated.

    Args:
        folder: the model.
        spec: its specification.
        texts: texts; only the first 512 tokens of each are read.
        take: receives the names of the matrices that a linear layer stacks, and float32 [inputs,
            inputs], the sum of x x^T over its inputs x. Called for one linear layer at a time, in
            the model's order.
        scratch: folder for the temporary file of a layer's outputs, which takes 4 bytes per number.

    Raises:
        ModelError: the model's layers can't be watched, or inputs are not finite.
    """
    loaded = load_model(EngineConfig(device="cpu", dtype="float32"), folder)
    model = loaded.model
    if not isinstance(model, Decoder):
        raise ModelError(
            f"{folder}: its layers can't be watched.", hint="Quantise it without calibrate."
        )
    if spec.has_linked_layers:
        raise ModelError(
            f"{folder}: its layers read other layers' keys or inputs of their own, so they can't be watched "
            "one by one.",
            hint="Quantise it without calibrate.",
        )
    if spec.has_running_maxima:
        raise ModelError(
            f"{folder}: calibration was not tested with its kind of layers (RWKV or xLSTM).",
            hint="Quantise it without calibrate.",
        )
    model.release_small_batch_step()
    batches = _make_batches(
        [loaded.tokenizer.encode(text)[: min(_TOKENS, loaded.context_length)] for text in texts]
    )
    if not batches:
        raise ParameterError(
            "calibrate", "the texts have no tokens.", hint="Give some dozen texts."
        )
    cache = model.allocate_cache(max(len(batch.ids) for batch in batches))
    with tempfile.TemporaryFile(dir=scratch) as file:
        states = _States(file, spec.hidden_size)
        for batch in batches:
            states.write_batch(batch, model.embed(batch.ids, batch.positions))
        for i in range(len(spec.layers)):
            watched = _wrap_watched_linears(model.layers[i], spec, i)
            for batch in batches:
                states.write_batch(
                    batch,
                    model.run_layer(
                        i, states.read_batch(batch), batch.positions, batch.plan, cache
                    ),
                )
            for linear in watched:
                linear.emit_moments(take)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Texts that are run together.

    Attributes:
        ids, positions: int64 [T].
        plan: plan of their attention.
        start: index of their first token among those of all texts.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    plan: AttentionPlan
    start: int


class _States:
    """Hidden states of all texts, kept in a file.

    Args:
        file: where they are written.
        size: numbers in a row.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._size = size

    def write_batch(self, batch: _Batch, rows: torch.Tensor) -> None:
        """Writes the hidden states [T, size] of a batch. Raises OSError if the disk has no room for
        them.
        """
        self._file.seek(batch.start * self._size * 4)
        self._file.write(rows.float().contiguous().numpy().data)

    def read_batch(self, batch: _Batch) -> torch.Tensor:
        """Returns the hidden states of a batch, float32 [T, size]."""
        self._file.seek(batch.start * self._size * 4)
        content = bytearray(self._file.read(len(batch.ids) * self._size * 4))
        return torch.frombuffer(content, dtype=torch.float32).view(-1, self._size)


def _make_batches(texts: Sequence[Sequence[int]]) -> list[_Batch]:
    """Groups texts, given as tokens, into batches of at most `_ROWS` tokens."""
    groups: list[list[Sequence[int]]] = []
    for text in filter(None, texts):
        if not groups or sum(map(len, groups[-1])) + len(text) > _ROWS:
            groups.append([])
        groups[-1].append(text)
    batches = list[_Batch]()
    start = 0
    for group in groups:
        ends = list(accumulate(map(len, group)))
        starts = [end - len(text) for end, text in zip(ends, group)]
        extends = tuple(
            ExtendRow(first, last, slice(first, last)) for first, last in zip(starts, ends)
        )
        ids = torch.tensor(list(chain(*group)))
        positions = torch.cat([torch.arange(len(text)) for text in group])
        plan = AttentionPlan(torch.arange(len(ids)), (), extends)
        batches.append(_Batch(ids, positions, plan, start))
        start += len(ids)
    return batches


def _wrap_watched_linears(layer: Layer, spec: ModelSpec, index: int) -> list[_Watched]:
    """Wraps a layer's linear layers so that their inputs are recorded, and returns the wrappers in
    order.
    """
    layer_spec = spec.layers[index]
    names = {
        parameter.role: parameter.slices[0].name for parameter in layer_parameters(spec, index)
    }

    def wrap_watched(linear: Linear, roles: Sequence[str]) -> _Watched:
        return _Watched(linear, list(dict.fromkeys(names[role] for role in roles)))

    found = []
    if layer_spec.mixes:
        layer.qkv = qkv = wrap_watched(layer.qkv, input_projection_roles(layer_spec.attention))
        layer.output = output = wrap_watched(
            layer.output, (output_projection_role(layer_spec.attention),)
        )
        found += [qkv, output]
    if (beside := layer_spec.beside) is not None:
        layer.beside_first = first = wrap_watched(
            layer.beside_first, input_projection_roles(beside)
        )
        layer.beside_output = last = wrap_watched(
            layer.beside_output, (output_projection_role(beside),)
        )
        found += [first, last]
    fed = layer.feed_forward
    if layer_spec.feeds and isinstance(fed, FeedForward) and isinstance(fed.spec, DenseSpec):
        gate_up = wrap_watched(fed.gate_up, ("gate", "up") if fed.spec.gated else ("up",))
        down = wrap_watched(fed.down, ("down",))
        layer.feed_forward = replace(fed, gate_up=gate_up, down=down)
        found += [gate_up, down]
    return found


class _Watched:
    """Linear layer that accumulates the moments of its inputs.

    Args:
        linear: the layer.
        names: names of the matrices that it stacks.
    """

    def __init__(self, linear: Linear, names: Sequence[str]) -> None:
        self._linear = linear
        self._names = names
        # float32 [inputs, inputs]; None before the first input
        self._moments: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._moments is None:
            self._moments = self._allocate_moments(x.shape[1], x.device)
        rows = x.float()
        self._moments.addmm_(rows.t(), rows)
        return self._linear(x)

    def emit_moments(self, take: Take) -> None:
        """Calls `take` with the names and the moments, and then drops the moments.

        Raises:
            ModelError: inputs are not finite.
        """
        moments = self._moments
        self._moments = None
        assert moments is not None, "each product of a layer has been computed"
        if not moments.isfinite().all():
            raise ModelError(
                f"{self._module}: its inputs are not finite on these texts.",
                hint="Quantise it without calibrate.",
            )
        take(self._names, moments)

    @property
    def _module(self) -> str:
        return self._names[0].removesuffix(".weight")

    def _allocate_moments(self, size: int, device: torch.device) -> torch.Tensor:
        # Inverting the moments takes three more tensors of this size.
        needed = {f"moments of {size:,} inputs": 4 * size**2 * torch.float32.itemsize}
        check_free_memory(
            needed,
            device,
            self._module,
            "Quantise it without calibrate, or on a machine with more memory.",
        )
        return torch.zeros((size, size))
