"""JSON texts of the scalars of a set of values."""

from __future__ import annotations

from collections.abc import Collection

from sglang_lite.constraints.formal.nodes import NOTHING, Node, alternation, literal
from sglang_lite.constraints.json_schema import write_numbers
from sglang_lite.constraints.json_schema.numbers import Numbers
from sglang_lite.constraints.json_schema.style import JSON_WORDS
from sglang_lite.constraints.json_schema.values import ValueSet
from sglang_lite.constraints.json_schema.write_strings import quote_strings, write_verbatim_strings
from sglang_lite.constraints.memo import memoize


def scalar_texts(
    values: ValueSet,
    *,
    decimals: bool = False,
    plain: bool = False,
    words: tuple[str, str, str] = JSON_WORDS,
    quote: str = '"',
) -> Node:
    """Returns a node for the texts of the scalars of a set.

    Args:
        values: the set, whose arrays and objects are left out.
        decimals: whether whole numbers may have a fraction of zeros.
        plain: whether each number has exactly one spelling.
        words: texts of null, false and true.
        quote: mark before and after a string (`Style.quote`).
    """
    return _write_scalar_kinds(
        values.null, values.booleans, values.numbers, values.strings, decimals, plain, words, quote
    )


@memoize  # one node for all schemas, so that facts about it are computed only once
def _write_scalar_kinds(
    null: bool,
    truth: frozenset[bool],
    numbers: Numbers,
    strings: Node,
    decimals: bool,
    plain: bool,
    words: tuple[str, str, str],
    quote: str,
) -> Node:
    spelled = (
        write_numbers.write_plain_number_texts(numbers)
        if plain
        else write_numbers.texts(numbers, decimals=decimals)
    )
    options = [*([literal(words[0])] if null else []), booleans(truth, words), spelled]
    if strings == NOTHING:
        return alternation(options)
    quoted = (
        quote_strings(strings)
        if quote == '"'
        else write_verbatim_strings(quote, strings, quote, quote)
    )
    return alternation([*options, quoted])


def booleans(values: Collection[bool], words: tuple[str, str, str] = JSON_WORDS) -> Node:
    """Returns a node for the texts of some booleans.

    Args:
        values: the booleans.
        words: texts of null, false and true.
    """
    return alternation(
        literal(text) for value, text in ((True, words[2]), (False, words[1])) if value in values
    )
