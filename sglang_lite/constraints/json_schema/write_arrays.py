"""Grammars of arrays.

Where more is asked than what each item is (`contains`, `uniqueItems`), a rule stands for a place between items: how
many there have been, how many of them count for what, and which values are used up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations, product
from math import comb

from sglang_lite.constraints.formal.nodes import (
    EMPTY,
    NOTHING,
    Node,
    Ref,
    alternation,
    concat,
    literal,
    optional,
    repeat,
    texts_of,
)
from sglang_lite.constraints.json_schema import write_numbers
from sglang_lite.constraints.json_schema.formulas import Const, Formula, all_of, not_
from sglang_lite.constraints.json_schema.notation import Notation
from sglang_lite.constraints.json_schema.values import ArrayShape, ValueSet
from sglang_lite.protocol import ConstraintError

MAX_SUBSETS = 500  # sets of values that may have been used
MAX_COMPARED = 12  # items that are held against each other


def array_text(writer: Notation, shape: ArrayShape) -> Node:
    """The texts of the arrays of a shape.

    Raises:
        ConstraintError: its items have to be unique, and that can't be enforced.
    """
    if shape.most is not None and shape.least > shape.most:
        return NOTHING
    start, end = writer.brackets
    opening = writer.rule(start, lambda: literal(start)) if start else EMPTY
    unique = shape.unique is not None and not _different(writer, shape)
    if shape.contains or unique:
        return concat(
            opening, _ArrayWriter(writer, shape, unique=unique).place(0, (0,) * len(shape.contains), frozenset())
        )
    return concat(opening, _items(writer, shape), literal(end))


def _items(writer: Notation, shape: ArrayShape) -> Node:
    least, most, first = shape.least, shape.most, shape.prefix
    comma = literal(writer.comma)

    def more(count: int) -> Node:
        """The items that are not in the prefix, after `count` others."""
        rest = writer.item(shape.rest)
        fewer, less = max(0, least - count), None if most is None else most - count
        if shape.rest is False or less == 0:
            return NOTHING if fewer else literal("")
        if count:
            return repeat(concat(comma, rest), fewer, less)
        following = repeat(concat(comma, rest), max(0, fewer - 1), None if less is None else less - 1)
        items = concat(rest, following)
        return items if fewer else optional(items)

    if most is not None:
        first = first[:most]
    text = more(len(first))
    for i in reversed(range(len(first))):
        item = concat(comma, writer.item(first[i])) if i else writer.item(first[i])
        text = concat(item, text) if i < least else optional(concat(item, text))
    return text


def _different(writer: Notation, shape: ArrayShape) -> bool:
    """Tells whether any two items differ, whatever they are."""
    if shape.most is None and shape.rest is not False:
        return False
    most = len(shape.prefix) if shape.most is None else shape.most
    if most > MAX_COMPARED:
        return False
    return all(writer.reader.empty(all_of(shape.item(i), shape.item(j))) for i, j in combinations(range(most), 2))


def _all_of_them(values: ValueSet) -> list[Formula] | None:
    """The values of a set one by one, None where they are not a few scalars."""
    counted = [piece.members() for piece in values.numbers]
    strings = texts_of(values.strings)
    if values.arrays or values.objects or strings is None or None in counted:
        return None
    texts = ["null"] if values.null else []
    texts += ["true" if value else "false" for value in sorted(values.booleans)]
    texts += dict.fromkeys(write_numbers.decimal_text(value) for piece in counted for value in piece or ())
    return [Const(text) for text in (*texts, *(json.dumps(text, ensure_ascii=False) for text in strings))]


class _ArrayWriter:
    def __init__(self, writer: Notation, shape: ArrayShape, *, unique: bool) -> None:
        self._writer, self._shape, self._number = writer, shape, writer.number(shape)
        self._values = self._few_values() if unique else None
        # From this item on all items are alike, so that places after it need not be told apart.
        self._alike = max(len(shape.prefix), shape.least, *(each.start for each in shape.contains), 0)

    def _few_values(self) -> list[Formula]:
        shape = self._shape
        found: dict[Formula, None] | None = {}
        for formula in (*shape.prefix, shape.rest):
            values = _all_of_them(self._writer.reader.values(formula))
            found = None if found is None or values is None else found | dict.fromkeys(values)
        if found is not None:
            most = len(found) if shape.most is None else min(shape.most, len(found))
            if sum(comb(len(found), count) for count in range(most + 1)) <= MAX_SUBSETS:
                return list(found)
        raise ConstraintError(
            "json_schema: that items are unique can't be enforced, but for a handful of scalars.",
            pointer=shape.unique,
            hint="Leave uniqueItems out, list up to 8 items in an enum, or: enforce='best_effort'.",
        )

    def place(self, index: int, counts: tuple[int, ...], used: frozenset[Formula]) -> Ref:
        key = self._number, index, counts, used
        return self._writer.rule(key, lambda: self._body(index, counts, used))

    def _body(self, index: int, counts: tuple[int, ...], used: frozenset[Formula]) -> Node:
        shape = self._shape
        options: list[Node] = []
        if index >= shape.least and all(count >= each.least for count, each in zip(counts, shape.contains)):
            options.append(literal(self._writer.brackets[1]))
        if shape.most is None or index < shape.most:
            after = index + 1 if shape.most is not None else min(index + 1, max(1, self._alike))
            for formula, now in self._counting(index, counts):
                for value in [None] if self._values is None else self._values:
                    if value is not None and value in used:
                        continue
                    item = self._writer.item(formula if value is None else all_of(formula, value))
                    place = self.place(after, now, used if value is None else used | {value})
                    options.append(concat(*([literal(self._writer.comma)] if index else []), item, place))
        return alternation(options)

    def _counting(self, index: int, counts: tuple[int, ...]) -> Iterator[tuple[Formula, tuple[int, ...]]]:
        """Formulas of the next item, counted for each `contains` or not, with the counts after it."""
        choices: list[list[tuple[Formula, int]]] = []
        for count, (formula, start, least, most) in zip(counts, self._shape.contains):
            if index < start or (most is None and count >= least):
                choices.append([(True, count)])
            elif most is None:
                choices.append([(formula, count + 1), (True, count)])
            else:
                choices.append([(formula, count + 1)] * (count < most) + [(not_(formula), count)])
        for choice in product(*choices):
            yield all_of(self._shape.item(index), *(formula for formula, _ in choice)), tuple(now for _, now in choice)
