"""Constraints on generated text, as data. `sglang_lite.constraints` implements them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import force_setattr

from sglang_lite.errors import ConstraintError, ParameterError
from sglang_lite.protocol.record import Record, Variant


def _must_be_text(record: Record, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, str):
            raise ConstraintError(
                f"{type(record).__name__}: `{name}` must be a string, not {value!r:.60}."
            )


def _must_be_constraint(record: Record, name: str, value: object) -> None:
    if not isinstance(value, get_args(Constraint)):
        raise ConstraintError(
            f"{type(record).__name__}: `{name}` is {value!r:.60}, which is not a constraint.",
            hint="Wrap a string as Choices((text,)), a schema as sgl.grammar.json_schema(schema).",
        )


def _make_tuple(record: Record, name: str, kind: type) -> None:
    """Converts the list in a field to a tuple, which can be hashed. Raises ConstraintError if the
    value is not a list or tuple, or if an item is not of type `kind`.
    """
    value = getattr(record, name)
    if not isinstance(value, list | tuple) or not all(isinstance(each, kind) for each in value):
        raise ConstraintError(
            f"{type(record).__name__}: `{name}` is {value!r:.60}, which is not a list of {kind.__name__}."
        )
    force_setattr(record, name, tuple(value))


def _make_constraints(record: Record, name: str) -> None:
    _make_tuple(record, name, object)
    for each in getattr(record, name):
        _must_be_constraint(record, name, each)


class Regex(Variant, frozen=True):
    """Text that `pattern` matches from the first to the last character. docs/constraints.md
    describes the dialect.
    """

    pattern: str

    def __post_init__(self) -> None:
        _must_be_text(self, "pattern")


class JsonSchema(Variant, frozen=True):
    """Text that is one JSON document valid under `schema`.

    Attributes:
        schema: JSON text of a schema of draft 2020-12 or an older draft.
        enforce: "strict" rejects a schema with a keyword that can't be enforced.
            "best_effort" leaves such keywords to the check of the finished value, which
            always happens; inside another constraint there is no such check, so it rejects
            them there too. "unchecked" leaves them, and references without a target, to the
            reader of the value.
        format: "assert" enforces known formats, "annotate" ignores all formats.
        separators: separators between items and after names in generated text, as for
            json.dumps.
        whitespace: whitespace in generated text: "json" for that of `separators`, "compact"
            for none, "free" for any that JSON allows; or a regex for the whitespace inside
            brackets and braces and around commas and colons.
        order: order of members in generated text: "schema" for the schema's order, "any" for
            any order.
        integers: form of integers: "whole" has no fraction; "decimal" may have a fraction of
            zeros.
        sets: JSON Pointers of arrays that represent sets. Repeated items are valid, but are
            not generated if masks can prevent them.
    """

    schema: str
    enforce: Literal["strict", "best_effort", "unchecked"] = "strict"
    format: Literal["assert", "annotate"] = "assert"
    separators: tuple[str, str] = (", ", ": ")
    whitespace: str = "json"
    order: Literal["schema", "any"] = "schema"
    integers: Literal["whole", "decimal"] = "whole"
    sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _must_be_text(self, "schema", "whitespace")
        for name, possible in (
            ("enforce", ("strict", "best_effort", "unchecked")),
            ("format", ("assert", "annotate")),
            ("order", ("schema", "any")),
            ("integers", ("whole", "decimal")),
        ):
            value = getattr(self, name)
            if value not in possible:
                raise ConstraintError(
                    f"json_schema: `{name}` must be {' or '.join(map(repr, possible))}, not {value!r}."
                )
        _make_tuple(self, "separators", str)
        _make_tuple(self, "sets", str)
        if [each.strip(" \t\r\n") for each in self.separators] != [",", ":"]:
            raise ConstraintError(
                f"json_schema: `separators` must be a comma and a colon with blanks, not {self.separators!r}."
            )
        if self.whitespace != "json" and self.separators != (", ", ": "):
            raise ConstraintError(
                "json_schema: `separators` and `whitespace` both set the separators. Give one of them."
            )


class Tags(Record, frozen=True):
    """Format in which some model families write an object: each member's value stands between two
    tags. Strings are written verbatim, other values as JSON.

    Attributes:
        before, after: text before and after a value. In it, `{name}` stands for the member's
            name and `{type}` for the name of the value's type in `types`.
        mark: beginning of the text after a value. Strings can't contain it.
        types: names of the types null, boolean, number, string, array and object.
        item: text before and after each item of an array, or None. If set, values inside
            arrays and objects are also written between tags.
        wrapper: text that may stand before and after a string in its tags, or None. Text between
            tags that begins with it is not the string itself.
    """

    before: str
    after: str
    mark: str
    types: tuple[str, str, str, str, str, str] = ("", "", "", "", "", "")
    item: tuple[str, str] | None = None
    wrapper: tuple[str, str] | None = None


class TaggedObject(Variant, frozen=True):
    """Text of one JSON object valid under `schema`, with its members written between tags. Members
    that the schema does not list are not allowed.
    """

    schema: JsonSchema
    tags: Tags

    def __post_init__(self) -> None:
        if not isinstance(self.schema, JsonSchema) or not isinstance(self.tags, Tags):
            raise ConstraintError("TaggedObject: `schema` must be a JsonSchema and `tags` Tags.")


class Notation(Record, frozen=True):
    """Format in which some model families write an object's members, such as the keyword arguments
    of a Python call: `a=1, b="x", c=[True, None]`.

    Attributes:
        equals: text between a name and its value.
        comma: text between members.
        words: texts of null, false and true.
        quote: mark before and after a string. Strings between double quotes are written as in JSON.
            Strings between other marks are written verbatim and can't contain the mark.
        nested: whether objects inside values are written in the same way, in braces. If not, they
            have JSON's names and separators.
    """

    equals: str
    comma: str = ", "
    words: tuple[str, str, str] = ("null", "false", "true")
    quote: str = '"'
    nested: bool = False


class ArgumentList(Variant, frozen=True):
    """Text of the members of one JSON object valid under `schema`, written in a notation like the
    arguments of a call. Members that the schema does not list are not allowed.
    """

    schema: JsonSchema
    notation: Notation

    def __post_init__(self) -> None:
        if not isinstance(self.schema, JsonSchema) or not isinstance(self.notation, Notation):
            raise ConstraintError(
                "ArgumentList: `schema` must be a JsonSchema and `notation` a Notation."
            )


class Number(Variant, frozen=True):
    """A number in free text. The number ends before the first character that can't continue it.
    Digits may be grouped in threes by commas.

    Attributes:
        kind: "integer", or "float" for a number that may have a fraction and an exponent.
    """

    # encoded as `type`: `kind` is the tag of the union
    kind: Literal["integer", "float"] = msgspec.field(name="type")

    def __post_init__(self) -> None:
        if self.kind not in ("integer", "float"):
            raise ParameterError("Number", f"{self.kind!r:.60} is not 'integer' or 'float'.")


class Choices(Variant, frozen=True):
    """Text that is exactly one of `options`, given as any iterable of strings."""

    options: tuple[str, ...]

    def __post_init__(self) -> None:
        given: Any = self.options
        options = (
            (None,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
        )
        if not all(isinstance(option, str) for option in options):
            raise ConstraintError(f"choices: {given!r:.80} is not a list of strings.")
        force_setattr(self, "options", options)  # a tuple can be a cache key


class Ebnf(Variant, frozen=True):
    """Text that matches a grammar in GBNF, the grammar format of llama.cpp. The whole text must
    match the rule `root`, or the first rule if no rule has that name.
    """

    grammar: str

    def __post_init__(self) -> None:
        _must_be_text(self, "grammar")


class Lark(Variant, frozen=True):
    """Text that matches a grammar in Lark's syntax. The whole text must match the rule `start`."""

    grammar: str

    def __post_init__(self) -> None:
        _must_be_text(self, "grammar")


