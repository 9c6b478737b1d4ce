"""Writes objects in the notation of a call's arguments (`Notation`): `a=1, b="x"`.

The values are written like JSON, in a style with the notation's words and quotes. Each array and
object has its own rule, whose lexemes may be read greedily. Other values are part of a lexeme with
their names, so that the calls of many tools have few lexemes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from sglang_lite.constraints.formal.nodes import (
    EMPTY,
    NOTHING,
    Language,
    Node,
    Ref,
    alternation,
    concat,
    literal,
)
from sglang_lite.constraints.json_schema.formulas import Formula
from sglang_lite.constraints.json_schema.grammar_writer import (
    GrammarWriter,
    locate_errors_at_formula,
)
from sglang_lite.constraints.json_schema.mask_rules import MaskedShapes
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.style import Style
from sglang_lite.constraints.json_schema.values import (
    ArrayShape,
    ObjectShape,
    intersection_of_strings,
)
from sglang_lite.constraints.json_schema.write_objects import write_object
from sglang_lite.constraints.json_schema.write_scalars import scalar_texts
from sglang_lite.constraints.json_schema.write_strings import bare_names, write_bare_names
from sglang_lite.protocol import ConstraintError, Notation


class ArgumentListWriter:
    """Writes the members of objects as arguments.

    Args:
        reader: reader of the schema.
        style: style of JSON for everything that the notation doesn't define.
        notation: notation of the arguments.
    """

    opening: Node = EMPTY
    closing: Node = EMPTY
    any_order = plain = False
    masked_shapes: MaskedShapes | None = None

    def __init__(self, reader: SchemaReader, style: Style, notation: Notation) -> None:
        self.reader = reader
        self.comma: Node = literal(notation.comma)
        self._equals = literal(notation.equals)
        style = replace(style, any_order=False, words=notation.words, quote=notation.quote)
        if notation.nested:
            style = replace(style, comma=self.comma, colon=self._equals, bare_names=True)
        self._style = style
        self._values = GrammarWriter(reader, style)
        self._sealed: set[str] = set()

    @property
    def contradicts(self) -> bool:
        """True if a requested language has no text."""
        return self._values.contradicts

    def language(self, formula: Formula) -> Language:
        """Returns the language of the texts of a formula's objects.

        Raises:
            ConstraintError: the formula has no objects, or something can't be enforced or written;
                the error has a JSON Pointer.
        """

        def body() -> Node:
            with locate_errors_at_formula(formula):
                shapes = self.reader.values(formula).objects
                return alternation(
                    write_object(self, _keep_described_members(shape)) for shape in shapes
                )

        start = self.rule(("arguments", formula), body)
        return self._values.finish_language(start, self._sealed)

    def rule(self, key: Hashable, body: Callable[[], Node]) -> Ref:
        return self._values.rule(("argument", key), body)

    def number(self, shape: ArrayShape | ObjectShape) -> int:
        return self._values.number(shape)

    def write_item(self, formula: Formula) -> Node:
        raise AssertionError("arguments are no array")

    def write_unique_item(self, formula: Formula) -> Node:
        raise AssertionError("arguments are no array")

    def write_listed_values(self, formula: Formula) -> Node:
        raise AssertionError("no masks check arguments")

    def member(self, names: Node, formula: Formula, *, first: bool) -> Node:
        with locate_errors_at_formula(formula):
            name = write_bare_names(names, EMPTY if first else self.comma, self._equals)
        return self.rule((name, formula), lambda: concat(name, self._write_value(formula)))

    def _write_value(self, formula: Formula) -> Node:
        with locate_errors_at_formula(formula):
            values = self.reader.values(formula)
            style = self._style
            scalars = scalar_texts(
                values, decimals=style.decimals, words=style.words, quote=style.quote
            )
            if not values.arrays and not values.objects:
                if scalars == NOTHING and values.strings != NOTHING:
                    raise ConstraintError(
                        f"json_schema: no string is possible without {style.quote!r} in it."
                    )
                return scalars
            containers = self._values.rule(
                ("containers", formula), lambda: alternation(self._values.containers(values))
            )
            self._sealed.add(containers.name)
            return alternation([scalars, containers])

    def text_after_members(self, *, empty: bool) -> Node:
        return EMPTY


def _keep_described_members(shape: ObjectShape) -> ObjectShape:
    """Returns a shape without members that the schema does not describe."""
    shape = shape.expand_finite_names()
    others = (
        (names, formula)
        for all_names, formula in shape.others
        if not isinstance(formula, bool)
        and (names := intersection_of_strings(all_names, bare_names())) != NOTHING
    )
    return replace(shape, others=tuple(others))
