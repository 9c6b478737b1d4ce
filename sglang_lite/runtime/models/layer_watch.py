"""Observes a decoder's layers: marks each for profilers, and dumps its hidden states to files."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.parallel.layout import Parallel

_Layer = TypeVar("_Layer")


class LayerWatch:
    """Observes the layers of one process, if profiles or dumps were requested. Observed steps can't
    be captured in CUDA graphs.

    Args:
        layers: numbers of the process's layers.
        marks: device of the layers, if profiles should show each as a range.
        chosen: numbers of the layers whose hidden states are dumped; None for all.

    Attributes:
        folder: folder of this process's dumps. Once it is set, each forward writes a
            `Pass00000.pt`, readable with `torch.load`: ids and positions of its tokens [T], and the
            hidden states [T, hidden_size] after each layer and after the last norm. On a GPU, each
            of several stages writes its output instead of the states after the last norm.
    """

    folder: Path | None = None

    def __init__(
        self,
        layers: range = range(0),
        marks: torch.device | None = None,
        chosen: Collection[int] | None = None,
    ) -> None:
        self._layers = layers
        self._marks = marks
        self._chosen = layers if chosen is None else chosen
        self._passes = 0
        self._outputs = dict[str, torch.Tensor]()

    @property
    def observes_layers(self) -> bool:
        """True if layers are observed one by one."""
        return self._marks is not None or self.folder is not None

    def mark_layers(self, layers: Iterable[_Layer]) -> Iterable[_Layer]:
        """Iterates over the layers, marking each as a range if profiles should show it."""
        return layers if self._marks is None else self._mark_each(layers, self._marks)

    def _mark_each(self, layers: Iterable[_Layer], device: torch.device) -> Iterator[_Layer]:
        for number, layer in zip(self._layers, layers):
            with profiler_range(f"layer {number}", device):
                yield layer

    def record_layer(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Records the hidden states after a layer and returns them. `index` is -1 before the first
        layer.
        """
        if (
            self.folder is not None
            and index >= 0
            and (number := self._layers[index]) in self._chosen
        ):
            self._outputs[f"model.layers.{number}"] = hidden.to("cpu", copy=True)
        return hidden

    def record_pass(
        self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Writes the dump of a forward, if dumps are on, and returns its hidden states."""
        if self.folder is not None:
            inputs = {"input_ids": ids, "positions": positions}
            named = {
                f"model.forward_batch_info.{name}": each.cpu() for name, each in inputs.items()
            }
            torch.save(
                named | self._outputs | {"model.norm": hidden.cpu()},
                self.folder / f"Pass{self._passes:05}.pt",
            )
            self._passes = self._passes + 1
            self._outputs = {}
        return hidden


def create_dump_folder(folder: str, parallel: Parallel) -> Path:
    """Creates this process's dump folder, named the way SGLang names it.

    Raises:
        ParameterError: it can't be created.
    """
    made = (
        Path(folder)
        / f"TP{parallel.rank % parallel.tp}_PP{parallel.stage}_Rank{parallel.rank}_pid{os.getpid()}"
    )
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{folder!r} can't be written: {error.strerror}."
        raise ParameterError("debug_tensor_dump_output_folder", problem) from error
    return made


@contextmanager
def profiler_range(name: str, device: torch.device) -> Iterator[None]:
    """Marks its body as a range in torch's profiles and, on a GPU, in NVTX."""
    with torch.profiler.record_function(name):
        if device.type != "cuda":
            yield
            return
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call] # untyped in torch
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call] # untyped in torch
