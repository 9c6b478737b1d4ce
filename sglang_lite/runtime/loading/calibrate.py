"""Second moments of what a model's matrices are multiplied with while it reads texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import TypeAlias

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.memory_check import check_room
from sglang_lite.runtime.models.parameters import layer_parameters
from sglang_lite.runtime.models.spec import DenseSpec, ModelSpec
from sglang_lite.runtime.models.weight_reader import first_roles

_TOKENS = 512  # of a text
_TEXTS = 128
_ROWS = 4096  # of inputs that are widened at once

Take: TypeAlias = Callable[[Sequence[str], torch.Tensor], None]


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


@torch.inference_mode()
def calibrate(folder: Path, spec: ModelSpec, texts: Sequence[str], take: Take) -> None:
    """Runs a model over texts on a CPU in float32, all in one step: the moments of one product at a time are in memory.

    Experts, and the inner matrices of latent attention, are not looked at.

    Args:
        folder: the model.
        spec: its specification.
        texts: texts, of which the first 512 tokens are read.
        take: gets the names of the matrices that a product stacks, and float32 [inputs, inputs], the sum of x x^T over
            its inputs x. Product by product, in the model's order.

    Raises:
        ModelError: the model's layers can't be watched, or inputs are not finite.
    """
    loaded = load_model(EngineConfig(device="cpu", dtype="float32"), folder)
    model = loaded.model
    if not isinstance(model, Decoder):
        raise ModelError(f"{folder}: its layers can't be watched.", hint="Quantise it without calibrate.")
    model.forget_small_batches()
    for i, (layer, layer_spec) in enumerate(zip(model.layers, spec.layers)):
        names = {parameter.role: parameter.slices[0].name for parameter in layer_parameters(spec, i)}

        def watched(linear: Linear, roles: Sequence[str], names: dict[str, str] = names) -> Linear:
            return _Watched(linear, list(dict.fromkeys(names[role] for role in roles)), take)

        layer.qkv = watched(layer.qkv, first_roles(layer_spec.attention))
        layer.output = watched(layer.output, ("o",))
        if isinstance(fed := layer.feed_forward, FeedForward) and isinstance(fed.spec, DenseSpec):
            gate_up = watched(fed.gate_up, ("gate", "up") if fed.spec.gated else ("up",))
            layer.feed_forward = replace(fed, gate_up=gate_up, down=watched(fed.down, ("down",)))
    rows = [loaded.tokenizer.encode(text)[: min(_TOKENS, loaded.context_length)] for text in texts]
    ends = list(accumulate(map(len, rows)))
    starts = [end - len(row) for end, row in zip(ends, rows)]
    extends = tuple(ExtendRow(start, end, slice(start, end)) for start, end in zip(starts, ends) if start < end)
    plan = AttentionPlan(torch.arange(ends[-1]), (), extends)
    ids, positions = torch.tensor(list(chain(*rows))), torch.cat([torch.arange(len(row)) for row in rows])
    model.forward(ids, positions, plan, model.allocate_cache(len(ids)))


class _Watched:
    """A linear layer whose inputs' moments are given away.

    Args:
        linear: the layer.
        names: names of the matrices that it stacks.
        take: gets names and moments.
    """

    def __init__(self, linear: Linear, names: Sequence[str], take: Take) -> None:
        self._linear, self._names, self._take = linear, names, take

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size, module = x.shape[1], self._names[0].removesuffix(".weight")
        # Three more of their size while they are inverted.
        needed = {f"moments of {size:,} inputs": 4 * size**2 * torch.float32.itemsize}
        check_room(needed, x.device, module, "Quantise it without calibrate, or on a machine with more memory.")
        moments = torch.zeros((size, size))
        for start in range(0, len(x), _ROWS):
            rows = x[start : start + _ROWS].float()
            moments.addmm_(rows.t(), rows)
        if not moments.isfinite().all():
            raise ModelError(
                f"{module}: its inputs are not finite on these texts.", hint="Quantise it without calibrate."
            )
        self._take(self._names, moments)
        return self._linear(x)
