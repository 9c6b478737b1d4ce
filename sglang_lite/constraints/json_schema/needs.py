"""Needs of an object: for each need, some member has a name in a language and a value in a formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypeAlias

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.nodes import NOTHING, Node, complement
from sglang_lite.constraints.json_schema.formulas import Formula, all_of
from sglang_lite.constraints.json_schema.values import Member, both_strings

Need: TypeAlias = tuple[Node, Formula]
MetNeeds: TypeAlias = frozenset[int]  # indexes of the needs that are met


def unimplied(needs: Sequence[Need]) -> tuple[Need, ...]:
    """Needs that are not implied by another need."""
    remaining = list(needs)
    for need in needs:
        if any(_implies(other, need) for other in remaining if other != need):
            remaining.remove(need)
    return tuple(remaining)


def _implies(need: Need, other: Need) -> bool:
    return other[1] in (True, need[1]) and both_strings(need[0], complement(other[0])) == NOTHING


def meeting(member: Member, needs: Sequence[Need], met: MetNeeds) -> Iterator[tuple[Formula, MetNeeds]]:
    """Yields the formulas that a member's value may have, each with the needs that are met after it: the member's own
    formula, and its combinations with needs that were not met before.
    """
    unmet = [i for i, (names, _) in enumerate(needs) if i not in met and accepts(names, member.name)]
    for subset in subsets(unmet):
        yield all_of(member.formula, *(needs[each][1] for each in sorted(subset))), met | subset


def subsets(needs: Sequence[int]) -> Iterator[MetNeeds]:
    """Yields all subsets of some needs, from the empty one to all."""
    for count in range(len(needs) + 1):
        yield from map(frozenset, combinations(needs, count))