class Tag(Record, frozen=True):
    """Tagged text: `begin`, then a text that `content` allows, then `end`."""

    begin: str
    content: Constraint
    end: str

    def __post_init__(self) -> None:
        _must_be_text(self, "begin", "end")
        _must_be_constraint(self, "content", self.content)


class StructuralTag(Variant, frozen=True):
    """Free text with tagged parts. Where a trigger occurs, one of the tags must follow.

    Attributes:
        tags: allowed tags; the beginning of each starts with a trigger.
        triggers: strings that start a tag.
        at_least_one: whether the text must contain a tag.
        stop_after_first: whether the text ends after the first tag.
        excludes: strings that free text can't contain.
    """

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _make_tuple(self, "tags", Tag)
        for name in ("triggers", "excludes"):
            _make_tuple(self, name, str)


class InOrder(Variant, frozen=True):
    """Concatenated texts of all `parts`, in order."""

    parts: tuple[Constraint, ...]

    def __post_init__(self) -> None:
        _make_constraints(self, "parts")


class OneOf(Variant, frozen=True):
    """Text that at least one of the constraints in `options` allows."""

    options: tuple[Constraint, ...]

    def __post_init__(self) -> None:
        _make_constraints(self, "options")


class Repeated(Variant, frozen=True):
    """Concatenation of `least` to `most` texts of the constraint `item`. If `most` is None, there
    is no upper limit.
    """

    item: Constraint
    least: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        _must_be_constraint(self, "item", self.item)
        for name in ("least", "most"):
            count = getattr(self, name)
            if (count is not None or name == "least") and (
                isinstance(count, bool) or not isinstance(count, int)
            ):
                raise ConstraintError(
                    f"Repeated: `{name}` must be a whole number, not {count!r:.60}."
                )


class Continuation(Variant, frozen=True):
    """Text that continues `text` under a constraint that spans several nodes. Can't be part of
    another constraint.

    Attributes:
        whole: constraint on `text`, this generation and the text after it together.
        text: text before this generation.
        part: additional constraint on this generation only; `whole` may then be completed
            later. None if this generation completes `whole`.
    """

    whole: Constraint
    text: str = ""
    part: Constraint | None = None

    def __post_init__(self) -> None:
        _must_be_text(self, "text")
        _must_be_constraint(self, "whole", self.whole)
        if self.part is not None:
            _must_be_constraint(self, "part", self.part)


Constraint: TypeAlias = (
    Regex
    | JsonSchema
    | TaggedObject
    | ArgumentList
    | Number
    | Choices
    | Ebnf
    | Lark
    | StructuralTag
    | InOrder
    | OneOf
    | Repeated
    | Continuation
)
