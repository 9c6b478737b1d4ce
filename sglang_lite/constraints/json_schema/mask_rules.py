"""Rules that masks enforce while a value is written, because no grammar of reasonable size
expresses them: items are distinct, names are unique, and all required names are present.

A position (`RulePosition`) covers all values that may be written there, for all
alternatives that the text leaves open. Kinds of objects are distinguished by their names
and scalar values. If that is not enough, or alternatives of arrays disagree on the rules,
the schema is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product, zip_longest

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.nodes import ANY_TEXT, NOTHING, Node, alternation, literal
from sglang_lite.constraints.json_schema.formulas import Formula, find_first_pointer
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.values import (
    ArrayShape,
    Member,
    ObjectShape,
    ValueSet,
    intersection_of_strings,
)
from sglang_lite.constraints.json_schema.write_strings import quote_strings
from sglang_lite.protocol import ConstraintError

MAX_POSITIONS = 5_000


@dataclass(frozen=True, slots=True)
class DistinctItems:
    """Rule that the items of an array differ.

    Attributes:
        texts: languages of the first items, one each, and a last one for all further items. Every
            value has one spelling. If an item may be any value, its language has only the scalars.
            Arrays and objects that can always be extended to differ are represented by all texts
            with the same beginning.
    """

    texts: tuple[Node, ...]

    def texts_at(self, index: int) -> Node:
        return self.texts[min(index, len(self.texts) - 1)]


@dataclass(frozen=True, slots=True)
class Values:
    """Values of a member: the texts of its scalars, and whether arrays and objects are allowed."""

    scalars: Node
    arrays: bool
    objects: bool


@dataclass(frozen=True, slots=True)
class DistinctNames:
    """Rule for the names of an object's members.

    Attributes:
        names: texts of the allowed names, with quotation marks.
        required: names of the required members.
        least: minimum number of members.
        most: maximum number of members if several kinds of objects are possible, or None for
            no limit.
        values: values of the members that distinguish several kinds of objects, by name.
    """

    names: Node
    required: frozenset[str]
    least: int
    most: int | None = None
    values: Mapping[str, Values] = field(default_factory=dict)


# any names, without a limit on their number
UNIQUE_NAMES_ONLY = DistinctNames(quote_strings(ANY_TEXT), frozenset(), 0)


@dataclass(frozen=True, slots=True)
class RulePosition:
    """Position in a value, with the rules that masks enforce there. Positions of items and members
    are given by index. They are None if masks enforce no rule there.

    Attributes:
        items: rule for the items of an array.
        names: rules for the names of an object, one for each possible kind of object.
        prefix, rest: positions of the first items, and of the items after them.
        members: positions of named members by name.
        others: positions of all other members by the language of their names.
    """

    items: DistinctItems | None = None
    names: tuple[DistinctNames, ...] = ()
    prefix: tuple[int | None, ...] = ()
    rest: int | None = None
    members: Mapping[str, int | None] = field(default_factory=dict)
    others: tuple[tuple[Node, int | None], ...] = ()

    def item_position(self, index: int) -> int | None:
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def member(self, name: str | bytes) -> int | None:
        """Returns the index of the position for a member's value, or None if masks enforce no rule
        there. A name given as bytes is not valid JSON and has no position.
        """
        if isinstance(name, bytes) or name in self.members:
            return self.members[name] if isinstance(name, str) else None
        fitting = (
            number for names, number in self.others if names == ANY_TEXT or accepts(names, name)
        )
        return next(fitting, None)

    def positions_below(self) -> Iterable[int | None]:
        return (
            *self.prefix,
            self.rest,
            *self.members.values(),
            *(number for _, number in self.others),
        )


@dataclass(slots=True)
class MaskedShapes:
    """Array and object shapes with rules that the grammar leaves to the masks.

    Attributes:
        items: array shapes whose items must differ.
        names: object shapes whose names masks must check, each with the JSON Pointer of the
            keyword that requires it.
        scarce_names: object shapes whose names may run out. Masks check them where
            alternatives allow it.
    """

    items: dict[ArrayShape, DistinctItems] = field(default_factory=dict)
    # rule, pointer
    names: dict[ObjectShape, tuple[DistinctNames, str | None]] = field(default_factory=dict)
    scarce_names: dict[ObjectShape, DistinctNames] = field(default_factory=dict)

    def positions(
        self, reader: SchemaReader, start: Formula, scalars: Callable[[ValueSet], Node]
    ) -> tuple[RulePosition, ...]:
        """Returns the positions in a formula's values, the start first. Returns an empty tuple if
        masks check no shape.

        Args:
            reader: reader of the schema.
            start: formula of the whole value.
            scalars: function that returns the texts of the scalars in a set of values.

        Raises:
            ConstraintError: alternatives disagree on the rules, or the schema has too many
                positions.
        """
        ruled = self.items or self.names or self.scarce_names
        return _prune_positions(_Positions(reader, self, scalars).all(start)) if ruled else ()


class _Positions:
    def __init__(
        self, reader: SchemaReader, masked_shapes: MaskedShapes, scalars: Callable[[ValueSet], Node]
    ) -> None:
        self._reader = reader
        self._masked_shapes = masked_shapes
        self._scalars = scalars
        self._numbers: dict[frozenset[Formula], int] = {}
        self._queue: list[frozenset[Formula]] = []

    def all(self, start: Formula) -> list[RulePosition]:
        self._assign_position_index([start])
        found = []
        for formulas in self._queue:
            found.append(self._build_position(formulas))
            if len(self._queue) > MAX_POSITIONS:
                raise ConstraintError(
                    f"json_schema: too complex: more than {MAX_POSITIONS:,} positions with rules for masks."
                )
        return found

    def _assign_position_index(self, formulas: Iterable[Formula]) -> int | None:
        key = frozenset(each for each in formulas if each is not False)
        if not key or key == {True}:
            return None
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._queue.append(key)
        return self._numbers[key]

    def _build_position(self, formulas: frozenset[Formula]) -> RulePosition:
        values = [self._reader.values(formula) for formula in formulas]
        arrays = list(dict.fromkeys(shape for each in values for shape in each.arrays))
        listed = [
            tuple(dict.fromkeys(shape.expand_finite_names() for shape in each.objects))
            for each in values
        ]
        objects = list(dict.fromkeys(shape for shapes in listed for shape in shapes))
        found = RulePosition(
            self._find_item_rules(arrays),
            self._find_name_rules(
                objects,
                several=len(set(listed) - {()}) > 1,
                at=next(map(find_first_pointer, formulas)),
            ),
        )
        if arrays:
            count = max(len(shape.prefix) for shape in arrays)
            prefix = tuple(
                self._assign_position_index(shape.item_formula(i) for shape in arrays)
                for i in range(count)
            )
            found = replace(
                found,
                prefix=prefix,
                rest=self._assign_position_index(shape.rest for shape in arrays),
            )
        if objects:
            members = {
                name: self._assign_position_index(
                    formula for shape in objects for formula in shape.formulas(name)
                )
                for name in dict.fromkeys(
                    member.name for shape in objects for member in shape.members
                )
            }
            others = [
                (names, formula)
                for shape in objects
                for names, formula in shape.others
                if names != NOTHING
            ]
            if len(objects) == 1:
                by_names = [
                    (names, self._assign_position_index([formula])) for names, formula in others
                ]
            else:  # the languages of their names may overlap
                by_names = [
                    (ANY_TEXT, self._assign_position_index(formula for _, formula in others))
                ]
            found = replace(found, members=members, others=tuple(by_names))
        return found

    def _find_item_rules(self, arrays: Collection[ArrayShape]) -> DistinctItems | None:
        ruled = [shape for shape in arrays if shape in self._masked_shapes.items]
        rules = {self._masked_shapes.items[shape] for shape in ruled}
        if len(rules) == 1 and all(
            shape in ruled or (shape.most is not None and shape.most < 2) for shape in arrays
        ):
            return rules.pop()
        for shape in ruled:
            if shape.unique_pointer is not None and len(ruled) == len(arrays):
                raise ConstraintError(
                    "json_schema: uniqueItems can't be enforced in alternatives of arrays with different items.",
                    pointer=shape.unique_pointer,
                    hint="Put the alternatives into `items`, with anyOf there, or set enforce='best_effort'.",
                )
            if shape.unique_pointer is not None:
                raise ConstraintError(
                    "json_schema: uniqueItems can't be enforced in only some of several alternatives of arrays.",
                    pointer=shape.unique_pointer,
                    hint="Put uniqueItems next to anyOf or oneOf, for all alternatives, or set enforce='best_effort'.",
                )
        return None

    def _find_name_rules(
        self, objects: Sequence[ObjectShape], *, several: bool, at: str
    ) -> tuple[DistinctNames, ...]:
        """Returns the rules for the names of objects, one for each kind.

        Args:
            objects: shapes of the possible kinds of objects.
            several: whether the preceding text restricts which of the kinds are possible.
            at: JSON Pointer of the objects.
        """
        ruled = [shape for shape in objects if shape in self._masked_shapes.names]
        rules = [self._masked_shapes.names[shape][0] for shape in ruled]
        if not ruled:
            rules = [
                self._masked_shapes.scarce_names[s]
                for s in objects
                if s in self._masked_shapes.scarce_names
            ]
        if len(objects) == 1 or all(each == UNIQUE_NAMES_ONLY for each in rules):
            return tuple(rules[:1])
        try:
            if several or any(shape.requirements for shape in objects):
                raise _Different
            return self._name_rules_by_kind(objects)
        except _Different:
            if not ruled:
                return ()
            raise ConstraintError(
                "json_schema: members can't be counted, or be in any order, for these alternatives of objects.",
                pointer=self._masked_shapes.names[ruled[0]][1] or at,
                hint="Let them differ only in names, required members and scalar values, or set order='schema'.",
            ) from None

    def _name_rules_by_kind(self, objects: Sequence[ObjectShape]) -> tuple[DistinctNames, ...]:
        """Returns a rule for the names of each kind of object. The kinds must differ only in names
        and scalar values.

        Raises:
            _Different: the kinds differ in other values, so that names and scalars don't determine
                the kind.
        """
        for a, b in combinations(objects, 2):
            for (names, formula), (more, other) in product(
                a.others_outside_members(), b.others_outside_members()
            ):
                if (
                    not self._have_same_values(formula, other)
                    and intersection_of_strings(names, more) != NOTHING
                ):
                    raise _Different
        # members whose values differ between the kinds
        distinguishing: dict[str, list[Formula]] = {}
        for name in dict.fromkeys(member.name for shape in objects for member in shape.members):
            found = [_find_shape_member(shape, name).formula for shape in objects]
            possible = [formula for formula in found if formula is not False]
            if not all(self._have_same_values(possible[0], other) for other in possible[1:]):
                distinguishing[name] = found
        values = {name: self._member_values(formulas) for name, formulas in distinguishing.items()}
        return tuple(
            replace(
                build_name_rule(shape),
                most=shape.most,
                values={name: each[i] for name, each in values.items()},
            )
            for i, shape in enumerate(objects)
        )

    def _have_same_values(
        self, a: Formula, b: Formula, assumed: set[tuple[Formula, Formula]] | None = None
    ) -> bool:
        """Returns True if two formulas are known to have the same values, judged by their shapes.
        Equal values with different shapes are not recognised.
        """
        # pairs being compared; a cycle adds nothing new
        assumed = set() if assumed is None else assumed
        if a == b or (a, b) in assumed:
            return True
        assumed.add((a, b))
        one = self._reader.values(a)
        other = self._reader.values(b)
        if replace(one, arrays=(), objects=()) != replace(other, arrays=(), objects=()):
            return False
        shapes = zip_longest((*one.arrays, *one.objects), (*other.arrays, *other.objects))
        pairs = [(_shape_parts(x), _shape_parts(y)) for x, y in shapes]
        return all(
            x[0] == y[0]
            and all(self._have_same_values(each, its, assumed) for each, its in zip(x[1], y[1]))
            for x, y in pairs
        )

    def _member_values(self, formulas: Sequence[Formula]) -> list[Values]:
        """Returns the values of a member in each kind of object."""
        value_sets = [self._reader.values(formula) for formula in formulas]
        if (
            len({each.arrays for each in value_sets} - {()}) > 1
            or len({each.objects for each in value_sets} - {()}) > 1
        ):
            raise _Different
        return [
            Values(self._scalars(each), bool(each.arrays), bool(each.objects))
            for each in value_sets
        ]


class _Different(Exception):  # noqa: N818 # never leaves this module
    """Raised if kinds of objects can't be distinguished."""


