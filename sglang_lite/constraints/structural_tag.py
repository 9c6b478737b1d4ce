"""Parses structural tags, given as JSON text in the formats of SGLang and xgrammar, into
constraints.

Source: xgrammar 0.2.8, `structural_tag` (the formats that need no tokens), and SGLang's
older `structures` with `triggers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang_lite.constraints.json_schema import wellformed
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Ebnf,
    InOrder,
    Lark,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
)

MAX_DEPTH = 50


def parse(text: str) -> Constraint:
    """Parses a structural tag into a constraint.

    Args:
        text: JSON text of the structural tag.

    Raises:
        ConstraintError: the text is not JSON, or has a field or format that is not supported.
            The error has its JSON Pointer.
    """
    try:
        found = json.loads(text, parse_constant=wellformed.refuse_non_finite)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"structural_tag: not JSON: {error}") from error
    if isinstance(found, dict) and "structures" in found:
        fields = _Fields(found, "", "type", "structures", "triggers")
        tags = [
            _Fields(each, f"/structures/{i}", "begin", "schema", "end")
            for i, each in fields.list("structures")
        ]
        parsed_tags = (
            Tag(
                tag.read_text_field("begin"),
                json_schema(tag.find_field("schema", True)),
                tag.read_text_field("end"),
            )
            for tag in tags
        )
        return StructuralTag(tuple(parsed_tags), fields.texts("triggers"))
    fields = _Fields(found, "", "type", "format")
    return _read_tag_format(fields.find_field("format"), "/format", 0)


class _Fields:
    """Typed access to the fields of a JSON object. Unknown fields are errors.

    Args:
        found: object.
        pointer: JSON Pointer of the object.
        *names: all fields that the object may have.
    """

    def __init__(self, found: Any, pointer: str, *names: str) -> None:
        if not isinstance(found, dict):
            raise _tag_error(f"an object must be here, not {_abbreviate_json(found)}", pointer)
        for name, value in found.items():
            # null, false and empty lists request nothing
            if name not in names and value not in (None, False, []):
                raise _tag_error(f"{name!r} is not supported", f"{pointer}/{name}")
        self._found = found
        self.pointer = pointer

    def find_field(self, name: str, default: Any = None) -> Any:
        value = self._found.get(name, default)
        return default if value is None else value

    def read_text_field(self, name: str) -> str:
        return str(self._require_type(name, str))

    def list(self, name: str) -> list[tuple[int, Any]]:
        return list(enumerate(self._require_type(name, list)))

    def texts(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        if default is not None and self.find_field(name) is None:
            return default
        texts = tuple(self._require_type(name, list))
        if not all(isinstance(each, str) for each in texts):
            raise _tag_error(f"{name!r} must be a list of strings", f"{self.pointer}/{name}")
        return texts

    def flag(self, name: str) -> bool:
        value: bool = self._require_type(name, bool) if self.find_field(name) is not None else False
        return value

    def _require_type(self, name: str, kind: type) -> Any:
        value = self._found.get(name)
        if not isinstance(value, kind):
            problem = "but it is missing" if value is None else f"not {_abbreviate_json(value)}"
            raise _tag_error(
                f"{name!r} must be {_KINDS[kind]}, {problem}", f"{self.pointer}/{name}"
            )
        return value


_KINDS: dict[type, str] = {str: "a string", list: "a list", bool: "true or false"}


def _abbreviate_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]


def _tag_error(problem: str, pointer: str) -> ConstraintError:
    return ConstraintError(f"structural_tag: {problem}.", pointer=pointer)


def _read_tag_format(found: Any, pointer: str, depth: int) -> Constraint:
    kind = found.get("type") if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise _tag_error(
            f"the format {kind!r} is not supported, only {', '.join(_FORMATS)}", pointer
        )
    if depth > MAX_DEPTH:
        raise _tag_error("nested too deeply", pointer)
    names, make = _FORMATS[kind]
    return make(_Fields(found, pointer, "type", *names), depth + 1)


def _read_elements(fields: _Fields, depth: int) -> tuple[Constraint, ...]:
    return tuple(
        _read_tag_format(each, f"{fields.pointer}/elements/{i}", depth)
        for i, each in fields.list("elements")
    )


def _read_content_format(fields: _Fields, depth: int) -> Constraint:
    return _read_tag_format(fields.find_field("content"), f"{fields.pointer}/content", depth)


def _text_without(*excluded: str) -> Constraint:
    """Returns a constraint for any text that contains none of `excluded`."""
    anything = "/(?s:.*)/"
    parts = "".join(f" & ~({anything} {json.dumps(each)} {anything})" for each in excluded)
    return Lark(f"start: TEXT\nTEXT: {anything}{parts}")


def _read_schema_format(fields: _Fields, depth: int) -> Constraint:
    if fields.find_field("style", "json") != "json":
        raise _tag_error("other styles than 'json' are not supported", f"{fields.pointer}/style")
    return json_schema(fields.find_field("json_schema", True))


def _read_tag(fields: _Fields, depth: int) -> Tag:
    end = fields.read_text_field("end")
    content = fields.find_field("content")
    # up to the first `end`
    if end and isinstance(content, dict) and content.get("type") == "any_text":
        found = _Fields(content, f"{fields.pointer}/content", "type", "excludes")
        return Tag(
            fields.read_text_field("begin"), _text_without(end, *found.texts("excludes", ())), end
        )
    return Tag(fields.read_text_field("begin"), _read_content_format(fields, depth), end)


def _read_single_tag(fields: _Fields, depth: int) -> Constraint:
    tag = _read_tag(fields, depth)
    return InOrder((Choices((tag.begin,)), tag.content, Choices((tag.end,))))


def _read_tag_list(fields: _Fields) -> list[_Fields]:
    found = fields.list("tags")
    return [
        _Fields(each, f"{fields.pointer}/tags/{i}", "type", "begin", "content", "end")
        for i, each in found
    ]


def _read_triggered_tags(fields: _Fields, depth: int) -> Constraint:
    return StructuralTag(
        tuple(_read_tag(each, depth) for each in _read_tag_list(fields)),
        fields.texts("triggers"),
        fields.flag("at_least_one"),
        fields.flag("stop_after_first"),
        fields.texts("excludes", ()),
    )


def _read_separated_tags(fields: _Fields, depth: int) -> Constraint:
    tags = OneOf(tuple(_read_single_tag(each, depth) for each in _read_tag_list(fields)))
    more = Repeated(InOrder((Choices((fields.read_text_field("separator"),)), tags)))
    several = tags if fields.flag("stop_after_first") else InOrder((tags, more))
    return several if fields.flag("at_least_one") else Repeated(several, 0, 1)


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[_Fields, int], Constraint]]] = {
    "const_string": (("value",), lambda fields, depth: Choices((fields.read_text_field("value"),))),
    "json_schema": (("json_schema", "style"), _read_schema_format),
    "regex": (("pattern",), lambda fields, depth: Regex(fields.read_text_field("pattern"))),
    "grammar": (("grammar",), lambda fields, depth: Ebnf(fields.read_text_field("grammar"))),
    "any_text": (("excludes",), lambda fields, depth: _text_without(*fields.texts("excludes", ()))),
    "sequence": (("elements",), lambda fields, depth: InOrder(_read_elements(fields, depth))),
    "or": (("elements",), lambda fields, depth: OneOf(_read_elements(fields, depth))),
    "optional": (
        ("content",),
        lambda fields, depth: Repeated(_read_content_format(fields, depth), 0, 1),
    ),
    "star": (("content",), lambda fields, depth: Repeated(_read_content_format(fields, depth))),
    "plus": (("content",), lambda fields, depth: Repeated(_read_content_format(fields, depth), 1)),
    "tag": (("begin", "content", "end"), _read_single_tag),
    "tags_with_separator": (
        ("tags", "separator", "at_least_one", "stop_after_first"),
        _read_separated_tags,
    ),
    "triggered_tags": (
        ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
        _read_triggered_tags,
    ),
}
