"""Constraints: what a generated text may be. Data only; `sglang_lite.constraints` knows what they mean."""

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
            raise ConstraintError(f"{type(record).__name__}: `{name}` must be a string, not {value!r:.60}.")


def _must_be_constraint(record: Record, name: str, value: object) -> None:
    if not isinstance(value, get_args(Constraint)):
        raise ConstraintError(
            f"{type(record).__name__}: `{name}` is {value!r:.60}, which is not a constraint.",
            hint="Wrap a string as Choices((text,)), a schema as sgl.grammar.json_schema(schema).",
        )


def _make_tuple(record: Record, name: str, kind: type) -> None:
    """Takes any list or tuple: only a tuple can be a key."""
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
    """Text that matches `pattern` from its first to its last character. docs/constraints.md has the dialect."""

    pattern: str

    def __post_init__(self) -> None:
        _must_be_text(self, "pattern")


class JsonSchema(Variant, frozen=True):
    """Text that is one JSON document valid under `schema`.

    Attributes:
        schema: JSON text of a schema of draft 2020-12, or an older one.
        enforce: "strict" refuses a schema with a keyword that can't be enforced; "best_effort" leaves such keywords
            to the check of the finished value, which is always made.
        format: "assert" demands the formats that are known, "annotate" none.
        separators: between items and after names in generated text, as json.dumps takes them.
        whitespace: in generated text: "json" as `separators` say, "compact" none, "free" any that JSON allows; or the
            pattern of what stands inside of brackets and braces and around commas and colons.
        order: of members in generated text: "schema" that of the schema, "any" any.
        integers: "whole" are written without a fraction; "decimal" may have one of zeros.
        sets: JSON Pointers of arrays that spell sets: an item may come twice, but is not generated twice where masks
            can watch that.
    """

    schema: str
    enforce: Literal["strict", "best_effort"] = "strict"
    format: Literal["assert", "annotate"] = "assert"
    separators: tuple[str, str] = (", ", ": ")
    whitespace: str = "json"
    order: Literal["schema", "any"] = "schema"
    integers: Literal["whole", "decimal"] = "whole"
    sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _must_be_text(self, "schema", "whitespace")
        for name, possible in (
            ("enforce", ("strict", "best_effort")),
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
    """Tags between which a family of models writes the values of an object, member after member: a string as it is, any
    other value as JSON.

    Attributes:
        before, after: what stands around a value; in it `{name}` is the member's name, `{type}` what `types` says.
        mark: what the end of a value begins with, and no string has in it.
        types: what null, booleans, numbers, strings, arrays and objects are called.
        item: what stands around the items of arrays. Then arrays and objects have tags inside as well.
    """

    before: str
    after: str
    mark: str
    types: tuple[str, str, str, str, str, str] = ("", "", "", "", "", "")
    item: tuple[str, str] | None = None


class TaggedObject(Variant, frozen=True):
    """Text that is one JSON object valid under `schema`, its members written between tags. Members that the schema says
    nothing of are left out."""

    schema: JsonSchema
    tags: Tags

    def __post_init__(self) -> None:
        if not isinstance(self.schema, JsonSchema) or not isinstance(self.tags, Tags):
            raise ConstraintError("TaggedObject: `schema` must be a JsonSchema and `tags` Tags.")


class Number(Variant, frozen=True):
    """A number as it is written in free text, which ends where the text continues with anything else. That is no part
    of it. The digits may be grouped by commas in threes.

    Attributes:
        kind: "integer", or "float" for one that may have a fraction and an exponent.
    """

    kind: Literal["integer", "float"] = msgspec.field(name="type")  # as data; `kind` is the tag there

    def __post_init__(self) -> None:
        if self.kind not in ("integer", "float"):
            raise ParameterError("Number", f"{self.kind!r:.60} is not 'integer' or 'float'.")


class Choices(Variant, frozen=True):
    """Exactly one of `options`, which may be given as any sequence."""

    options: tuple[str, ...]

    def __post_init__(self) -> None:
        given: Any = self.options
        options = (None,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
        if not all(isinstance(option, str) for option in options):
            raise ConstraintError(f"choices: {given!r:.80} is not a list of strings.")
        force_setattr(self, "options", options)  # a list is no key of a cache


class Ebnf(Variant, frozen=True):
    """Text of a grammar in llama.cpp's GBNF. Its first rule, or the one called `root`, is the whole text."""

    grammar: str

    def __post_init__(self) -> None:
        _must_be_text(self, "grammar")


class Lark(Variant, frozen=True):
    """Text of a grammar in Lark's syntax. The rule `start` is the whole text."""

    grammar: str

    def __post_init__(self) -> None:
        _must_be_text(self, "grammar")


class Tag(Record, frozen=True):
    """`begin`, then what `content` allows, then `end`."""

    begin: str
    content: Constraint
    end: str

    def __post_init__(self) -> None:
        _must_be_text(self, "begin", "end")
        _must_be_constraint(self, "content", self.content)


class StructuralTag(Variant, frozen=True):
    """Free text in which a trigger begins one of the tags, every one of which begins with a trigger.

    Attributes:
        at_least_one: there is a tag.
        stop_after_first: the first one ends the text.
        excludes: what free text does not have in it.
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
    """Texts of all `parts`, one after the other."""

    parts: tuple[Constraint, ...]

    def __post_init__(self) -> None:
        _make_constraints(self, "parts")


class OneOf(Variant, frozen=True):
    """Text of any of the constraints."""

    options: tuple[Constraint, ...]

    def __post_init__(self) -> None:
        _make_constraints(self, "options")


class Repeated(Variant, frozen=True):
    """Texts of the constraint, from `least` to `most` of them (None: any number), one after the other."""

    item: Constraint
    least: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        _must_be_constraint(self, "item", self.item)
        for name in ("least", "most"):
            count = getattr(self, name)
            if (count is not None or name == "least") and (isinstance(count, bool) or not isinstance(count, int)):
                raise ConstraintError(f"Repeated: `{name}` must be a whole number, not {count!r:.60}.")


class Continuation(Variant, frozen=True):
    """Text that continues `text` in a grammar that spans several nodes. It is no part of another constraint.

    Attributes:
        whole: what `text`, this generation and what follows it are together.
        text: what is there of it.
        part: what this generation is by itself; then `whole` may be complete later. None: it completes `whole`.
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