def build_name_rule(shape: ObjectShape) -> DistinctNames:
    """Returns the complete rule for the names of a shape."""
    members = [member for member in shape.members if member.formula is not False]
    names = [literal(member.name) for member in members] + [
        names for names, _ in shape.others_outside_members()
    ]
    required = frozenset(member.name for member in members if member.required)
    return DistinctNames(alternation(map(quote_strings, names)), required, shape.least)


def _shape_parts(shape: object) -> tuple[object, tuple[Formula, ...]]:
    """Divides a shape into two parts: its requirements, and the formulas of its members or items."""
    if isinstance(shape, ArrayShape):
        unique = shape.unique_pointer is not None
        is_set = shape.set_pointer is not None
        rules = (
            len(shape.prefix),
            shape.least,
            shape.most,
            shape.contains,
            unique,
            is_set,
            shape.repeats,
        )
        return rules, (*shape.prefix, shape.rest)
    if not isinstance(shape, ObjectShape):
        return None, ()
    names = (
        [(member.name, member.required) for member in shape.members],
        [names for names, _ in shape.others],
    )
    formulas = (
        *(member.formula for member in shape.members),
        *(formula for _, formula in shape.others),
    )
    return (names, shape.least, shape.most, shape.requirements, shape.choices), formulas


def _find_shape_member(shape: ObjectShape, name: str) -> Member:
    return next(
        (member for member in shape.members if member.name == name), None
    ) or shape.member_for_unlisted(name)


def _prune_positions(positions: list[RulePosition]) -> tuple[RulePosition, ...]:
    """Replaces the index of a position with None where no rule applies at the position or below it."""
    above: list[list[int]] = [[] for _ in positions]
    for i, position in enumerate(positions):
        for below in position.positions_below():
            if below is not None:
                above[below].append(i)
    needed = {i for i, position in enumerate(positions) if position.items or position.names}
    for each in (queue := list(needed)):
        more = [i for i in above[each] if i not in needed]
        needed.update(more)
        queue += more

    def number_if_needed(number: int | None) -> int | None:
        return number if number in needed else None

    return tuple(
        replace(
            position,
            prefix=tuple(map(number_if_needed, position.prefix)),
            rest=number_if_needed(position.rest),
            members={name: number_if_needed(number) for name, number in position.members.items()},
            others=tuple((names, number_if_needed(number)) for names, number in position.others),
        )
        for position in positions
    )
