"""Placement of experts on groups of ranks, with extra copies of the most frequently chosen ones
(EPLB). Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_lite.runtime.parallel.layout import Parallel

# rows after which the choice of copies repeats: 2, 3, 4, 6 and 12 copies get equal numbers of rows
TURNS = 12


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Which experts each rank group holds.

    Attributes:
        layers: for each layer of the model, the expert in each slot. All groups have the same
            number of slots, one group after another; () for a layer without experts.
    """

    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def initial_placement(cls, counts: Sequence[int], redundant: int, ep: int) -> ExpertPlacement:
        """Returns the placement used before anything has been counted: experts in order, then the
        first experts again in other groups.

        Args:
            counts: number of experts of each layer, 0 for none.
            redundant: number of extra copies in each layer.
            ep: number of groups.
        """
        return cls(
            tuple(
                balance_experts([1] * count, count + redundant, ep) if count else ()
                for count in counts
            )
        )

    def experts_of_rank(self, layer: int, parallel: Parallel) -> tuple[int, ...]:
        """Returns the experts that a rank holds, in whole or in part."""
        slots = self.layers[layer]
        each = len(slots) // parallel.ep
        group = parallel.rank * parallel.ep // parallel.tp
        return slots[group * each : (group + 1) * each]

    def local_ids(self, layer: int, count: int, parallel: Parallel) -> list[list[int]]:
        """Returns each expert's index among the experts that a rank holds: [TURNS][count]. Rows
        take turns, so that all copies of an expert get equal numbers of rows. If the copy for a
        turn is on other ranks, the index is the number of experts held here.
        """
        slots = self.layers[layer]
        each = len(slots) // parallel.ep
        group = parallel.rank * parallel.ep // parallel.tp
        copies: list[list[int]] = [[] for _ in range(count)]
        for slot, expert in enumerate(slots):
            copies[expert].append(slot - group * each)
        turns = [[own[turn % len(own)] for own in copies] for turn in range(TURNS)]
        return [[slot if 0 <= slot < each else each for slot in turn] for turn in turns]


def balance_experts(
    loads: Sequence[int], slots: int, ep: int, groups: int = 1, nodes: int = 1
) -> tuple[int, ...]:
    """Returns a placement of a layer's experts that gives the groups of ranks about the same number
    of rows.

    Each extra copy is of the expert with the most rows per copy. The copies, the heaviest first, go
    to the group with the fewest rows that has room and no copy of that expert (DeepSeek's EPLB).
    With several nodes, groups of experts that tokens choose together are first divided among nodes,
    so that a token's experts are on few of them.

    Args:
        loads: number of rows that chose each expert.
        slots: total number of copies, at least the number of experts and a multiple of `ep`.
        ep: number of groups of ranks.
        groups: number of groups of experts that tokens choose from; each group is consecutive, and
            all have the same size.
        nodes: number of machines, each with the same number of groups of ranks; 1 to ignore
            `groups`.

    Returns:
        The expert in each slot, one group of ranks after another.
    """
    if nodes > 1 and not (groups % nodes or slots % nodes or ep % nodes):
        size = len(loads) // groups
        weights = [sum(loads[group * size : (group + 1) * size]) for group in range(groups)]
        placed: list[int] = []
        for own in _pack_units(weights, range(groups), nodes):
            experts = [group * size + i for group in sorted(own) for i in range(size)]
            inside = balance_experts(
                [loads[expert] for expert in experts], slots // nodes, ep // nodes
            )
            placed += [experts[i] for i in inside]
        return tuple(placed)
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        # No expert gets more copies than there are groups unless all do. Ties go to experts with
        # fewer copies.
        copied = max(
            range(len(loads)), key=lambda i: (copies[i] < ep, loads[i] / copies[i], -copies[i], -i)
        )
        copies[copied] += 1
    every = [expert for expert, count in enumerate(copies) for _ in range(count)]
    each = [load / count for load, count in zip(loads, copies)]
    return tuple(expert for own in _pack_units(each, every, ep) for expert in sorted(own))


def rows_of_heaviest_group(loads: Sequence[int], slots: Sequence[int], ep: int) -> float:
    """Returns how many rows the busiest group of ranks gets in a placement. `loads` and `ep` are
    arguments of `balance_experts`, and `slots` is a placement, such as its result.
    """
    copies = Counter(slots)
    each = len(slots) // ep
    rows = [loads[expert] / copies[expert] for expert in slots]
    return max(sum(rows[group * each : (group + 1) * each]) for group in range(ep))


def _pack_units(weights: Sequence[float], units: Sequence[int], packs: int) -> list[list[int]]:
    """Divides units into packs of the same size and about the same weight.

    Args:
        weights: weight of each kind of unit.
        units: kind of each unit. A pack has at most one unit of a kind if possible.
        packs: number of packs, which must divide the number of units.
    """
    sums = [0.0] * packs
    found = [Counter[int]() for _ in range(packs)]
    size = len(units) // packs
    for unit in sorted(units, key=lambda unit: -weights[unit]):
        free = [i for i in range(packs) if found[i].total() < size]
        best = min(free, key=lambda i: (found[i][unit], sums[i], found[i].total(), i))
        found[best][unit] += 1
        sums[best] += weights[unit]
    return [list(each.elements()) for each in found]
