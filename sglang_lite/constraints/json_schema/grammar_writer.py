"""Writes sets of JSON values as grammars of their texts, in one style.

Every lexeme is a scalar, `[`, `]`, `, `, `{}`, `}`, or a name with the punctuation around
it (`{"a": `, `, "a": `). Wherever two values are possible in one place, their lexemes end
in the same places. An engine that reads lexemes greedily (llguidance) therefore accepts
exactly this language.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from sglang_lite.constraints.formal.grammars import contradiction, inline_all_rules, prune_rules
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
from sglang_lite.constraints.json_schema.document import SchemaLocation
from sglang_lite.constraints.json_schema.formulas import Formula, ValidAt, find_first_pointer
from sglang_lite.constraints.json_schema.mask_rules import MaskedShapes, RulePosition
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.style import Style
from sglang_lite.constraints.json_schema.values import ANY_VALUE, ArrayShape, ObjectShape, ValueSet
from sglang_lite.constraints.json_schema.write_arrays import write_array
from sglang_lite.constraints.json_schema.write_objects import write_object
from sglang_lite.constraints.json_schema.write_scalars import scalar_texts
from sglang_lite.constraints.json_schema.write_strings import quote_strings, write_bare_names
from sglang_lite.protocol import ConstraintError
from sglang_lite.protocol.anything import Json

MAX_RULES = 30_000  # llguidance 1.9.1 takes 65,000 symbols, lexemes included


@dataclass(slots=True)
class _Rules:
    """Rules that have been requested.

    Attributes:
        names: names of the rules by key.
        numbers: numbers of shapes, for use in keys.
        to_do: rules whose bodies have not been computed, as (name, function that returns the
            body).
        unlisted_names_at: JSON Pointers of objects with unlisted names (a dict used as an
            ordered set).
    """

    names: dict[tuple[bool, Hashable], str] = field(default_factory=dict)
    numbers: dict[ArrayShape | ObjectShape, int] = field(default_factory=dict)
    to_do: deque[tuple[str, Callable[[], Node]]] = field(default_factory=deque)
    unlisted_names_at: dict[str, None] = field(default_factory=dict)


class GrammarWriter:
    """Writes values as JSON in one style.

    Args:
        reader: reader of the schema.
        style: style of the text.
        masked_shapes: collects the rules that masks enforce; None if masks enforce no rules.
        plain: whether each number has exactly one spelling.
        rules: rules of another writer, to which new rules are added.

    Attributes:
        contradicts: True if a requested language has no text.
    """

    def __init__(
        self,
        reader: SchemaReader,
        style: Style,
        *,
        masked_shapes: MaskedShapes | None = None,
        plain: bool = False,
        rules: _Rules | None = None,
    ) -> None:
        self.reader = reader
        self.comma = style.comma
        self.any_order = style.any_order
        self.opening = concat(literal("["), style.gap)
        self.closing = concat(style.gap, literal("]"))
        self._before_first = concat(literal("{"), style.gap)
        self.masked_shapes = masked_shapes
        self.plain = plain
        self.contradicts = False
        self._style = style
        self._rules = rules or _Rules()

    @property
    def unlisted_names_at(self) -> Iterable[str]:
        """JSON Pointers of objects with unlisted names."""
        return self._rules.unlisted_names_at

    def language(self, formula: Formula) -> Language:
        """Returns the language of the texts of a formula's values.

        Raises:
            ConstraintError: the formula has no values, or something can't be enforced; the error
                has a JSON Pointer.
        """
        start = self.value(formula)
        return self.finish_language(start, {start.name})

    def finish_language(self, start: Ref, sealed: set[str]) -> Language:
        """Computes the bodies of all requested rules and returns their language, beginning at a
        start rule.

        Args:
            start: reference to the start rule.
            sealed: names of rules for JSON values, whose lexemes may be read greedily (see
                `Language.sealed`).

        Raises:
            ConstraintError: the language is empty, or something can't be enforced; the error has a
                JSON Pointer.
        """
        rules: dict[str, Node] = {}
        while self._rules.to_do:
            name, body = self._rules.to_do.popleft()
            rules[name] = body()
            if len(rules) > MAX_RULES:
                raise ConstraintError(
                    f"json_schema: too large: its grammar needs more than {MAX_RULES:,} rules."
                )
        language = Language(start.name, rules, frozenset(sealed))
        try:
            return prune_rules(language)
        except ConstraintError as error:
            self.contradicts = True
            location = self._locate_last_rule(contradiction(language))
            hint = _contradiction_hint(self.reader.document.schema(location))
            raise ConstraintError(error.message, pointer=location.pointer, hint=hint) from None

    def _locate_last_rule(self, names: Iterable[str]) -> SchemaLocation:
        """Returns the schema location of the last rule in `names` that has a location. Returns the
        root if none has one.
        """
        formulas = {name: key for (_, key), name in self._rules.names.items()}
        locations = [
            formula.location for name in names if isinstance(formula := formulas[name], ValidAt)
        ]
        return locations[-1] if locations else SchemaLocation("")

    def rule(self, key: Hashable, body: Callable[[], Node]) -> Ref:
        """Returns a reference to the rule for a key. `body` computes the rule's body and is called
        later.
        """
        names = self._rules.names
        rule = (self.plain, key)
        if rule not in names:
            names[rule] = f"v{len(names)}"
            self._rules.to_do.append((names[rule], body))
        return Ref(names[rule])

    def number(self, shape: ArrayShape | ObjectShape) -> int:
        """Returns the number that identifies a shape in the keys of its rules."""
        return self._rules.numbers.setdefault(shape, len(self._rules.numbers))

    def value(self, formula: Formula) -> Ref:
        """Returns a reference to the rule of a formula's values."""
        return self.rule(formula, lambda: self._write_formula_body(formula))

    def write_item(self, formula: Formula) -> Node:
        return self.value(formula)

    def write_unique_item(self, formula: Formula) -> Node:
        if replace(self.reader.values(formula), inexact=False) != ANY_VALUE:
            plain = GrammarWriter(
                self.reader,
                self._style,
                masked_shapes=self.masked_shapes,
                plain=True,
                rules=self._rules,
            )
            return plain.value(formula)
        return self.rule(("different", formula), lambda: self._write_values(ANY_VALUE, plain=True))

    def write_listed_values(self, formula: Formula) -> Node:
        if self.any_order or self._style.gap != EMPTY:
            raise ConstraintError(
                "json_schema: members in any order or free whitespace give one value several texts."
            )
        if self.reader.is_known_empty(formula):
            return NOTHING
        writer = GrammarWriter(self.reader, self._style, plain=True)
        node = inline_all_rules(writer.language(formula))
        if writer.unlisted_names_at:
            raise ConstraintError(
                "json_schema: objects may have members that are not listed (set additionalProperties: false)."
            )
        if node is None:
            raise ConstraintError("json_schema: they nest without a limit, or have too many texts.")
        return node

    def member(self, names: Node, formula: Formula, *, first: bool) -> Node:
        before = self._before_first if first else self.comma
        with locate_errors_at_formula(formula):
            write = write_bare_names if self._style.bare_names else quote_strings
            name = write(names, before, self._style.colon)
        return concat(name, self.value(formula))

    def text_after_members(self, *, empty: bool) -> Node:
        if self._style.gap == EMPTY:
            return literal("{}" if empty else "}")
        return concat(*([literal("{")] if empty else []), self._style.gap, literal("}"))

    def _write_formula_body(self, formula: Formula) -> Node:
        with locate_errors_at_formula(formula):
            values = self.reader.values(formula)
            if any(
                shape.expand_finite_names().others_outside_members() for shape in values.objects
            ):
                self._rules.unlisted_names_at[find_first_pointer(formula)] = None
            return self._write_values(values, plain=self.plain)

    def _write_values(self, values: ValueSet, *, plain: bool) -> Node:
        return alternation([self._write_scalars(values, plain=plain), *self.containers(values)])

    def _write_scalars(self, values: ValueSet, *, plain: bool = False) -> Node:
        style = self._style
        return scalar_texts(
            values, decimals=style.decimals, plain=plain, words=style.words, quote=style.quote
        )

    def find_rule_positions(self, formula: Formula) -> tuple[RulePosition, ...]:
        """Returns the positions in a formula's values where masks enforce rules. Call `language`
        first, because it collects these rules.
        """
        return (
            ()
            if self.masked_shapes is None
            else self.masked_shapes.positions(self.reader, formula, self._write_scalars)
        )

    def containers(self, values: ValueSet) -> list[Node]:
        """Returns a node for each shape of arrays and objects in a set."""
        arrays = [write_array(self, shape) for shape in values.arrays]
        alone = len(values.objects) == 1
        return arrays + [write_object(self, shape, alone=alone) for shape in values.objects]


def _contradiction_hint(schema: Json) -> str:
    """Returns a hint that lists the keywords that no value satisfies together."""
    if not isinstance(schema, dict):
        return "The schema false allows no value."
    keywords = (
        f"{name}: {json.dumps(value, ensure_ascii=False):.60}"
        for name, value in schema.items()
        if name not in _NOTES
    )
    if "$ref" in schema:
        return f"No value meets {'; '.join(keywords)}. If it requires itself, it never ends: let it be null or missing."
    return f"No value meets all of {'; '.join(keywords)}. Change one."


_NOTES = {
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
}


@contextmanager
def locate_errors_at_formula(formula: Formula) -> Iterator[None]:
    """Adds the pointer of the formula's schema to errors raised inside, unless they already have
    one.
    """
    try:
        yield
    except ConstraintError as error:
        if error.pointer is not None or not isinstance(formula, ValidAt):
            raise
        raise ConstraintError(
            error.message, pointer=formula.location.pointer, hint=error.hint
        ) from error
