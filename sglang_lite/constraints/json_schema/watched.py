"""Rules that masks have to watch while a value is written, since no grammar of a sensible size can say them: items
differ, a name comes once, and all names which have to come have come.

A place stands for the values that may be written there, whatever alternatives the text still leaves open. Where
alternatives disagree on what is watched, the schema is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sglang_lite.constraints.formal.nodes import ANY_TEXT, NOTHING, Node
from sglang_lite.constraints.json_schema.formulas import Formula
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.values import ArrayShape, Member, ObjectShape
from sglang_lite.constraints.json_schema.write_strings import quoted
from sglang_lite.protocol import ConstraintError

MAX_PLACES = 5_000


@dataclass(frozen=True, slots=True)
class DistinctItems:
    """Items of an array that differ. `scalars`: texts of those that are scalars, of the first items and of the rest."""

    scalars: tuple[Node, ...]

    def at(self, index: int) -> Node:
        return self.scalars[min(index, len(self.scalars) - 1)]


@dataclass(frozen=True, slots=True)
class DistinctNames:
    """Names of an object's members.

    Attributes:
        names: texts of the names that may come, with their quotation marks.
        required: names that have to come, so written.
        least: how many have to come.
    """

    names: Node
    required: frozenset[str]
    least: int


ONCE = DistinctNames(quoted(ANY_TEXT), frozenset(), 0)  # whatever they are, of which there is no end


@dataclass(frozen=True, slots=True)
class Watched:
    """A place in a value. The places of other values are numbers, None where nothing is watched.

    Attributes:
        items, names: what is watched here, of an array and an object.
        prefix, rest: places of the first items, and of those after them.
        members, others: places of members by their names as they are written, and of the others.
    """

    items: DistinctItems | None = None
    names: DistinctNames | None = None
    prefix: tuple[int | None, ...] = ()
    rest: int | None = None
    members: Mapping[str, int | None] = field(default_factory=dict)
    others: int | None = None

    def item(self, index: int) -> int | None:
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def below(self) -> Iterable[int | None]:
        return (*self.prefix, self.rest, *self.members.values(), self.others)


@dataclass(slots=True)
class Watches:
    """Shapes that a writer leaves to the masks to watch."""

    items: dict[ArrayShape, DistinctItems] = field(default_factory=dict)
    names: dict[ObjectShape, tuple[DistinctNames, str | None]] = field(default_factory=dict)  # and why, as a pointer

    def places(self, reader: SchemaReader, start: Formula) -> tuple[Watched, ...]:
        """Places in the values of a formula, the start first; none where nothing is watched.

        Raises:
            ConstraintError: alternatives disagree on what is watched, or there are too many places.
        """
        return _pruned(_Places(reader, self).all(start)) if self.items or self.names else ()


class _Places:
    def __init__(self, reader: SchemaReader, watches: Watches) -> None:
        self._reader, self._watches = reader, watches
        self._numbers: dict[frozenset[Formula], int] = {}
        self._queue: list[frozenset[Formula]] = []

    def all(self, start: Formula) -> list[Watched]:
        self._number([start])
        found = []
        for formulas in self._queue:
            found.append(self._place(formulas))
            if len(self._queue) > MAX_PLACES:
                raise ConstraintError(f"json_schema: too complex: more than {MAX_PLACES:,} places have to be watched.")
        return found

    def _number(self, formulas: Iterable[Formula]) -> int | None:
        key = frozenset(each for each in formulas if each is not False)
        if not key or key == {True}:
            return None
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._queue.append(key)
        return self._numbers[key]

    def _place(self, formulas: frozenset[Formula]) -> Watched:
        values = [self._reader.values(formula) for formula in formulas]
        arrays = list(dict.fromkeys(shape for each in values for shape in each.arrays))
        objects = list(dict.fromkeys(shape.listed() for each in values for shape in each.objects))
        found = Watched(self._items(arrays), self._names(objects))
        if arrays:
            count = max(len(shape.prefix) for shape in arrays)
            prefix = tuple(self._number(shape.item(i) for shape in arrays) for i in range(count))
            found = replace(found, prefix=prefix, rest=self._number(shape.rest for shape in arrays))
        if objects:
            members = {
                name: self._number(_members(shape).get(name, shape.unlisted(name)).formula for shape in objects)
                for name in dict.fromkeys(member.name for shape in objects for member in shape.members)
            }
            others = self._number(formula for shape in objects for names, formula in shape.others if names != NOTHING)
            found = replace(found, members=members, others=others)
        return found

    def _items(self, arrays: Collection[ArrayShape]) -> DistinctItems | None:
        watched = [shape for shape in arrays if shape in self._watches.items]
        if watched and len(arrays) > 1:
            raise ConstraintError(
                "json_schema: that items are unique can't be enforced where there are alternatives of arrays.",
                pointer=watched[0].unique,
                hint="Put uniqueItems beside all of the alternatives, or: enforce='best_effort'.",
            )
        return self._watches.items[watched[0]] if watched else None

    def _names(self, objects: Collection[ObjectShape]) -> DistinctNames | None:
        watched = [shape for shape in objects if shape in self._watches.names]
        if not watched:
            return None
        names, pointer = self._watches.names[watched[0]]
        if len(objects) > 1 and any(self._watches.names[shape][0] != ONCE for shape in watched):
            raise ConstraintError(
                "json_schema: members can't be counted, or come in any order, where there are alternatives of objects.",
                pointer=pointer,
                hint="Allow one kind of object in a place, or order='schema'.",
            )
        return names


def _members(shape: ObjectShape) -> dict[str, Member]:
    return {member.name: member for member in shape.members}


def _pruned(places: list[Watched]) -> tuple[Watched, ...]:
    """Places with None for those below which nothing is watched."""
    above: list[list[int]] = [[] for _ in places]
    for i, place in enumerate(places):
        for below in place.below():
            if below is not None:
                above[below].append(i)
    kept = {i for i, place in enumerate(places) if place.items or place.names}
    for each in (queue := list(kept)):
        more = [i for i in above[each] if i not in kept]
        kept.update(more)
        queue += more

    def known(number: int | None) -> int | None:
        return number if number in kept else None

    return tuple(
        replace(
            place,
            prefix=tuple(map(known, place.prefix)),
            rest=known(place.rest),
            members={name: known(number) for name, number in place.members.items()},
            others=known(place.others),
        )
        for place in places
    )
