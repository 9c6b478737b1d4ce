"""Writes objects in the notation that some model families use for the arguments of tools: each
member between tags, strings unquoted (`Tags`).

Every member is one lexeme, or has one lexeme before and one after an array or object. If
the tags don't state a value's type, a string in a place that also allows arrays or
objects must not begin like one, so that the reader can distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache

from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Language,
    Node,
    Ref,
    alternation,
    complement,
    concat,
    literal,
    literal_text,
)
from sglang_lite.constraints.json_schema import write_numbers
from sglang_lite.constraints.json_schema.formulas import Formula, ValidAt
from sglang_lite.constraints.json_schema.grammar_writer import (
    GrammarWriter,
    locate_errors_at_formula,
)
from sglang_lite.constraints.json_schema.mask_rules import MaskedShapes
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.style import Style
from sglang_lite.constraints.json_schema.values import (
    NO_VALUE,
    ArrayShape,
    ObjectShape,
    ValueSet,
    intersection_of_strings,
)
from sglang_lite.constraints.json_schema.write_arrays import write_array
from sglang_lite.constraints.json_schema.write_objects import write_object
from sglang_lite.constraints.json_schema.write_scalars import booleans
from sglang_lite.constraints.json_schema.write_strings import write_verbatim_strings
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.protocol import ConstraintError, Tags

_STRING = 3  # index of strings in Tags.types


@cache
def _names() -> Node:
    """Returns a node for the names that can stand in a tag. Parsed on first use, because parsing
    would slow down the import.
    """
    return parse(r'[^\s<>"&/](?:[^<>"&\n\r]*[^\s<>"&])?')


@cache
def _non_container_texts() -> Node:
    """Returns a node for the texts that don't begin like a JSON array or object."""
    return parse(r"(?s)[ \t\r\n]*(?:[^ \t\r\n\[{].*)?")


