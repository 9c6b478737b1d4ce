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
Met: TypeAlias = frozenset[int]  # indexes of the needs that are met


def unimplied(needs: Sequence[Need]) -> tuple[Need, ...]:
    """Needs that are not implied by another need."""
    kept = list(needs)
    for need in needs:
        if any(_implies(other, need) for other in kept if other != need):
            kept.remove(need)
    return tuple(kept)


def _implies(need: Need, other: Need) -> bool:
    return other[1] in (True, need[1]) and both_strings(need[0], complement(other[0])) == NOTHING


def meeting(member: Member, needs: Sequence[Need], met: Met) -> Iterator[tuple[Formula, Met]]:
    """Yields the formulas that a member's value may have, each with the needs that are met after it: the member's own
    formula, and its combinations with needs that were not met before.
    """
    left = [i for i, (names, _) in enumerate(needs) if i not in met and accepts(names, member.name)]
    for more in subsets(left):
        yield all_of(member.formula, *(needs[each][1] for each in sorted(more))), met | more


def subsets(needs: Sequence[int]) -> Iterator[Met]:
    """Yields all subsets of some needs, from the empty one to all."""
    for count in range(len(needs) + 1):
        yield from map(frozenset, combinations(needs, count))
