"""Balances the load of experts across ranks: rank 0 counts how often each expert is chosen, and
moves experts if the load is uneven.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.expert_moves import read_expert_counts
from sglang_lite.runtime.models.spec import ExpertsSpec
from sglang_lite.runtime.parallel.placement import balance_experts, rows_of_heaviest_group

_STEPS_A_LAYER = 8  # steps between starting to read a layer's experts and using them
_Move: TypeAlias = tuple[int | None, tuple[int, ...]]  # arguments of `ExpertMoves.move`
# a layer stays as it is unless its heaviest group's rows would fall below this fraction
_GAIN = 0.95


class ExpertBalance:
    """Changes a model's expert placement, one layer at a time.

    Args:
        model: rank 0's model, which counts the chosen experts.
        config: settings.

    Attributes:
        moved: number of times that a layer's placement has changed.
    """

    def __init__(self, model: Decoder, config: EngineConfig) -> None:
        self._model = model
        self._every = config.eplb_rebalance_num_iterations
        self._parallel = model.ranks.parallel
        algorithm = config.eplb_algorithm
        self._nodes = 1 if algorithm == "deepseek" else self._parallel.nodes
        self._before = read_expert_counts(model.layers)
        self._thread = ThreadPoolExecutor(1, "sglang_lite-balance")
        self._found: Future[list[_Move]] | None = None
        self._pending: deque[_Move] = deque()
        self._steps = self.moved = 0

    def next_move(self) -> _Move | None:
        """Returns the arguments for `ExpertMoves.move` if a move is due before the next step, else
        None. Must be called before each step.
        """
        self._steps += 1
        if self._found is not None and self._found.done():
            self._pending.extend(self._found.result())
            self.moved += max(len(self._pending) - 1, 0)
            self._found = None
        elif self._found is None and not self._pending and self._steps % self._every == 0:
            assert self._model.expert_moves is not None, "it was loaded for them"
            counts = read_expert_counts(self._model.layers)
            loads = [
                [(a - b) % (1 << 32) for a, b in zip(*both)]
                for both in zip(counts, self._before, strict=True)
            ]
            self._before = counts
            self._found = self._thread.submit(
                self._find_moves, loads, list(self._model.expert_moves.placed)
            )
        if not self._pending or self._steps % min(_STEPS_A_LAYER, self._every):
            return None
        return self._pending.popleft()

    def _find_moves(self, loads: list[list[int]], placed: list[tuple[int, ...]]) -> list[_Move]:
        """Returns the layers whose expert placement is worth changing, with the new placement of
        each. If there are any, a final entry without a layer puts the last moved experts into use.
        Runs on a separate thread.

        Args:
            loads: number of rows that chose each expert of each layer.
            placed: placement of each layer.
        """
        found: list[_Move] = []
        for i, (rows, own, layer) in enumerate(
            zip(loads, placed, self._model.spec.layers, strict=True)
        ):
            spec = layer.feed_forward
            ep = self._parallel.ep
            if isinstance(spec, ExpertsSpec) and any(rows):
                new = balance_experts(rows, len(own), ep, spec.groups, self._nodes)
                if rows_of_heaviest_group(rows, new, ep) < _GAIN * rows_of_heaviest_group(
                    rows, own, ep
                ):
                    found.append((i, new))
        return [*found, (None, ())] if found else []
