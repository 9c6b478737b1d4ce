"""The style of generated JSON: whitespace, the order of members, and the spelling of whole numbers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_lite.constraints.formal.automaton import accepts, is_empty, shortest
from sglang_lite.constraints.formal.nodes import (
    EMPTY,
    Node,
    complement,
    concat,
    intersection,
    literal,
)
from sglang_lite.constraints.syntax.regex import one_line_message, parse
from sglang_lite.protocol import ConstraintError, JsonSchema

JSON_WORDS = ("null", "false", "true")
_BLANKS = r"[ \t\r\n]*"  # RFC 8259, 2


@dataclass(frozen=True, slots=True)
class Style:
    """Style of JSON text.

    Attributes:
        gap: whitespace after an opening bracket or brace, and before a closing one.
        comma, colon: separators with the whitespace around them.
        any_order: True if members may come in any order.
        decimals: True if whole numbers may have a fraction of zeros.
        separators: one fixed text each for comma and colon, used to write a given value.
        gap_text: one fixed text for `gap`, used for the same purpose.
        words: texts of null, false and true.
        quote: mark before and after a string. Strings between marks other than double quotes are
            written verbatim.
        bare_names: True if members' names have no quotes.
    """

    gap: Node
    comma: Node
    colon: Node
    any_order: bool = False
    decimals: bool = False
    separators: tuple[str, str] = (", ", ": ")
    gap_text: str = ""
    words: tuple[str, str, str] = JSON_WORDS
    quote: str = '"'
    bare_names: bool = False


def read_json_style(constraint: JsonSchema) -> Style:
    """Returns the style of a constraint.

    Raises:
        ConstraintError: the `whitespace` pattern is not valid, or allows more than whitespace.
    """
    any_order = constraint.order == "any"
    decimals = constraint.integers == "decimal"
    if constraint.whitespace in ("json", "compact"):
        separators = constraint.separators if constraint.whitespace == "json" else (",", ":")
        comma, colon = map(literal, separators)
        return Style(EMPTY, comma, colon, any_order, decimals, separators)
    gap = _parse_whitespace_pattern(constraint.whitespace)
    gap_text = "" if accepts(gap, "") else shortest(gap)
    after = gap_text or (" " if accepts(gap, " ") else "")
    comma, colon = (concat(gap, literal(sign), gap) for sign in ",:")
    return Style(
        gap,
        comma,
        colon,
        any_order,
        decimals,
        (f"{gap_text},{after}", f"{gap_text}:{after}"),
        gap_text,
    )


def _parse_whitespace_pattern(pattern: str) -> Node:
    if pattern == "free":
        return parse(_BLANKS)
    try:
        gap = parse(pattern)
    except ConstraintError as error:
        raise ConstraintError(
            f"json_schema: whitespace: {one_line_message(error.message)}", hint=error.hint
        ) from error
    if is_empty(gap):
        raise ConstraintError(f"json_schema: whitespace: the pattern {pattern!r} allows no text.")
    if is_empty(intersection(gap, complement(EMPTY))):
        raise ConstraintError(
            f"json_schema: whitespace: the pattern {pattern!r} allows no blanks.",
            hint='Give "compact" for none.',
        )
    if not is_empty(intersection(gap, complement(parse(_BLANKS)))):
        raise ConstraintError(
            f"json_schema: whitespace: the pattern {pattern!r} allows more than blanks, tabs and line ends.",
            hint='Give "json", "compact", "free", or a pattern like r"\\n? *".',
        )
    return gap
