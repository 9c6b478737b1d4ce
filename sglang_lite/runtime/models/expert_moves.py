"""Moves experts between a model's ranks, and counts how often each expert is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_lite.protocol import CapabilityError
from sglang_lite.runtime.models.layers.experts import Experts, FeedForward
from sglang_lite.runtime.models.offload import tensors_within
from sglang_lite.runtime.models.weight_reader import Layer
from sglang_lite.runtime.parallel.placement import ExpertPlacement

if TYPE_CHECKING:
    from sglang_lite.runtime.models.layers.gpu_experts import GpuExperts  # imports Triton


def enable_expert_counting(layers: Sequence[Layer], device: torch.device) -> None:
    """Makes layers count the rows that choose each of their experts."""
    for layer in layers:
        experts = layer.feed_forward
        if not isinstance(experts, FeedForward):
            counts = torch.zeros(experts.spec.count, dtype=torch.int32, device=device)
            layer.feed_forward = replace(experts, counts=counts)


def read_expert_counts(layers: Sequence[Layer]) -> list[list[int]]:
    """Returns how many rows chose each expert of each layer, modulo 2 ** 32; [] for a layer without
    experts.

    Raises:
        CapabilityError: the model does not count these rows.
    """
    found: list[list[int]] = []
    for layer in layers:
        experts = layer.feed_forward
        if isinstance(experts, FeedForward):
            found.append([])
        elif experts.counts is None:
            hint = 'Start the engine with expert_distribution_recorder_mode="stat".'
            raise CapabilityError("which experts are chosen is not counted.", hint=hint)
        else:
            found.append(experts.counts.tolist())
    return found


class ExpertMoves:
    """Replaces a rank's experts while the model runs.

    All ranks make the same moves between the same steps.

    Args:
        layers: layers of the model, modified in place.
        placement: initial placement of the experts.
        read: reads the experts of a layer for a placement of that layer, as
            `WeightReader.layer` does.

    Attributes:
        placed: placement of each layer after all moves that have begun.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        placement: ExpertPlacement,
        read: Callable[[int, tuple[int, ...]], Experts | GpuExperts],
    ) -> None:
        self._layers = layers
        self._read = read
        self.placed = list(placement.layers)
        self._thread = ThreadPoolExecutor(1, "sglang_lite-experts")
        self._begun: tuple[int, Future[Any]] | None = None

    def move(self, layer: int | None, slots: tuple[int, ...]) -> None:
        """Installs the experts that the previous call started reading, and starts reading those of
        another layer.

        Args:
            layer: layer whose experts are read; None for none.
            slots: placement of that layer, as in `ExpertPlacement.layers`.
        """
        if self._begun is not None:
            index, experts = self._begun
            _replace_experts(self._layers[index], experts.result())
            self._begun = None
        if layer is not None:
            self.placed[layer] = slots
            self._begun = layer, self._thread.submit(self._read_in_inference_mode, layer, slots)

    def _read_in_inference_mode(self, layer: int, slots: tuple[int, ...]) -> Any:
        with torch.inference_mode():
            return self._read(layer, slots)


def _replace_experts(layer: Layer, new: Any) -> None:
    """Replaces a layer's experts. On a GPU, overwrites their memory in place, since captured graphs
    read it.
    """
    own = layer.feed_forward
    if isinstance(own, Experts):
        layer.feed_forward = replace(own, experts=new.experts, local_ids=new.local_ids)
        return
    with torch.inference_mode():
        for target, source in zip(
            _rank_specific_tensors(own), _rank_specific_tensors(new), strict=True
        ):
            target.copy_(source)


def _rank_specific_tensors(experts: Any) -> Iterator[torch.Tensor]:
    """Yields those tensors of a GPU's experts that depend on which experts the rank holds."""
    return tensors_within((experts.matrices, experts.local_ids), set())
