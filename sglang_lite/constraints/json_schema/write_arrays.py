"""Grammar of arrays.

If there are requirements beyond the formula of each item (`contains`, `uniqueItems`), a
rule stands for a position between items: the number of items so far, how many of them
count for each `contains`, and which values have been used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, product
from math import comb

from sglang_lite.constraints.formal.counting import count_texts
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Node,
    Ref,
    alternation,
    concat,
    literal,
    literal_texts,
    optional,
    repeat,
)
from sglang_lite.constraints.json_schema import write_numbers
from sglang_lite.constraints.json_schema.container_writer import ContainerWriter
from sglang_lite.constraints.json_schema.document import REFERENCES
from sglang_lite.constraints.json_schema.formulas import Const, Formula, all_of, not_
from sglang_lite.constraints.json_schema.mask_rules import DistinctItems
from sglang_lite.constraints.json_schema.values import ANY_VALUE, ArrayShape, ValueSet
from sglang_lite.constraints.json_schema.write_scalars import scalar_texts
from sglang_lite.protocol import ConstraintError

MAX_SUBSETS = 500  # maximum number of sets of used values
MAX_COMPARED = 12  # maximum number of items that are compared pairwise
MAX_DISTINCT = 1_000  # maximum number of required different items, or of listed values

_NOT_HERE = "json_schema: inside another constraint, uniqueItems can only be enforced for a few listed scalars."
_ADVICE = "Leave uniqueItems out, list up to 8 items in an enum, or set enforce='best_effort'."


def write_array(writer: ContainerWriter, shape: ArrayShape) -> Node:
    """Returns a node for the texts of the arrays of a shape.

    Raises:
        ConstraintError: the items must be unique, and that can't be enforced.
    """
    if shape.most is not None and shape.least > shape.most:
        return NOTHING
    opening = EMPTY if writer.opening == EMPTY else writer.rule("[", lambda: writer.opening)
    if shape.unique_pointer is not None:
        return concat(opening, _write_unique_items(writer, shape))
    if shape.set_pointer is not None:
        try:
            return concat(opening, _write_unique_items(writer, shape))
        except ConstraintError:  # a set may repeat items unless it needs too many
            if writer.plain or shape.least > MAX_DISTINCT:
                raise
    return concat(opening, _write_any_items(writer, shape))


def _write_any_items(writer: ContainerWriter, shape: ArrayShape) -> Node:
    """Returns a node for the texts of items that need not differ, and the closing bracket."""
    if shape.contains:
        return _ArrayWriter(writer, shape, unique=False).position(
            0, (0,) * len(shape.contains), frozenset()
        )
    return concat(_write_item_sequence(writer, shape), writer.closing)


def _write_unique_items(writer: ContainerWriter, shape: ArrayShape) -> Node:
    """Returns a node for the texts of different items and the closing bracket. The grammar or the
    masks ensure that the items differ.

    Raises:
        ConstraintError: the masks could not detect early enough that no unused value remains.
    """
    if _items_always_differ(writer, shape):
        return _write_any_items(writer, shape)
    positions = [shape.item_formula(i) for i in range(len(shape.prefix))] + (
        [] if shape.rest is False else [shape.rest]
    )
    if not positions or _list_unique_values(writer, shape) is not None:
        return _ArrayWriter(writer, shape, unique=True).position(
            0, (0,) * len(shape.contains), frozenset()
        )
    with _locate_errors_at_unique_items(shape):
        if writer.masked_shapes is None:
            raise ConstraintError(_NOT_HERE, hint=_ADVICE)
        if shape.contains:
            raise ConstraintError(
                "json_schema: uniqueItems and contains can't be enforced together."
            )
        if shape.least > MAX_DISTINCT:
            raise ConstraintError(
                f"json_schema: more than {MAX_DISTINCT:,} different items are required.",
                hint="Lower minItems, or the minimum length of the set.",
            )
        texts = tuple(_write_unique_item_values(writer, formula) for formula in positions)
        if not _has_enough_values(writer, shape, positions, texts):
            return NOTHING
        for node in texts:
            if node != NOTHING:
                count_texts(node)  # raises if the language is too large for the masks to count
    writer.masked_shapes.items[shape] = DistinctItems(texts)
    return concat(_write_item_sequence(writer, shape, writer.write_unique_item), writer.closing)


def _has_enough_values(
    writer: ContainerWriter, shape: ArrayShape, positions: list[Formula], texts: tuple[Node, ...]
) -> bool:
    """Returns True if the required number of items can all have different values.

    Raises:
        ConstraintError: the first items might use up the values of later items.
    """
    for i in range(min(shape.least, len(positions))):
        last = shape.least - 1 if i == len(positions) - 1 and shape.rest is not False else i
        count = count_texts(texts[i]).count if texts[i] != NOTHING else 0
        if count is None or count > last or _allows_any_value(writer.reader.values(positions[i])):
            continue
        if shape.prefix:
            raise ConstraintError(
                "json_schema: uniqueItems can't be enforced: the first items may use up the values of later ones.",
                hint=_ADVICE,
            )
        return False
    return True


def _allows_any_value(values: ValueSet) -> bool:
    return replace(values, inexact=False) == ANY_VALUE


def _can_always_continue(writer: ContainerWriter, values: ValueSet) -> bool:
    """Returns True if every array in a set may get another item, and every object another member.
    The masks can then always avoid a value that equals an earlier one.
    """
    empty = writer.reader.is_known_empty
    return all(
        shape.most is None
        and not shape.contains
        and shape.unique_pointer is None
        and not empty(shape.rest)
        for shape in values.arrays
    ) and all(
        shape.most is None
        and any(
            _has_endless_texts(names) and not empty(each)
            for names, each in shape.others_outside_members()
        )
        for shape in values.objects
    )


def _has_endless_texts(names: Node) -> bool:
    return names == ANY_TEXT or count_texts(names).count is None


def _write_unique_item_values(writer: ContainerWriter, formula: Formula) -> Node:
    """Returns a node for the texts of items with one spelling for each value. Arrays and objects
    that can always be extended to differ are represented by all texts that begin with their opening
    bracket.

    Raises:
        ConstraintError: the items include objects or arrays whose texts can't be listed.
    """
    values = writer.reader.values(formula)
    if _allows_any_value(values):
        return _write_unique_scalars(values)  # these never run out
    if _can_always_continue(writer, values):
        openings = [*(["["] if values.arrays else []), *(["{"] if values.objects else [])]
        return alternation(
            [_write_unique_scalars(values), *(concat(literal(each), ANY_TEXT) for each in openings)]
        )
    try:
        return writer.write_listed_values(formula)
    except ConstraintError as error:
        # the reference has no target
        if error.pointer is not None and error.pointer.rpartition("/")[2] in REFERENCES:
            raise
        why = error.message.removeprefix("json_schema: ").removesuffix(
            f" (at {error.pointer or '/'})"
        )
        raise ConstraintError(
            f"json_schema: uniqueItems can't be enforced for these objects and arrays: {why}",
            hint=_ADVICE,
        ) from error


def _write_unique_scalars(values: ValueSet) -> Node:
    """Returns a node for the texts of the scalars of a set, with one spelling for each value."""
    listed = literal_texts(values.strings)
    if len(listed or ()) + len(values.numbers) > MAX_DISTINCT:
        raise ConstraintError(
            f"json_schema: uniqueItems can't be enforced for more than {MAX_DISTINCT:,} values in a list.",
            hint=_ADVICE,
        )
    return scalar_texts(values, plain=True)


@contextmanager
def _locate_errors_at_unique_items(shape: ArrayShape) -> Iterator[None]:
    """Adds the pointer of the keyword that forbids equal items to errors raised inside."""
    try:
        yield
    except ConstraintError as error:
        if error.pointer is not None:
            raise
        raise ConstraintError(
            error.message, pointer=shape.unique_pointer or shape.set_pointer, hint=error.hint
        ) from error


def _write_item_sequence(
    writer: ContainerWriter, shape: ArrayShape, item_text: Callable[[Formula], Node] | None = None
) -> Node:
    least = shape.least
    most = shape.most
    first = shape.prefix
    comma = writer.comma
    item_text = item_text or writer.write_item

    def more(count: int) -> Node:
        """Returns a node for the texts of the items after the prefix, given that `count` items have
        been written so far.
        """
        fewer = max(0, least - count)
        less = None if most is None else most - count
        if shape.rest is False or less == 0:
            return NOTHING if fewer else EMPTY
        rest = item_text(shape.rest)
        if count:
            return repeat(concat(comma, rest), fewer, less)
        following = repeat(
            concat(comma, rest), max(0, fewer - 1), None if less is None else less - 1
        )
        items = concat(rest, following)
        return items if fewer else optional(items)

    if most is not None:
        first = first[:most]
    text = more(len(first))
    for i in reversed(range(len(first))):
        item = concat(comma, item_text(first[i])) if i else item_text(first[i])
        text = concat(item, text) if i < least else optional(concat(item, text))
    return text


def _items_always_differ(writer: ContainerWriter, shape: ArrayShape) -> bool:
    """Returns True if no two items can have the same value."""
    if shape.most is None and shape.rest is not False:
        return False
    most = len(shape.prefix) if shape.most is None else shape.most
    if most > MAX_COMPARED:
        return False
    return all(
        writer.reader.is_known_empty(all_of(shape.item_formula(i), shape.item_formula(j)))
        for i, j in combinations(range(most), 2)
    )


def _list_scalar_formulas(values: ValueSet) -> list[Formula] | None:
    """Returns the values of a set, each as a formula. Returns None if there are arrays, objects or
    too many scalars.
    """
    strings = literal_texts(values.strings)
    if (
        values.arrays
        or values.objects
        or strings is None
        or len(strings) + len(values.numbers) >= MAX_SUBSETS
    ):
        return None
    counted = [piece.members() for piece in values.numbers]
    if None in counted:
        return None
    texts = ["null"] if values.null else []
    texts += ["true" if value else "false" for value in sorted(values.booleans)]
    texts += dict.fromkeys(
        write_numbers.decimal_text(value) for piece in counted for value in piece or ()
    )
    return [
        Const(text)
        for text in (*texts, *(json.dumps(text, ensure_ascii=False) for text in strings))
    ]


def _list_unique_values(writer: ContainerWriter, shape: ArrayShape) -> list[Formula] | None:
    """Returns the possible values of unique items, each as a formula. Returns None if there are too
    many for a grammar to remember which values were used.
    """
    if shape.most == 0:
        return []
    found: dict[Formula, None] = {}
    for formula in (*shape.prefix, shape.rest):
        values = _list_scalar_formulas(writer.reader.values(formula))
        if values is None:
            return None
        found |= dict.fromkeys(values)
    most = len(found) if shape.most is None else min(shape.most, len(found))
    if most and len(found) >= MAX_SUBSETS:
        return None
    return (
        list(found)
        if sum(comb(len(found), count) for count in range(most + 1)) <= MAX_SUBSETS
        else None
    )


class _ArrayWriter:
    def __init__(self, writer: ContainerWriter, shape: ArrayShape, *, unique: bool) -> None:
        self._writer = writer
        self._shape = shape
        self._number = writer.number(shape)
        self._values = _list_unique_values(writer, shape) if unique else None
        # From this index all items have the same rules, so later positions need not be
        # distinguished.
        self._alike = max(
            len(shape.prefix), shape.least, *(each.start for each in shape.contains), 0
        )

    def position(self, index: int, counts: tuple[int, ...], used: frozenset[Formula]) -> Ref:
        key = self._number, index, counts, used
        return self._writer.rule(key, lambda: self._write_array_rest(index, counts, used))

    def _write_array_rest(
        self, index: int, counts: tuple[int, ...], used: frozenset[Formula]
    ) -> Node:
        shape = self._shape
        options: list[Node] = []
        if index >= shape.least and all(
            count >= each.least for count, each in zip(counts, shape.contains)
        ):
            options.append(self._writer.closing)
        if shape.most is None or index < shape.most:
            after = index + 1 if shape.most is not None else min(index + 1, max(1, self._alike))
            for formula, now in self._next_item_formulas(index, counts):
                for value in [None] if self._values is None else self._values:
                    if value is not None and value in used:
                        continue
                    item = self._writer.write_item(
                        formula if value is None else all_of(formula, value)
                    )
                    following = self.position(after, now, used if value is None else used | {value})
                    options.append(
                        concat(*([self._writer.comma] if index else []), item, following)
                    )
        return alternation(options)

    def _next_item_formulas(
        self, index: int, counts: tuple[int, ...]
    ) -> Iterator[tuple[Formula, tuple[int, ...]]]:
        """Yields the formulas that the next item may have, each with the new counts. There is a
        formula for each way in which the item can count for the bounds in `contains`.
        """
        choices: list[list[tuple[Formula, int]]] = []
        for count, (formula, start, least, most) in zip(counts, self._shape.contains):
            if index < start or (most is None and count >= least):
                choices.append([(True, count)])
            elif most is None:
                choices.append([(formula, count + 1), (True, count)])
            else:
                choices.append([(formula, count + 1)] * (count < most) + [(not_(formula), count)])
        for choice in product(*choices):
            yield (
                all_of(self._shape.item_formula(index), *(formula for formula, _ in choice)),
                tuple(now for _, now in choice),
            )
