"""Decides where an engine's experts are placed at the start, and lets ranks load others later."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.expert_moves import ExpertMoves, enable_expert_counting
from sglang_lite.runtime.models.spec import ExpertsSpec, ModelSpec
from sglang_lite.runtime.models.weight_reader import WeightReader
from sglang_lite.runtime.models.weights.source import WeightSource
from sglang_lite.runtime.parallel.layout import Parallel
from sglang_lite.runtime.parallel.placement import ExpertPlacement, balance_experts

# SGLang's names
_PLACES = "physical_to_logical_map"
_COUNTS = "logical_count"


def read_initial_placement(
    config: EngineConfig, spec: ModelSpec, parallel: Parallel
) -> ExpertPlacement | None:
    """Returns the placement of the experts that an engine starts with. Returns None if each expert
    is placed once and in order. In that case, their number need not be divisible by the number of
    groups.

    Raises:
        ParameterError: the experts and their copies can't be divided evenly, or
            `init_expert_location` is not a placement.
    """
    redundant = config.ep_num_redundant_experts
    given = config.init_expert_location
    if parallel.ep == 1 or not (redundant or config.enable_eplb or given != _TRIVIAL):
        return None
    fed = [layer.feed_forward for layer in spec.layers]
    counts = [each.count if isinstance(each, ExpertsSpec) else 0 for each in fed]
    for count in filter(None, counts):
        if (count + redundant) % parallel.ep or redundant > count * (parallel.ep - 1):
            fit = [str(-count % parallel.ep + i * parallel.ep) for i in range(3)]
            problem = f"{count} experts and {redundant} copies can't be shared out evenly to {parallel.ep} groups."
            raise ParameterError(
                "ep_num_redundant_experts", problem, hint=f"It can be {', '.join(fit)} …."
            )
    if given == _TRIVIAL:
        return ExpertPlacement.initial_placement(counts, redundant, parallel.ep)
    return _read_placement(given, counts, redundant, parallel.ep)


_TRIVIAL = "trivial"


def _read_placement(given: str, counts: list[int], redundant: int, ep: int) -> ExpertPlacement:
    """Returns the placement given as JSON text or as the path of a JSON file. If the JSON has a
    count of rows for each expert instead, computes a balanced placement from the counts.
    """
    try:
        found: UserValue = json.loads(
            given if given.lstrip().startswith("{") else Path(given).read_text()
        )
        places = found.get(_PLACES)
        loads = found.get(_COUNTS)
        rows = loads if places is None else places
        if [len(row) for row in rows] != [
            count and count + (0 if places is None else redundant) for count in counts
        ]:
            raise ValueError(
                f"it must have a list for each of {len(counts)} layers, of as many numbers as that has"
            )
        if not all(isinstance(number, int) and number >= 0 for row in rows for number in row):
            raise ValueError("it contains something other than non-negative integers")
        if places is None:
            rows = [balance_experts(row, len(row) + redundant, ep) if row else () for row in rows]
        elif any(set(row) != set(range(count)) for row, count in zip(rows, counts, strict=True)):
            raise ValueError("a layer lacks an expert or lists one that doesn't exist")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        hint = f'Use "trivial", or JSON, or a file of it, with {_PLACES!r} or {_COUNTS!r}.'
        raise ParameterError("init_expert_location", f"{given:.60}: {error}.", hint=hint) from error
    return ExpertPlacement(tuple(map(tuple, rows)))


def prepare_expert_balancing(
    model: Decoder,
    config: EngineConfig,
    spec: ModelSpec,
    placement: ExpertPlacement | None,
    opened: Callable[[], WeightSource],
) -> None:
    """Prepares a rank for expert balancing, as far as the settings enable it: its layers count the
    experts they choose, and the rank can load other experts later.

    Args:
        model: the rank's model.
        config: settings.
        spec: the whole model.
        placement: initial placement of the experts.
        opened: function that opens the weights.
    """
    if config.counts_experts:
        enable_expert_counting(model.layers, model.device)
    if config.enable_eplb and placement is not None:
        model.expert_moves = ExpertMoves(
            model.layers, placement, partial(_load_feed_forward, model, spec, opened)
        )


def _load_feed_forward(
    model: Decoder,
    spec: ModelSpec,
    opened: Callable[[], WeightSource],
    layer: int,
    slots: tuple[int, ...],
) -> Any:
    """Loads the feed-forward of one layer, with the experts that `slots` places on this rank. The
    other arguments are those of `prepare_expert_balancing`.
    """
    if model.device.type == "cuda":
        # for this thread, which launches the kernels that quantise weights
        torch.cuda.set_device(model.device)
    placement = ExpertPlacement(tuple(slots if i == layer else () for i in range(len(spec.layers))))
    reader = WeightReader(
        spec,
        opened(),
        model.precision,
        model.device,
        fused=model.fused,
        linears=model.linears,
        parallel=model.ranks.parallel,
        placement=placement,
    )
    return reader.layer_parts(layer)["feed_forward"]()
