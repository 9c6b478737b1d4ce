"""Requirements of an object. Each one demands a member whose name is in a given language and whose
value is in a given formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.nodes import NOTHING, Node, complement
from sglang_lite.constraints.json_schema.formulas import Formula, all_of
from sglang_lite.constraints.json_schema.values import Member, intersection_of_strings

Requirement: TypeAlias = tuple[Node, Formula]
Met: TypeAlias = frozenset[int]  # indexes of the requirements that are met


def drop_implied_requirements(requirements: Sequence[Requirement]) -> tuple[Requirement, ...]:
    """Drops the requirements that are implied by another requirement."""
    remaining = list(requirements)
    for requirement in requirements:
        if any(_implies(other, requirement) for other in remaining if other != requirement):
            remaining.remove(requirement)
    return tuple(remaining)


def _implies(requirement: Requirement, other: Requirement) -> bool:
    return (
        other[1] in (True, requirement[1])
        and intersection_of_strings(requirement[0], complement(other[0])) == NOTHING
    )


def value_formulas(
    member: Member, requirements: Sequence[Requirement], met: Met
) -> Iterator[tuple[Formula, Met]]:
    """Yields formulas for a member's value, each with the requirements that are then met. A formula
    combines the member's own formula with the formulas of some unmet requirements, or of none.
    """
    unmet = [
        i
        for i, (names, _) in enumerate(requirements)
        if i not in met and accepts(names, member.name)
    ]
    for subset in subsets(unmet):
        yield (
            all_of(member.formula, *(requirements[each][1] for each in sorted(subset))),
            met | subset,
        )


def subsets(requirements: Sequence[int]) -> Iterator[Met]:
    """Yields all subsets of some requirements, from the empty set to the whole."""
    for count in range(len(requirements) + 1):
        yield from map(frozenset, combinations(requirements, count))
