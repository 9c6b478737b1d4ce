"""Looks into a decoder's layers: a range of each for profilers, and files of the hidden states behind it."""

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
    """Watch over the layers of one process, or none. Steps that it sees can't be captured in CUDA graphs.

    Args:
        layers: numbers of the process's layers.
        marks: device of the layers, if each is to be a range of profiles.
        chosen: numbers of the layers that are written; None for all.

    Attributes:
        folder: folder of this process's files; None until it is set, after which each forward makes a `Pass00000.pt`,
            which `torch.load` reads: ids and positions of its tokens [T], and the hidden states [T, hidden_size] behind
            each layer and behind the last norm; of stages on GPUs, instead of the latter again those behind the stage.
    """

    folder: Path | None = None

    def __init__(
        self,
        layers: range = range(0),
        marks: torch.device | None = None,
        chosen: Collection[int] | None = None,
    ) -> None:
        self._layers, self._marks = layers, marks
        self._chosen = layers if chosen is None else chosen
        self._passes, self._outputs = 0, dict[str, torch.Tensor]()

    @property
    def looks(self) -> bool:
        """True if layers are looked at one by one."""
        return self._marks is not None or self.folder is not None

    def over(self, layers: Iterable[_Layer]) -> Iterable[_Layer]:
        """The layers, each inside its range."""
        return layers if self._marks is None else self._marked(layers, self._marks)

    def _marked(self, layers: Iterable[_Layer], device: torch.device) -> Iterator[_Layer]:
        for number, layer in zip(self._layers, layers):
            with marked(f"layer {number}", device):
                yield layer

    def behind(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states behind a layer, once they are kept: one of the process's, or -1 for none."""
        if self.folder is not None and index >= 0 and (number := self._layers[index]) in self._chosen:
            self._outputs[f"model.layers.{number}"] = hidden.to("cpu", copy=True)
        return hidden

    def passed(self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what a forward of ids at positions gives, once its file is there."""
        if self.folder is not None:
            inputs = {"input_ids": ids, "positions": positions}
            named = {f"model.forward_batch_info.{name}": each.cpu() for name, each in inputs.items()}
            torch.save(named | self._outputs | {"model.norm": hidden.cpu()}, self.folder / f"Pass{self._passes:05}.pt")
            self._passes, self._outputs = self._passes + 1, {}
        return hidden


def folder_of_process(folder: str, parallel: Parallel) -> Path:
    """Makes this process's folder of files, named as SGLang names it.

    Raises:
        ParameterError: it can't be made.
    """
    made = Path(folder) / f"TP{parallel.rank % parallel.tp}_PP{parallel.stage}_Rank{parallel.rank}_pid{os.getpid()}"
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{folder!r} can't be written: {error.strerror}."
        raise ParameterError("debug_tensor_dump_output_folder", problem) from error
    return made


@contextmanager
def marked(name: str, device: torch.device) -> Iterator[None]:
    """Context that is a range of torch's profiles, and on a GPU of NVTX's."""
    with torch.profiler.record_function(name):
        if device.type != "cuda":
            yield
            return
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call] # untyped in torch
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call] # untyped in torch
