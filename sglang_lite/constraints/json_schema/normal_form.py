"""Normal forms of JSON schemas: exact languages, or errors that say what can't be expressed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from sglang_lite.constraints.formal.nodes import Language
from sglang_lite.constraints.json_schema.document import REFERENCES, Document
from sglang_lite.constraints.json_schema.formulas import ValidAt
from sglang_lite.constraints.json_schema.grammar_writer import GrammarWriter
from sglang_lite.constraints.json_schema.mask_rules import MaskedShapes, RulePosition
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.json_schema.style import Style, read_json_style
from sglang_lite.constraints.json_schema.values import FEW, MAX_WORK, SOME
from sglang_lite.constraints.json_schema.wellformed import check_schema_text
from sglang_lite.constraints.json_schema.write_arguments import ArgumentListWriter
from sglang_lite.constraints.json_schema.write_tagged import TaggedWriter
from sglang_lite.constraints.limits import convert_limit_errors
from sglang_lite.constraints.memo import memoize
from sglang_lite.protocol import ConstraintError, JsonSchema, Notation, Tags

MAX_CHECKED = 100  # maximum number of keywords that best effort may leave to the final check
MAX_TRIALS = 3  # work limit over all attempts, as a multiple of MAX_WORK


@dataclass(frozen=True, slots=True)
class NormalForm:
    """A schema as a language.

    Attributes:
        language: texts of valid values in the generated style; a superset if `checked` is not
            empty.
        checked: keywords that are not enforced but checked in finished values, as (JSON
            Pointer, reason).
        unlisted_names_at: JSON Pointers of objects with unlisted names, whose repetition no
            grammar prevents.
        mask_rules: positions with rules that masks enforce (mask_rules.py), the start first.
    """

    language: Language
    checked: tuple[tuple[str, str], ...] = ()
    unlisted_names_at: tuple[str, ...] = ()
    mask_rules: tuple[RulePosition, ...] = ()


def load_schema_document(constraint: JsonSchema) -> Document:
    """Returns the document of a constraint's schema. It is shared and must not be changed.

    Raises:
        ConstraintError: the schema is not valid.
    """
    with convert_limit_errors("json_schema"):
        check_schema_text(constraint.schema)
        return parse_schema_document(constraint.schema)


@memoize
def parse_schema_document(text: str) -> Document:
    """Returns the document of a schema's JSON text, which must have been checked."""
    return Document(json.loads(text))


def normalise(constraint: JsonSchema) -> NormalForm:
    """Returns the normal form of a schema whose JSON is the whole text, with the rules that masks
    enforce.

    Raises:
        ConstraintError: see `normalise_embedded_schema`.
    """
    return _build_normal_form(constraint, True)


def normalise_embedded_schema(constraint: JsonSchema) -> NormalForm:
    """Returns the normal form of a schema whose JSON is part of a larger text. Masks can't check
    names and items there.

    Raises:
        ConstraintError: no value satisfies the schema, it is too complex, or it has a keyword that
            can't be enforced although the constraint does not allow best effort. The error's
            `pointer` locates the fault.
    """
    return _build_normal_form(constraint, False)


@memoize
def _build_normal_form(constraint: JsonSchema, with_masks: bool) -> NormalForm:
    document = load_schema_document(constraint)
    style = read_json_style(constraint)
    if document.draft == "draft-04":  # where 1.0 is not a whole number
        style = replace(style, decimals=False)
    unenforced = _Unenforced(constraint)
    while True:
        reader = SchemaReader(
            document,
            assert_format=constraint.format == "assert",
            ignored=frozenset(unenforced.keywords),
            sets=frozenset(constraint.sets),
            multiplied=SOME if style.any_order else FEW,
        )
        writer = GrammarWriter(reader, style, masked_shapes=MaskedShapes() if with_masks else None)
        try:
            with convert_limit_errors("json_schema"):
                language = writer.language(ValidAt(document.start))
                positions = writer.find_rule_positions(ValidAt(document.start))
            checked = tuple(unenforced.keywords.items())
            return NormalForm(language, checked, tuple(writer.unlisted_names_at), positions)
        except ConstraintError as error:
            unenforced.record_failed_keyword(
                error, reader.algebra.work, contradicts=writer.contradicts
            )


@memoize
def build_tagged_language(schema: JsonSchema, tags: Tags) -> Language:
    """Returns the language of a TaggedObject, an object whose members are written between tags.

    Raises:
        ConstraintError: no value satisfies the schema, or it can't be enforced in this format and
            must not stay unchecked. The error's `pointer` locates the fault.
    """
    return _build_language(schema, lambda reader, style: TaggedWriter(reader, style, tags))


@memoize
def build_arguments_language(schema: JsonSchema, notation: Notation) -> Language:
    """Returns the language of an ArgumentList, an object whose members are written like the
    arguments of a call. For errors, see `build_tagged_language`.
    """
    return _build_language(
        schema, lambda reader, style: ArgumentListWriter(reader, style, notation)
    )


def _build_language(
    schema: JsonSchema,
    make_writer: Callable[[SchemaReader, Style], TaggedWriter | ArgumentListWriter],
) -> Language:
    document = load_schema_document(schema)
    unenforced = _Unenforced(schema)
    while True:
        ignored = frozenset(unenforced.keywords)
        reader = SchemaReader(document, assert_format=schema.format == "assert", ignored=ignored)
        writer = make_writer(reader, read_json_style(schema))
        try:
            with convert_limit_errors("json_schema"):
                return writer.language(ValidAt(document.start))
        except ConstraintError as error:
            if schema.enforce != "unchecked":  # the finished object is not checked
                raise
            unenforced.record_failed_keyword(
                error, reader.algebra.work, contradicts=writer.contradicts
            )


class _Unenforced:
    """Collects the keywords of a schema that can't be enforced. Each failed attempt adds one.

    Args:
        constraint: the schema.

    Attributes:
        keywords: reason by JSON Pointer.
    """

    def __init__(self, constraint: JsonSchema) -> None:
        self.keywords: dict[str, str] = {}
        self._enforce = constraint.enforce
        self._work = 0

    def record_failed_keyword(
        self, error: ConstraintError, work: int, *, contradicts: bool
    ) -> None:
        """Records the keyword at which an attempt failed. Raises the attempt's error if the keyword
        must not be left out.

        Args:
            error: error of the attempt.
            work: units of work that the attempt took.
            contradicts: whether the attempt found that no value satisfies the schema.
        """
        pointer = error.pointer
        self._work += work
        if self._work > MAX_TRIALS * MAX_WORK or contradicts or self._enforce == "strict":
            raise error
        if not pointer or pointer in self.keywords or len(self.keywords) == MAX_CHECKED:
            raise error
        # values can't be checked without it
        if self._enforce != "unchecked" and pointer.rpartition("/")[2] in REFERENCES:
            raise error
        self.keywords[pointer] = error.message.removeprefix("json_schema: ").removesuffix(
            f" (at {pointer})"
        )
