"""JSON texts of the scalars of a set of values."""

from __future__ import annotations

from collections.abc import Collection

from sglang_lite.constraints.formal.nodes import NOTHING, Node, alternation, literal
from sglang_lite.constraints.json_schema import write_numbers
from sglang_lite.constraints.json_schema.numbers import Numbers
from sglang_lite.constraints.json_schema.values import ValueSet
from sglang_lite.constraints.json_schema.write_strings import quote_strings
from sglang_lite.constraints.memo import memoize


def scalar_texts(values: ValueSet, *, decimals: bool = False, plain: bool = False) -> Node:
    """Returns the texts of the scalars of a set.

    Args:
        values: the set, whose arrays and objects are left out.
        decimals: whether whole numbers may have a fraction of zeros.
        plain: whether each number has exactly one spelling.
    """
    return _write_scalar_kinds(
        values.null, values.booleans, values.numbers, values.strings, decimals, plain
    )


@memoize  # one node for all schemas, so that facts about it are computed only once
def _write_scalar_kinds(
    null: bool, truth: frozenset[bool], numbers: Numbers, strings: Node, decimals: bool, plain: bool
) -> Node:
    spelled = (
        write_numbers.write_plain_number_texts(numbers)
        if plain
        else write_numbers.texts(numbers, decimals=decimals)
    )
    options = [*([literal("null")] if null else []), booleans(truth), spelled]
    return alternation([*options, quote_strings(strings)] if strings != NOTHING else options)


def booleans(values: Collection[bool]) -> Node:
    """Returns the texts of some booleans."""
    return alternation(
        literal(text) for value, text in ((True, "true"), (False, "false")) if value in values
    )
