"""Sets of JSON values and exact operations on them: intersection, union, complement.

A set is represented by type. Scalars are sets of numbers and languages of strings. Arrays
and objects are unions of shapes, whose items and members are formulas over the schemas
below them. Formulas are evaluated only when needed, so recursion is harmless. Independent
of keywords (reader.py) and text (grammar_writer.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from sglang_lite.constraints.formal.automaton import accepts, decide_emptiness
from sglang_lite.constraints.formal.lengths import limit_length
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    NOTHING,
    Alternation,
    Complement,
    Intersection,
    Node,
    Repeat,
    alternation,
    complement,
    intersection,
    literal,
    literal_texts,
)
from sglang_lite.constraints.json_schema import numbers
from sglang_lite.constraints.json_schema.formulas import AllOf, Formula, all_of, not_
from sglang_lite.constraints.json_schema.numbers import Numbers
from sglang_lite.protocol import ConstraintError

MAX_SHAPES = 2_000  # maximum number of shapes in a union
# combinations of choices that are written separately, to keep members in the schema's order
FEW = 12
SOME = 200  # the same if members come in any order
MAX_WORK = 3_000_000  # total of members, characters, and states and transitions of automata

# cost of a shape and of a state; a member costs 1
_SHAPE = 20
_STATE = 5


class Member(NamedTuple):
    """A member of an object: its name, the formula of its values, and whether it is required."""

    name: str
    formula: Formula
    required: bool


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """A set of objects, described by members, names and counts.

    Attributes:
        members: members with known names, in the order in which they are written.
        others: all other allowed names, as disjoint languages, each with the formula of the
            values.
        least, most: minimum and maximum number of members.
        requirements: (names, formula) pairs. For each, some member has a name in the language
            and a value in the formula.
        evaluated: names whose members count as evaluated, if that is tracked.
        count_pointer: JSON Pointer of the keyword that sets `least`, or None if that keyword
            is only checked.
        choices: lists of alternatives; one alternative of each choice holds. They only
            restrict members by name, and no two choices share a name.
    """

    members: tuple[Member, ...] = ()
    others: tuple[tuple[Node, Formula], ...] = ((ANY_TEXT, True),)
    least: int = 0
    most: int | None = None
    requirements: tuple[tuple[Node, Formula], ...] = ()
    evaluated: Node = NOTHING
    count_pointer: str | None = None
    choices: tuple[tuple[ObjectShape, ...], ...] = ()

    def member_for_unlisted(self, name: str) -> Member:
        """Returns the member for a name that is not in `members`, according to `others`."""
        formula = next(
            (f for names, f in self.others if names == ANY_TEXT or accepts(names, name)), False
        )
        return Member(name, formula, False)

    def expand_finite_names(self) -> ObjectShape:
        """Returns an equal shape in the form in which objects are written. If names in `others` are
        finitely many, they become members. Members of the same choice are adjacent.
        """
        listed = [
            (names, texts, f)
            for names, f in self.others
            if (texts := literal_texts(names)) is not None
        ]
        listed_names = {member.name for member in self.members}
        members = [
            Member(name, f, False)
            for _, texts, f in listed
            for name in texts
            if name not in listed_names
        ]
        moved = {names for names, _, _ in listed}
        others = tuple(each for each in self.others if each[0] not in moved)
        if not listed and not self.choices:
            return self
        choice_of = {
            name: i
            for i, choice in enumerate(self.choices)
            for name in _choice_member_names(choice)
        }
        listed_names.update(member.name for member in members)
        members += [
            self.member_for_unlisted(name) for name in choice_of if name not in listed_names
        ]
        together: dict[int | str, list[Member]] = {}
        for member in (*self.members, *members):
            together.setdefault(choice_of.get(member.name, member.name), []).append(member)
        return replace(
            self, members=tuple(m for group in together.values() for m in group), others=others
        )

    def formulas(self, name: str) -> list[Formula]:
        """Returns the formulas that a member's value may have. There are several if the
        alternatives of a choice restrict the member differently.
        """
        own = next((m for m in self.members if m.name == name), None) or self.member_for_unlisted(
            name
        )
        for choice in self.choices:
            found = [
                m.formula for alternative in choice for m in alternative.members if m.name == name
            ]
            if found:
                unrestricted = len(found) < len(choice)
                return list(
                    dict.fromkeys(
                        all_of(own.formula, each) for each in (*found, *[True] * unrestricted)
                    )
                )
        return [own.formula]

    @property
    def only_names_members(self) -> bool:
        """True if members are restricted only by name."""
        return replace(self, count_pointer=None) == ObjectShape(self.members)

    def requires_too_many_members(self) -> bool:
        """Returns True if more members are required than are possible."""
        least = max(self.least, sum(member.required for member in self.members))
        possible = (
            None if self.others else sum(member.formula is not False for member in self.members)
        )
        most = _smaller_limit(self.most, possible)
        return most is not None and least > most

    @property
    def unlisted_names_language(self) -> Node:
        """Language of the names that are not in `members`."""
        return complement(alternation(literal(member.name) for member in self.members))

    def others_outside_members(self) -> list[tuple[Node, Formula]]:
        """Returns `others` restricted to names that are not in `members`."""
        free = self.unlisted_names_language
        found = ((intersection_of_strings(names, free), formula) for names, formula in self.others)
        return [(names, formula) for names, formula in found if names != NOTHING]


class Contains(NamedTuple):
    """Bound on the number of items whose values satisfy a formula: from index `start` on, at least
    `least` and at most `most`.
    """

    formula: Formula
    start: int
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """A set of arrays, described by items and counts.

    Attributes:
        prefix: formulas of the first items.
        rest: formula of the items after them.
        least, most: minimum and maximum number of items.
        contains: further bounds on the number of items in a formula.
        unique_pointer: JSON Pointer of the keyword that forbids equal items, or None if equal
            items are allowed.
        evaluated: number of leading items that count as evaluated (None for all), and
            formulas whose items also count.
        set_pointer: JSON Pointer of the array's schema if the array spells a set. Equal items
            are then valid, but are not generated if the grammar or the masks can prevent
            them.
        repeats: maximum number of equal items generated in a row (`x-repeats`), or None. Arrays
            with more are valid too.
    """

    prefix: tuple[Formula, ...] = ()
    rest: Formula = True
    least: int = 0
    most: int | None = None
    contains: tuple[Contains, ...] = ()
    unique_pointer: str | None = None
    evaluated: tuple[int | None, tuple[Formula, ...]] = (0, ())
    set_pointer: str | None = None
    repeats: int | None = None

    def item_formula(self, index: int) -> Formula:
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True, slots=True)
class ValueSet:
    """A set of JSON values. If `inexact`, it may contain values that the schema forbids (by
    keywords that are only checked).
    """

    null: bool = False
    booleans: frozenset[bool] = frozenset()
    numbers: Numbers = numbers.NONE
    strings: Node = NOTHING
    arrays: tuple[ArrayShape, ...] = ()
    objects: tuple[ObjectShape, ...] = ()
    inexact: bool = False


NO_VALUE = ValueSet()
ANY_VALUE = ValueSet(
    True, frozenset({False, True}), numbers.EVERY, ANY_TEXT, (ArrayShape(),), (ObjectShape(),)
)

_Shape = TypeVar("_Shape", ArrayShape, ObjectShape)
_Choice: TypeAlias = tuple[ObjectShape, ...]


class Algebra:
    """Operations on sets of values, bounded by a work limit rather than time.

    Args:
        empty: function that returns True if a formula is known to allow no value.

    Attributes:
        work: work done so far.
    """

    def __init__(self, empty: Callable[[Formula], bool]) -> None:
        self._empty = empty
        self.work = 0

    def intersect_strings(self, a: Node, b: Node) -> Node:
        """Returns a node for the strings in both languages. The work counts towards the work limit.

        Raises:
            ConstraintError: the work limit is exceeded.
        """
        node, work = _intersect_strings_and_work(a, b)
        self._spend(work)
        return node

    def _spend(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise _too_many_alternatives_error()

    def intersect_value_sets(self, a: ValueSet, b: ValueSet) -> ValueSet:
        if b == ANY_VALUE:
            return a
        if a == ANY_VALUE:
            return b
        return ValueSet(
            a.null and b.null,
            a.booleans & b.booleans,
            numbers.intersect_numbers(a.numbers, b.numbers),
            self.intersect_strings(a.strings, b.strings),
            self._product(a.arrays, b.arrays, self._intersect_arrays),
            self._product(
                # otherwise members would change their order
                _merge_into_choice(a.objects) if len(b.objects) > 1 else a.objects,
                _merge_into_choice(b.objects),
                self._both_objects,
            ),
            a.inexact or b.inexact,
        )

    def unite_value_sets(self, sets: Iterable[ValueSet]) -> ValueSet:
        sets = list(sets)
        return ValueSet(
            any(each.null for each in sets),
            frozenset().union(*(each.booleans for each in sets)),
            numbers.unite_numbers(*(each.numbers for each in sets)),
            alternation(each.strings for each in sets),
            self._distinct(shape for each in sets for shape in each.arrays),
            self._distinct(shape for each in sets for shape in each.objects),
            any(each.inexact for each in sets),
        )

    def complement_values(self, values: ValueSet) -> ValueSet:
        return self.subtract_set(ANY_VALUE, values)

    def subtract_set(self, a: ValueSet, b: ValueSet) -> ValueSet:
        """Returns the difference of two sets."""
        if b.inexact:  # `b` may exceed the exact set, so nothing is removed
            return replace(a, inexact=True)
        return ValueSet(
            a.null and not b.null,
            a.booleans - b.booleans,
            numbers.intersect_numbers(a.numbers, numbers.complement_numbers(b.numbers)),
            self.intersect_strings(a.strings, complement_strings(b.strings)),
            self._subtract_shapes(
                a.arrays, b.arrays, self._intersect_arrays, _complement_array_shape
            ),
            self._subtract_shapes(
                a.objects, b.objects, self._both_objects, _complement_object_shape
            ),
            a.inexact,
        )

    def _subtract_shapes(
        self,
        shapes: tuple[_Shape, ...],
        without: tuple[_Shape, ...],
        both: Callable[[_Shape, _Shape], _Shape | None],
        others: Callable[[_Shape], Iterable[_Shape]],
    ) -> tuple[_Shape, ...]:
        shapes = self._expand_choices(shapes)
        without = self._expand_choices(without)
        for each in without:
            remaining: list[_Shape] = []
            outside: list[_Shape] | None = None
            for shape in shapes:
                common = both(shape, each)
                if common is None or not self._possible(common):
                    remaining.append(shape)
                else:
                    outside = list(others(each)) if outside is None else outside
                    rest = (both(shape, other) for other in outside)
                    remaining += [
                        part for part in rest if part is not None and self._possible(part)
                    ]
            shapes = self._distinct(remaining)
        return shapes

    def is_empty(self, values: ValueSet) -> bool:
        """Returns True if a set is known to be empty, without following circular references."""
        if values.null or values.booleans or values.numbers or values.strings != NOTHING:
            return False
        return not any(map(self._possible, values.arrays)) and not any(
            map(self._possible, values.objects)
        )

    def _possible(self, shape: ArrayShape | ObjectShape) -> bool:
        if isinstance(shape, ObjectShape):
            if not all(any(map(self._possible, choice)) for choice in shape.choices):
                return False
            required = [member.formula for member in shape.members if member.required]
            return not shape.requires_too_many_members() and not any(map(self._empty, required))
        too_many = shape.most is not None and shape.least > shape.most
        return not too_many and not any(
            self._empty(shape.item_formula(i))
            for i in range(min(shape.least, len(shape.prefix) + 1))
        )

    def _product(
        self,
        a: tuple[_Shape, ...],
        b: tuple[_Shape, ...],
        both: Callable[[_Shape, _Shape], _Shape | None],
    ) -> tuple[_Shape, ...]:
        if len(a) * len(b) > 10 * MAX_SHAPES:
            raise _too_many_alternatives_error()
        return self._distinct(shape for p in a for q in b if (shape := both(p, q)) is not None)

    def _distinct(self, shapes: Iterable[_Shape]) -> tuple[_Shape, ...]:
        distinct: dict[_Shape, None] = {}
        for shape in shapes:
            distinct[shape] = None
            self._spend(
                _SHAPE
                + (len(shape.members) if isinstance(shape, ObjectShape) else len(shape.prefix))
            )
            if len(distinct) > MAX_SHAPES:
                raise _too_many_alternatives_error()
        for every in (ArrayShape(), ObjectShape()):
            if every in distinct and all(shape.evaluated == every.evaluated for shape in distinct):
                return tuple(shape for shape in distinct if shape == every)
        return tuple(distinct)

    def expand_few_choices(self, values: ValueSet, most: float) -> ValueSet:
        """Replaces a shape that has choices with several shapes without choices, one for each
        combination. A shape with more than `most` combinations stays as it is.
        """
        if not any(shape.choices for shape in values.objects):
            return values
        objects = [
            each
            for shape in values.objects
            for each in (
                self._expand_choices((shape,))
                if math.prod(map(len, shape.choices)) <= most
                else (shape,)
            )
        ]
        return replace(values, objects=self._distinct(objects))

    def _expand_choices(self, shapes: tuple[_Shape, ...]) -> tuple[_Shape, ...]:
        """Returns shapes without choices that together allow the same values."""
        if not any(isinstance(shape, ObjectShape) and shape.choices for shape in shapes):
            return shapes
        found: list[Any] = []
        for shape in shapes:
            assert isinstance(shape, ObjectShape)
            product: tuple[ObjectShape, ...] = (replace(shape, choices=()),)
            for choice in shape.choices:
                product = self._product(product, choice, self._both_objects)
            found += product
        return self._distinct(found)

    def _with_choices(
        self, shape: ObjectShape, choices: Iterable[_Choice], possible: Collection[_Choice]
    ) -> ObjectShape | None:
        """Adds choices to a shape. Choices about the same names are merged. Returns None if the
        result is empty.

        Args:
            possible: choices whose alternatives need no check unless the choice is merged.
        """
        groups: list[_Choice] = []
        for choice in choices:
            names = _choice_member_names(choice)
            for other in [
                group for group in groups if names.keys() & _choice_member_names(group).keys()
            ]:
                groups.remove(other)
                choice = self._product(other, choice, self._both_objects)
            groups.append(choice)
        left = []
        for group in groups:
            if group not in possible:
                found = [
                    (alternative, self._both_objects(shape, alternative)) for alternative in group
                ]
                kept = [
                    (alternative, both)
                    for alternative, both in found
                    if both is not None and self._possible(both)
                ]
                if len(kept) < 2:
                    if not kept:
                        return None
                    shape = kept[0][1]
                    continue
                group = tuple(alternative for alternative, _ in kept)
            left.append(group)
        return replace(shape, choices=tuple(left))

    def _both_objects(self, a: ObjectShape, b: ObjectShape) -> ObjectShape | None:
        if a == ObjectShape():
            return b
        if b == ObjectShape():
            return a
        members = []
        ours, theirs = ({member.name: member for member in shape.members} for shape in (a, b))
        for name in ours | theirs:
            first = ours.get(name) or a.member_for_unlisted(name)
            second = theirs.get(name) or b.member_for_unlisted(name)
            formula = all_of(first.formula, second.formula)
            required = first.required or second.required
            if required and (
                formula is False or (isinstance(formula, AllOf) and self._empty(formula))
            ):
                return None
            members.append(Member(name, formula, required))
        others = []
        for names, f in a.others:
            for more, g in b.others:
                common = self.intersect_strings(names, more)
                formula = all_of(f, g)
                if common != NOTHING and formula is not False:
                    others.append((common, formula))
        shape = ObjectShape(
            tuple(members),
            tuple(others),
            max(a.least, b.least),
            _smaller_limit(a.most, b.most),
            tuple(dict.fromkeys((*a.requirements, *b.requirements))),
            alternation([a.evaluated, b.evaluated]),
            (a if a.least >= b.least else b).count_pointer,
        )
        if shape.requires_too_many_members() or not all(
            self._may_satisfy_requirement(shape, requirement) for requirement in shape.requirements
        ):
            return None
        if not a.choices and not b.choices:
            return shape
        return self._with_choices(
            shape,
            (*a.choices, *b.choices),
            {*_unaffected_choices(a, b), *_unaffected_choices(b, a)},
        )

    def _may_satisfy_requirement(
        self, shape: ObjectShape, requirement: tuple[Node, Formula]
    ) -> bool:
        names, formula = requirement
        if any(
            accepts(names, m.name) and not self._empty(all_of(m.formula, formula))
            for m in shape.members
        ):
            return True
        free = self.intersect_strings(names, shape.unlisted_names_language)
        return any(
            self.intersect_strings(free, more) != NOTHING
            and not self._empty(all_of(other, formula))
            for more, other in shape.others
        )

    def _intersect_arrays(self, a: ArrayShape, b: ArrayShape) -> ArrayShape | None:
        if a == ArrayShape():
            return b
        if b == ArrayShape():
            return a
        prefix = [
            all_of(a.item_formula(i), b.item_formula(i))
            for i in range(max(len(a.prefix), len(b.prefix)))
        ]
        rest = all_of(a.rest, b.rest)
        most = _smaller_limit(a.most, b.most)
        for i, formula in enumerate((*prefix, rest)):
            if formula is False:
                most = _smaller_limit(most, i)
        least = max(a.least, b.least)
        if most is not None and least > most:
            return None
        if most is not None:
            prefix = prefix[:most]
        if any(isinstance(f, AllOf) and self._empty(f) for f in (*prefix, rest)[:least]):
            return None
        (m, some), (n, more) = a.evaluated, b.evaluated
        evaluated = (
            None if m is None or n is None else max(m, n),
            tuple(dict.fromkeys((*some, *more))),
        )
        contains = tuple(dict.fromkeys((*a.contains, *b.contains)))
        return ArrayShape(
            tuple(prefix),
            rest,
            least,
            most,
            contains,
            a.unique_pointer or b.unique_pointer,
            evaluated,
            a.set_pointer or b.set_pointer,
            _smaller_limit(a.repeats, b.repeats),
        )


def _unaffected_choices(shape: ObjectShape, other: ObjectShape) -> list[_Choice]:
    """Returns the choices of `shape` about names that `other` does not restrict."""
    if not replace(other, choices=()).only_names_members:
        return []
    names = {member.name for member in other.members}.union(
        *map(_choice_member_names, other.choices)
    )
    return [choice for choice in shape.choices if names.isdisjoint(_choice_member_names(choice))]


def _choice_member_names(choice: Iterable[ObjectShape]) -> dict[str, None]:
    return {member.name: None for shape in choice for member in shape.members}


def _merge_into_choice(shapes: tuple[ObjectShape, ...]) -> tuple[ObjectShape, ...]:
    """Replaces several shapes with one shape that has a choice among them, if they only restrict
    members by name. Independent choices then need not be expanded into all their combinations.
    """
    if len(shapes) > 1 and all(shape.only_names_members for shape in shapes):
        return (ObjectShape(choices=(shapes,)),)
    return shapes


def _too_many_alternatives_error() -> ConstraintError:
    return ConstraintError(
        "json_schema: too complex: its alternatives multiply.",
        hint="Use fewer or simpler allOf, anyOf, oneOf, not, if and dependencies in one place.",
    )


def intersection_of_strings(a: Node, b: Node) -> Node:
    """Returns a node for the strings in both languages, or NOTHING if the intersection is empty."""
    return _intersect_strings_and_work(a, b)[0]


def _intersect_strings_and_work(a: Node, b: Node) -> tuple[Node, int]:
    """Returns the strings in both languages, and the work spent."""
    if ANY_TEXT in (a, b):
        return _node_unless_empty(a if b == ANY_TEXT else b)
    for finite, other in ((a, b), (b, a)):
        texts = literal_texts(finite)
        if texts is not None:
            options = finite.options if isinstance(finite, Alternation) else (finite,)
            common = alternation(
                option for option, text in zip(options, texts) if accepts(other, text)
            )
            return common, sum(map(len, texts))
    for limits, other in ((a, b), (b, a)):
        if isinstance(limits, Repeat) and limits.node == ANY_CHAR:
            shorter = limit_length(other, limits.least, limits.most)
            if shorter is not None:
                return _node_unless_empty(shorter)
    return _node_unless_empty(intersection(a, b))


def _node_unless_empty(node: Node) -> tuple[Node, int]:
    """Returns a node, or NOTHING if its language is empty, and the work spent on the decision."""
    if not isinstance(node, Intersection | Complement):
        return node, 1
    # other strings remain
    if isinstance(node, Complement) and (texts := literal_texts(node.node)) is not None:
        return node, len(texts)
    empty, work = decide_emptiness(node)
    return NOTHING if empty else node, _STATE * work


def complement_strings(language: Node) -> Node:
    """Returns a node for the strings that are not in a language, or NOTHING if it contains all
    strings.
    """
    return _node_unless_empty(complement(language))[0]


def _smaller_limit(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _complement_object_shape(shape: ObjectShape) -> Iterable[ObjectShape]:
    """Yields shapes that together contain all objects that are not in a shape."""
    free = shape.unlisted_names_language
    for name, formula, required in shape.members:
        if required:
            yield ObjectShape((Member(name, False, False),))
        if formula is not True:
            yield ObjectShape((Member(name, not_(formula), True),))
    allowed = alternation(names for names, _ in shape.others)
    forbidden = intersection_of_strings(free, complement(allowed))
    if forbidden != NOTHING:
        yield ObjectShape(requirements=((forbidden, True),))
    for names, formula in shape.others:
        if formula is not True:
            names = intersection_of_strings(names, free)
            if names != NOTHING:
                yield ObjectShape(requirements=((names, not_(formula)),))
    if shape.least:
        yield ObjectShape(most=shape.least - 1)
    if shape.most is not None:
        yield ObjectShape(least=shape.most + 1, count_pointer=shape.count_pointer)
    for names, formula in shape.requirements:
        others = ((names, not_(formula)), (complement_strings(names), True))
        yield ObjectShape(
            others=tuple(each for each in others if each[0] != NOTHING and each[1] is not False)
        )


def _complement_array_shape(shape: ArrayShape) -> Iterable[ArrayShape]:
    """Yields shapes that together contain all arrays that are not in a shape."""
    for i, formula in enumerate(shape.prefix):
        if formula is not True:
            yield ArrayShape((True,) * i + (not_(formula),), least=i + 1)
    if shape.rest is not True:
        yield ArrayShape(contains=(Contains(not_(shape.rest), len(shape.prefix), 1, None),))
    if shape.least:
        yield ArrayShape(most=shape.least - 1)
    if shape.most is not None:
        yield ArrayShape(least=shape.most + 1)
    for formula, start, least, most in shape.contains:
        if least:
            yield ArrayShape(contains=(Contains(formula, start, 0, least - 1),))
        if most is not None:
            yield ArrayShape(contains=(Contains(formula, start, most + 1, None),))
    if shape.unique_pointer is not None:
        raise ConstraintError(
            "json_schema: the negation of uniqueItems (by not, oneOf or if) can't be enforced.",
            pointer=shape.unique_pointer,
            hint="Leave uniqueItems or the negation out, or set enforce='best_effort'.",
        )
