"""The texts of objects: members that are named in the schema in its order, then others in any.

A rule stands for a place between members: which named ones are to come, how many there have been, and which of the
needs (`Objects.needs`) have been met.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from sglang_lite.constraints.nodes import NOTHING, Node, Ref, alternation, concat, literal, repeat
from sglang_lite.constraints.normal.strings import quoted
from sglang_lite.constraints.normal.values import Formula, Objects, all_of, both_strings

if TYPE_CHECKING:
    from sglang_lite.constraints.normal.writer import Writer

_Met = frozenset[int]


def object_text(writer: Writer, shape: Objects) -> Node:
    """The texts of the objects of a shape."""
    if shape.too_few() or any(member.required and member.formula is False for member in shape.members):
        return NOTHING
    return _ObjectWriter(writer, shape).place(0, 0, frozenset())


class _ObjectWriter:
    def __init__(self, writer: Writer, shape: Objects) -> None:
        self._writer, self._shape, self._number = writer, shape, writer.number(shape)
        self._members = [member for member in shape.members if member.formula is not False]
        self._others = [
            (names, formula)
            for all_names, formula in shape.others
            if (names := both_strings(all_names, shape.free_names)) != NOTHING
        ]
        required = sum(member.required for member in self._members)
        self._least = shape.least if shape.least > required else 0
        self._most = shape.most if self._others or (shape.most or 0) < len(self._members) else None
        # Without a number to keep, all that counts is whether there is a member yet: it decides about the comma.
        self._counted = self._least > 1 or self._most is not None

    def place(self, index: int, count: int, met: _Met) -> Ref:
        """Where the named members from `index` on may come."""
        key = self._number, index, count, met
        return self._writer.rule(key, lambda: self._body(index, count, met))

    def _after(self, count: int) -> int:
        return count + 1 if self._counted else 1

    def _body(self, index: int, count: int, met: _Met) -> Node:
        if index == len(self._members):
            return self._rest(count, met) if not self._shape.needs else self._rest_with_needs(count, met)
        member = self._members[index]
        options: list[Node] = []
        if self._most is None or count < self._most:
            name = self._name(literal(member.name), count)
            options += [
                concat(name, self._writer.value(formula), self.place(index + 1, self._after(count), now_met))
                for formula, now_met in self._meeting(literal(member.name), member.formula, met)
            ]
        if not member.required:
            options.append(self.place(index + 1, count, met))
        return alternation(options)

    def _name(self, names: Node, count: int) -> Node:
        """The text of a name, with what stands before and after it."""
        return quoted(names, self._writer.comma if count else "{", self._writer.colon)

    def _end(self, count: int) -> Node:
        return literal("}" if count else "{}")

    def _rest(self, count: int, met: _Met) -> Node:
        """The members that are not named, and the end."""
        least = max(0, self._least - count)
        most = None if self._most is None else self._most - count
        options = [self._end(count)] if least == 0 else []
        if self._others and (most is None or most > 0):
            more = self._other_members(1)
            fewer, less = max(0, least - 1), None if most is None else most - 1
            options.append(concat(self._other_members(count), repeat(more, fewer, less), self._end(1)))
        return alternation(options)

    def _other_members(self, count: int) -> Node:
        return alternation(
            concat(self._name(names, count), self._writer.value(formula)) for names, formula in self._others
        )

    def _rest_with_needs(self, count: int, met: _Met) -> Node:
        options = []
        if count >= self._least and len(met) == len(self._shape.needs):
            options.append(self._end(count))
        if self._most is None or count < self._most:
            now = self._after(count) if self._most is not None else min(self._after(count), max(1, self._least))
            for names, formula in self._others:
                for part, meeting, now_met in self._parts(names, formula, met):
                    place = self.place(len(self._members), now, now_met)
                    options.append(concat(self._name(part, count), self._writer.value(meeting), place))
        return alternation(options)

    def _parts(self, names: Node, formula: Formula, met: _Met) -> Iterator[tuple[Node, Formula, _Met]]:
        """A member with any of the names, as it is and as one that meets needs."""
        yield names, formula, met
        for more in self._open(met):
            for each in more:
                names = both_strings(names, self._shape.needs[each][0])
            if names != NOTHING:
                yield names, all_of(formula, *(self._shape.needs[each][1] for each in more)), met | more

    def _meeting(self, name: Node, formula: Formula, met: _Met) -> Iterator[tuple[Formula, _Met]]:
        yield from ((meeting, now_met) for _, meeting, now_met in self._parts(name, formula, met))

    def _open(self, met: _Met) -> Iterator[_Met]:
        """The sets of needs that are not met."""
        left = [i for i in range(len(self._shape.needs)) if i not in met]
        for count in range(1, len(left) + 1):
            yield from map(frozenset, combinations(left, count))
