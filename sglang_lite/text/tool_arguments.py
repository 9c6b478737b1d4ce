"""Writers and incremental readers of a call's arguments, as JSON or between tags. The readers
return JSON. For arguments in a notation, see argument_list.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex

from sglang_lite.constraints.json_schema.allowed_values import AllowedValues
from sglang_lite.protocol import JsonSchema, Notation, Tags
from sglang_lite.protocol.anything import Json
from sglang_lite.text.argument_list import argument_list_text
from sglang_lite.text.stop import partial_match_start

_NULL, _BOOLEAN, _NUMBER, _STRING, _ARRAY, _OBJECT = range(6)  # indexes in Tags.types


def arguments_text(tags: Tags | Notation | None, arguments: Mapping[str, Json]) -> str:
    """Returns the text of a call's arguments.

    Args:
        tags: tags around the members, their notation, or None for a JSON object.
        arguments: arguments by name.
    """
    if tags is None:
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(tags, Notation):
        return argument_list_text(tags, arguments)
    return "".join(
        _member_text(tags, tags.before, name, value, tags.after)
        for name, value in arguments.items()
    )


def _member_text(tags: Tags, before: str, name: str, value: Any, after: str) -> str:
    type_name = tags.types[_type_index(value)]
    if isinstance(value, str):
        text = value
    elif tags.item is None or not isinstance(value, list | Mapping):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, Mapping):
        text = arguments_text(tags, value)
    else:
        text = "".join(_member_text(tags, tags.item[0], "", item, tags.item[1]) for item in value)
    return f"{_fill_tag(before, name, type_name)}{text}{_fill_tag(after, name, type_name)}"


def _fill_tag(tag: str, name: str, type_name: str) -> str:
    return tag.replace("{name}", name).replace("{type}", type_name)


def _type_index(value: Any) -> int:
    kinds = (
        (type(None), _NULL),
        (bool, _BOOLEAN),
        (int | float, _NUMBER),
        (str, _STRING),
        (list, _ARRAY),
    )
    return next((number for kind, number in kinds if isinstance(value, kind)), _OBJECT)


@lru_cache(maxsize=256)
def compile_literal(text: str, *, blanks: bool) -> regex.Pattern[str]:
    """Returns a compiled pattern that matches a text in which # stands for a number.

    Args:
        text: text to match.
        blanks: whether whitespace in the text matches any whitespace of up to 100 characters,
            including none.
    """
    return regex.compile(literal_expression(text, blanks=blanks))


def literal_expression(text: str, *, blanks: bool) -> str:
    """Returns the source of the regular expression that `compile_literal` compiles."""
    found = re.escape(text).replace(r"\#", "[0-9]+")
    return re.sub(r"(\\\s)+", lambda _: r"\s{0,100}", found) if blanks else found


class JsonArguments:
    """Finds the end of a JSON object incrementally. Text that doesn't begin with a brace or bracket
    ends immediately.

    Attributes:
        done: True once the object has ended.
    """

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> tuple[int, str]:
        """Reads the next text. Returns the number of characters that belong to the object, and
        these characters.
        """
        length = self.scan_text(text)
        return length, text[:length]

    def scan_text(self, text: str) -> int:
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            if not self._depth:
                self.done = True
                return i + (char in "}]")
        return len(text)


@dataclass(slots=True)
class _Open:
    """Object or array that has begun.

    Attributes:
        allowed: values that the schema allows here.
        array: True for an array, False for an object.
        close: closing tag, or "" for the arguments as a whole.
        count: number of members or items that have begun.
    """

    allowed: AllowedValues
    array: bool
    close: str
    count: int = 0

    def empty_container(self) -> str:
        return "[]" if self.array else "{}"

    def closing_json(self) -> str:
        """Returns the JSON text that completes the object or array: its closing bracket, or both
        brackets if it is empty.
        """
        return self.empty_container()[1:] if self.count else self.empty_container()


@dataclass(slots=True)
class _Value:
    """Value that has begun.

    Attributes:
        allowed: values that the schema allows here.
        types: indexes of the types that the opening tag allows.
        before, after: tags around the value.
        started: True once part of a string's text has been read.
        wrapped: True if the string is in the tags' wrapper.
        scan: finds the end of a JSON array or object.
        searched: number of characters that have been searched.
    """

    allowed: AllowedValues
    types: frozenset[int]
    before: str
    after: str
    started: bool = False
    wrapped: bool = False
    scan: JsonArguments | None = None
    searched: int = 0

    @property
    def close(self) -> str:
        return self.after.strip()

    def is_json(self) -> bool:
        """Returns whether text that begins with a brace or bracket must be JSON rather than a
        string.
        """
        return _STRING not in self.types or (
            self.allowed.schema is not None and self.allowed.allows_containers
        )


class TaggedArguments:
    """Incremental reader of an object whose members are written between tags. Returns JSON text.

    Args:
        tags: tags of the format.
        schema: schema of the arguments, which determines which values are strings. Without it, text
            that is valid JSON is not a string.

    Attributes:
        done: True once the following text is not a member.
    """

    def __init__(self, tags: Tags, schema: JsonSchema | None) -> None:
        self.done = False
        self._tags = tags
        self._member = self._head_pattern(tags.before)
        self._item = self._head_pattern(tags.item[0]) if tags.item else self._member
        self._stack = [_Open(AllowedValues.for_schema(schema), array=False, close="")]
        self._value: _Value | None = None

    def push(self, text: str) -> tuple[int, str]:
        """Reads as much of the text as possible. Returns the number of characters read, and the
        JSON text for them.
        """
        at = 0
        found = ""
        while not self.done:
            step = (
                self._read_between_members(text[at:])
                if self._value is None
                else self._read_tagged_value(self._value, text[at:])
            )
            if step is None:
                break
            at += step[0]
            found += step[1]
        return at, found

    # Each of the following methods reads what it can. It returns (characters read, their JSON
    # text), or None if it needs more text.

    def _read_between_members(self, text: str) -> tuple[int, str] | None:
        """Reads the head of the next member, or the end of the object or array."""
        blank = len(text) - len(text.lstrip())
        text = text[blank:]
        inner = self._stack[-1]
        if inner.close and text.startswith(inner.close):
            self._stack.pop()
            return blank + len(inner.close), inner.closing_json()
        head = (self._item if inner.array else self._member).match(text, partial=True)
        if (head and head.partial) or (inner.close and inner.close.startswith(text)):
            return None
        if head is None:  # the end of the arguments, or of an object without a closing tag
            self._stack.pop()
            self.done = not self._stack
            return blank, inner.closing_json()
        fields = head.groupdict()
        name = fields.get("name") or ""
        allowed = (
            inner.allowed.narrow_to_item(inner.count) if inner.array else inner.allowed.member(name)
        )
        types = (i for i, each in enumerate(self._tags.types) if fields.get("type") in (None, each))
        before, after = (
            self._tags.item
            if inner.array and self._tags.item
            else (self._tags.before, self._tags.after)
        )
        self._value = _Value(
            allowed, frozenset(types), before, _fill_tag(after, name, fields.get("type") or "")
        )
        inner.count += 1
        prefix = inner.empty_container()[0] if inner.count == 1 else ", "
        return (
            blank + head.end(),
            prefix if inner.array else f"{prefix}{json.dumps(name, ensure_ascii=False)}: ",
        )

    def _read_tagged_value(self, value: _Value, text: str) -> tuple[int, str] | None:
        if value.types == {_STRING} or (
            _STRING in value.types and value.allowed.allows_only_strings
        ):
            return (
                self._read_complete_value(value, text)
                if value.allowed.has_finite_strings
                else self._read_tagged_string(value, text)
            )
        kind: str | None = "scalar"
        if self._tags.item is not None and _STRING in value.types:
            kind = self._guess_value_kind(value, text)
        elif self._tags.item is not None:
            kind = (
                "array"
                if value.types == {_ARRAY}
                else "object"
                if value.types == {_OBJECT}
                else kind
            )
        match kind:
            case None:
                return None
            case "empty":
                return self._finish_value(
                    text.index(value.close) + len(value.close), value.allowed.json_for_empty_text()
                )
            case "scalar":
                return self._read_complete_value(value, text)
        self._value = None
        self._stack.append(_Open(value.allowed, kind == "array", value.close))
        return 0, ""

    def _guess_value_kind(self, value: _Value, text: str) -> str | None:
        """Returns the kind of a value whose tag doesn't state its type, judged by how it begins:
        "scalar", "array", "object" or "empty". Returns None if more text is needed.
        """
        stripped = text.lstrip()
        if stripped.startswith(value.close) and (
            text == stripped or not value.allowed.allows_strings
        ):
            return "empty"
        if value.close.startswith(stripped):
            return None
        text = stripped
        for kind, head in (("array", self._item), ("object", self._member)):
            found = head.match(text, partial=True)
            if found and found.partial:
                return None
            if found and (kind == "object" or value.allowed.allows_arrays):
                return kind
        return "scalar"

    def _read_tagged_string(self, value: _Value, text: str) -> tuple[int, str] | None:
        """Reads as much of a string as has arrived, without the line ends that belong to its tags."""
        skipped = 0
        found = ""
        if not value.started:
            opening = self._tags.wrapper[0] if self._tags.wrapper else ""
            if not text or (text != opening and opening.startswith(text)):
                return None
            value.wrapped = bool(opening) and text.startswith(opening)
            skipped = (
                len(opening)
                if value.wrapped
                else int(value.before.endswith("\n") and text[0] == "\n")
            )
            value.started = True
            found = '"'
        end = text.find(value.close, skipped)
        edge = (
            self._tags.wrapper[1]
            if value.wrapped and self._tags.wrapper
            else "\n"
            if value.after.startswith("\n")
            else ""
        )
        if end >= 0:
            last = end - len(edge) if edge and text.endswith(edge, skipped, end) else end
            return self._finish_value(
                end + len(value.close), found + _escape_json(text[skipped:last]) + '"'
            )
        last = partial_match_start(text, skipped, value.close)
        if edge:
            last = min(last, partial_match_start(text, skipped, edge + value.close))
        if last == skipped and not found:
            return None
        return last, found + _escape_json(text[skipped:last])

    def _read_complete_value(self, value: _Value, text: str) -> tuple[int, str] | None:
        """Reads a value once its closing tag has arrived. Used for values that, unlike strings,
        can't be read piece by piece.
        """
        start = len(text) - len(text.lstrip())
        if (
            text[start : start + 1] in ("{", "[")
            and self._tags.item is None
            and value.is_json()
            and not value.scan
        ):
            value.scan = JsonArguments()
            value.searched = start
        if value.scan and not value.scan.done:  # strings inside may contain the closing tag
            value.searched += value.scan.scan_text(text[value.searched :])
            if not value.scan.done:
                return None
        end = text.find(value.close, value.searched)
        if end < 0:
            if value.scan is None:
                value.searched = max(0, len(text) - len(value.close))
            return None
        content = text[:end]
        if value.before.endswith("\n"):
            content = content.removeprefix("\n")
        if value.after.startswith("\n"):
            content = content.removesuffix("\n")
        if self._tags.wrapper and content.startswith(self._tags.wrapper[0]):
            content = content.removeprefix(self._tags.wrapper[0])
            content = content.removesuffix(self._tags.wrapper[1])
        return self._finish_value(
            end + len(value.close), value.allowed.json(content, unquoted=_STRING in value.types)
        )

    def _finish_value(self, length: int, text: str) -> tuple[int, str]:
        self._value = None
        return length, text

    @staticmethod
    def _head_pattern(tag: str) -> regex.Pattern[str]:
        found = literal_expression(tag.rstrip(), blanks=True).replace("><", r">\s{0,100}<")
        name_group = r'(?P<name>[^<>"&/\n\r][^<>"&\n\r]*?)'
        type_group = r"(?P<type>\w+)"
        return regex.compile(
            found.replace(r"\{name\}", name_group).replace(r"\{type\}", type_group)
        )


def _escape_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
