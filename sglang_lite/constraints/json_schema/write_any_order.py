"""The texts of objects whose members come in any order.

A rule remembers which of the members have come: all of a few, or those that are required, where others may follow
without end. Where that is too much for a grammar, members may come again and again by the grammar, and the masks watch
the names (watched.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.constraints.formal.counting import CountedTexts
from sglang_lite.constraints.formal.nodes import (
    NOTHING,
    Complement,
    Node,
    Ref,
    alternation,
    concat,
    literal,
    repeat,
    texts_of,
)
from sglang_lite.constraints.json_schema.formulas import Formula
from sglang_lite.constraints.json_schema.notation import Notation
from sglang_lite.constraints.json_schema.values import ObjectShape, both_strings
from sglang_lite.constraints.json_schema.watched import ONCE, DistinctNames
from sglang_lite.constraints.json_schema.write_strings import quoted
from sglang_lite.protocol import ConstraintError

MAX_ANY_ORDER = 39  # named members in any order
MAX_REMEMBERED = 8  # of which a grammar remembers whether they have come
ENDLESS = 10**9  # names
_FEW = 4  # of which that costs less than watching

_Others = Sequence[tuple[Node, Formula]]
_Come = frozenset[int]


def watch(writer: Notation, shape: ObjectShape, others: _Others, *, in_any_order: bool = False) -> None:
    """Let the masks watch that names come once, and in any order that all come that have to."""
    assert writer.watches is not None
    known = ONCE
    if in_any_order or not left_over(others, ENDLESS):
        members = [member for member in shape.members if member.formula is not False]
        names = [quoted(literal(member.name)) for member in members] + [quoted(each) for each, _ in others]
        required = [member.name for member in members if member.required and in_any_order]
        known = DistinctNames(alternation(names), frozenset(required), shape.least if in_any_order else 0)
    writer.watches.names[shape] = known, shape.counted_at


def left_over(others: _Others, least: int) -> bool:
    """Tells whether there are at least so many names that are not listed."""
    counts = [_count(names) for names, _ in others]
    return None in counts or sum(count or 0 for count in counts) >= least


def _count(names: Node) -> int | None:
    if isinstance(names, Complement) and texts_of(names.node) is not None:  # as of most open objects
        return None
    return CountedTexts(names).count


class AnyOrder:
    """Writer of the objects of a shape.

    Args:
        writer: of all JSON.
        shape: whose names that can be listed are.
    """

    def __init__(self, writer: Notation, shape: ObjectShape) -> None:
        self._writer, self._shape, self._number = writer, shape, writer.number(shape)
        self._members = [member for member in shape.members if member.formula is not False]
        self._required = frozenset(i for i, member in enumerate(self._members) if member.required)
        self._others = [
            (names, formula)
            for all_names, formula in shape.others
            if (names := both_strings(all_names, shape.free_names)) != NOTHING
        ]

    def text(self, *, alone: bool) -> Node:
        """The texts.

        Args:
            alone: no other shape of objects is possible in this place.

        Raises:
            ConstraintError: too many members, or they are counted among too many.
        """
        shape, count = self._shape, len(self._members)
        if count > MAX_ANY_ORDER:
            raise _refusal(f"{count} members; up to {MAX_ANY_ORDER} can come in any order")
        if shape.needs:
            raise _refusal("members of some pattern that have to come can't come in any order")
        most = shape.most if self._others or (shape.most or 0) < count else None
        endless = bool(self._others) and left_over(self._others, ENDLESS)
        if not self._others and count <= MAX_REMEMBERED:
            return self._place(frozenset(), frozenset(range(count)), most)
        if endless and most is None and shape.least <= 1 and len(self._required) <= (_FEW if alone else MAX_REMEMBERED):
            return self._place(frozenset(), self._required, None)
        if most is not None and self._required:
            raise _refusal("members that are required can't be counted up to maxProperties in any order")
        if not alone or self._writer.watches is None:
            raise _refusal(f"more than {MAX_REMEMBERED} members of alternatives can't come in any order")
        watch(self._writer, shape, self._others, in_any_order=True)
        return self._loose(most)

    def _loose(self, most: int | None) -> Node:
        """Members that may come again, as far as the grammar knows."""
        everything = frozenset(range(len(self._members)))
        more = repeat(self._any_of(everything, first=False), 0, None if most is None else most - 1)
        some = concat(self._any_of(everything, first=True), more, self._writer.end(empty=False))
        none = NOTHING if self._required or self._shape.least else self._writer.end(empty=True)
        return alternation([none, NOTHING if most == 0 else some])

    def _any_of(self, members: _Come, *, first: bool) -> Node:
        """One of some named members, or one that is not named."""

        def body() -> Node:
            named = [self._member(i, first=first) for i in sorted(members)]
            return alternation([*named, *(self._writer.member(names, f, first=first) for names, f in self._others)])

        if not members and not self._others:
            return NOTHING
        return self._writer.rule((self._number, "any", members, first), body)

    def _member(self, index: int, *, first: bool) -> Node:
        member = self._members[index]
        return self._writer.member(literal(member.name), member.formula, first=first)

    def _place(self, come: _Come, remembered: _Come, most: int | None, *, empty: bool = True) -> Ref:
        """Rule for the place where these members of those that are remembered have come.

        Args:
            empty: no member has come.
        """
        key = self._number, "place", come, empty
        return self._writer.rule(key, lambda: self._at_place(come, remembered, most, empty=empty))

    def _at_place(self, come: _Come, remembered: _Come, most: int | None, *, empty: bool) -> Node:
        options: list[Node] = []
        counted = int(not empty) if self._others else len(come)
        if self._required <= come and counted >= self._shape.least:
            options.append(self._writer.end(empty=empty))
        for i in sorted(remembered - come):
            now = come | {i}
            if most is None or len(now) + len(self._required - now) <= most:
                options.append(concat(self._member(i, first=empty), self._place(now, remembered, most, empty=False)))
        loose = self._any_of(frozenset(range(len(self._members))) - remembered, first=empty)
        if loose != NOTHING:
            options.append(concat(loose, self._place(come, remembered, most, empty=False)))
        return alternation(options)


def _refusal(problem: str) -> ConstraintError:
    return ConstraintError(
        f"json_schema: {problem}.",
        hint="Use order='schema', with the members in the order that is meant.",
    )