class TaggedWriter:
    """Writes objects whose members stand between tags.

    Args:
        reader: reader of the schema.
        style: style of JSON inside the tags.
        tags: tags around the members.
    """

    opening: Node = EMPTY
    closing: Node = EMPTY
    comma: Node = EMPTY
    any_order = plain = False
    masked_shapes: MaskedShapes | None = None

    def __init__(self, reader: SchemaReader, style: Style, tags: Tags) -> None:
        self.reader = reader
        self._tags = tags
        self._json = GrammarWriter(reader, style)
        self._sealed: set[str] = set()

    @property
    def contradicts(self) -> bool:
        """True if a requested language has no text."""
        return self._json.contradicts

    def language(self, formula: Formula) -> Language:
        """Returns the language of the texts of a formula's objects.

        Raises:
            ConstraintError: the formula has no objects, or something can't be enforced or written;
                the error has a JSON Pointer.
        """
        return self._json.finish_language(self._tagged_objects_rule(formula), self._sealed)

    def rule(self, key: Hashable, body: Callable[[], Node]) -> Ref:
        return self._json.rule(("tagged", key), body)

    def number(self, shape: ArrayShape | ObjectShape) -> int:
        return self._json.number(shape)

    def write_item(self, formula: Formula) -> Node:
        assert self._tags.item is not None
        before, after = self._tags.item
        return self.rule(
            ("item", formula), lambda: self._write_tagged_value(before, EMPTY, after, formula)
        )

    def write_unique_item(self, formula: Formula) -> Node:
        raise AssertionError("no masks check what is between tags")

    def write_listed_values(self, formula: Formula) -> Node:
        raise AssertionError("no masks check what is between tags")

    def member(self, names: Node, formula: Formula, *, first: bool) -> Node:
        tags = self._tags
        return self.rule(
            (names, formula),
            lambda: self._write_tagged_value(tags.before, names, tags.after, formula),
        )

    def text_after_members(self, *, empty: bool) -> Node:
        return EMPTY

    # --------------------------------------------------------------------------------------- values

    def _write_tagged_value(self, before: str, names: Node, after: str, formula: Formula) -> Node:
        """Returns a node for the texts of a value with its tags, for one name or a language of
        names.
        """
        with locate_errors_at_formula(formula):
            name = literal_text(names)
            if (
                names != EMPTY
                and intersection_of_strings(names, _names()) != names
                and name is not None
            ):
                raise ConstraintError(
                    f"json_schema: the name {name!r} can't stand in a tag.", hint="Rename it."
                )
            lead: Node = EMPTY
            if name is None:
                prefix, before = before.split("{name}")
                lead = concat(literal(prefix), names)
            else:
                before = before.replace("{name}", name)
                after = after.replace("{name}", name)
            values = self.reader.values(formula)
            types = dict.fromkeys(self._tags.types)
            texts = [
                self._write_values_of_type(
                    before.replace("{type}", type_name), type_name, after, formula, values
                )
                for type_name in types
            ]
            found = alternation(texts)
            if found == NOTHING and values.strings != NOTHING:
                raise ConstraintError(
                    f"json_schema: no string is possible without {self._tags.mark!r} in it."
                )
            return concat(lead, found)

    def _write_values_of_type(
        self, before: str, type_name: str, after: str, formula: Formula, values: ValueSet
    ) -> Node:
        """Returns a node for the texts of the values of one type, with their tags. `type_name` is
        the name that tags have for the type.
        """
        null, boolean, number, string, array, object_ = (
            type_name == each for each in self._tags.types
        )
        scalars: list[Node] = [literal("null")] if null and values.null else []
        scalars += [booleans(values.booleans)] if boolean else []
        scalars += [write_numbers.texts(values.numbers)] if number else []
        containers = replace(
            NO_VALUE,
            arrays=values.arrays if array else (),
            objects=values.objects if object_ else (),
        )
        options = [
            concat(literal(before), texts, literal(after))
            for texts in (
                alternation(scalars),
                self._write_tagged_container(type_name, formula, containers),
            )
            if texts != NOTHING
        ]
        if string and values.strings != NOTHING:
            strings = values.strings
            if containers != NO_VALUE and self._tags.item is None:
                strings = intersection_of_strings(strings, _non_container_texts())
            options += self._write_wrapped_strings(before, strings, after)
        return alternation(options)

    def _write_wrapped_strings(self, before: str, strings: Node, after: str) -> list[Node]:
        """Returns nodes for the strings with their tags, and for the strings in the wrapper with
        their tags.
        """
        if self._tags.wrapper is None:
            return [write_verbatim_strings(before, strings, after, self._tags.mark)]
        opening, closing = self._tags.wrapper
        wrapped = concat(literal(opening), ANY_TEXT)
        bare = intersection_of_strings(strings, complement(wrapped))
        return [
            write_verbatim_strings(before, bare, after, self._tags.mark),
            write_verbatim_strings(
                f"{before}{opening}", strings, f"{closing}{after}", self._tags.mark
            ),
        ]

    def _write_tagged_container(self, type_name: str, formula: Formula, values: ValueSet) -> Node:
        """Returns a node for the texts of arrays and objects."""
        if values == NO_VALUE:
            return NOTHING
        if self._tags.item is None:
            found = self._json.rule(
                (type_name, formula), lambda: alternation(self._json.containers(values))
            )
            self._sealed.add(found.name)
            return found
        options: list[Node] = []
        if values.objects:
            options.append(self._tagged_objects_rule(formula, no_items=bool(values.arrays)))
        if values.arrays:
            key = "arrays", formula
            options.append(
                self.rule(
                    key, lambda: alternation(write_array(self, shape) for shape in values.arrays)
                )
            )
        return alternation(options)

    def _tagged_objects_rule(self, formula: Formula, *, no_items: bool = False) -> Ref:
        """Returns a reference to the rule of a formula's objects, limited to members that the
        schema describes.

        Args:
            no_items: whether to reject a member called "item", which would look like an item of
                an array.
        """

        def body() -> Node:
            with locate_errors_at_formula(formula):
                shapes = self.reader.values(formula).objects
                if no_items and any(
                    member.name == "item"
                    for shape in shapes
                    for member in shape.expand_finite_names().members
                ):
                    raise ConstraintError(
                        "json_schema: an array and an object with a member 'item' can't be told apart.",
                        hint="Allow one of them, or rename the member.",
                    )
                return alternation(
                    write_object(self, self._keep_described_members(shape)) for shape in shapes
                )

        return self.rule(("objects", formula), body)

    def _keep_described_members(self, shape: ObjectShape) -> ObjectShape:
        """Returns a copy of a shape without the members that the schema doesn't describe."""
        shape = shape.expand_finite_names()
        others = [
            (names, f)
            for all_names, f in shape.others
            if (names := intersection_of_strings(all_names, _names())) != NOTHING
        ]
        others = [(names, formula) for names, formula in others if not isinstance(formula, bool)]
        if others and "{name}" in self._tags.after:
            formula = others[0][1]
            raise ConstraintError(
                "json_schema: members of any name can't be written in this format.",
                pointer=formula.location.pointer if isinstance(formula, ValidAt) else None,
                hint="List them in properties, with additionalProperties: false.",
            )
        return replace(shape, others=tuple(others))
