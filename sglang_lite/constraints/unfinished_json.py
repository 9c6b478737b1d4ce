"""Closes a JSON text that was cut off by a limit, without changing any value that the model wrote.

The text is cut back to a position where closing brackets suffice to complete it. A number is kept
only if the next character has arrived, since otherwise more digits might have followed. Strings
marked as prose may be cut anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_lite.constraints.json_schema.prose import is_prose
from sglang_lite.constraints.schema import parse_json
from sglang_lite.protocol import (
    Constraint,
    Continuation,
    InOrder,
    JsonSchema,
    Repeated,
    StructuralTag,
    ValueValidationError,
)

_MARK = re.compile(
    r'["{}\[\],:]|[^\s"{}\[\],:]+'
)  # outside strings; the second part may be the beginning of a scalar
_STRING_MARK = re.compile(r'["\\]')
# An escape, with the second half of a surrogate pair if it begins one.
_HEX = r"[0-9a-fA-F]{4}"
_ESCAPE = re.compile(
    rf"\\(?:[^u]|u(?![dD][89abAB]){_HEX}|u{_HEX}(?:\\u{_HEX}|(?=[^\\]|\\[^u])))", re.DOTALL
)
_WORDS = frozenset({"true", "false", "null"})  # complete at their last letter
_MAX_TRIED = 64  # maximum number of positions tried per text


@dataclass(frozen=True, slots=True)
class ClosedText:
    """Result of closing a text that was cut off.

    Attributes:
        kept: number of characters of the original text that are kept.
        brackets: text to append to these characters, which completes the value.
        left_out: JSON Pointer of the first missing value. `-` stands for a member whose name
            is not known.
    """

    kept: int
    brackets: str
    left_out: str


@dataclass(slots=True)
class _Container:
    """An object or list that is still open.

    Attributes:
        pointer: its JSON Pointer.
        is_object: whether it is an object.
        ends: index after its opening bracket, and after each of its finished values.
        name: name of the member being written, as JSON text, or None.
    """

    pointer: str
    is_object: bool
    ends: list[int]
    name: str | None = None

    @property
    def next_pointer(self) -> str:
        """JSON Pointer of the value that is being written or comes next."""
        if not self.is_object:
            return f"{self.pointer}/{len(self.ends) - 1}"
        return f"{self.pointer}/{'-' if self.name is None else _encode_pointer_token(self.name)}"


class UnfinishedJson:
    """Reads a JSON text while it is generated, and can close it at any time.

    Args:
        schema: schema of the JSON.
        before: JSON text that the generation continues.
        mark: text that ends the reasoning before the JSON, or None. A text that begins with a
            bracket has no reasoning.

    Attributes:
        begin: index of the JSON's first character in the generation, or None if it has not
            arrived.
    """

    def __init__(self, schema: JsonSchema, before: str = "", mark: str | None = None) -> None:
        self._schema = schema
        self._mark = mark
        self._reasoning = ""  # text before the JSON
        self._text = ""
        self._at = 0  # everything before it was read
        self._open: list[_Container] = []
        self._string: int | None = None  # index after the opening quotation mark of the open string
        self._expects_name = False
        self.begin: int | None = 0 if mark is None else None
        self._read_text(before)
        self._first = -len(before)  # index of the JSON's first character in the generation

    def push(self, text: str) -> None:
        """Appends a piece of the text."""
        if self._mark is not None:
            self._reasoning += text
            begin = 0 if self._reasoning[:1] in ("{", "[") else self._reasoning.find(self._mark)
            if begin < 0:
                return
            found = re.compile(r"[\[{]").search(self._reasoning, begin)
            if found is None:
                return
            self._mark = None
            self._first = found.start()
            self.begin = found.start()
            text = self._reasoning[found.start() :]
        self._read_text(text)

    def _read_text(self, text: str) -> None:
        self._text += text
        size = len(self._text)
        while self._at < size:
            if self._string is not None:
                if not self._read_string():
                    return
                continue
            found = _MARK.search(self._text, self._at)
            if found is None:
                self._at = size
                return
            mark = found.group()
            if mark[0] in '"{}[],:':
                self._at = found.end()
                self._read_delimiter(mark)
            elif mark in _WORDS:
                self._at = found.end()
                self._end_value(found.end())
            elif found.end() == size:  # it may continue
                self._at = found.start()
                return
            else:
                self._at = found.end()
                self._end_value(found.end())

    def _read_string(self) -> bool:
        """Continues reading a string. Returns False if its end has not arrived."""
        found = _STRING_MARK.search(self._text, self._at)
        if found is None:
            self._at = len(self._text)
            return False
        if found.group() == "\\":
            escape = _ESCAPE.match(self._text, found.start())
            self._at = found.start() if escape is None else escape.end()
            return escape is not None
        self._at = found.end()
        assert self._string is not None
        if self._expects_name:
            self._open[-1].name = self._text[self._string : found.start()]
            self._expects_name = False
        else:
            self._end_value(found.end())
        self._string = None
        return True

    def _read_delimiter(self, mark: str) -> None:
        if mark == '"':
            self._string = self._at
        elif mark in "{[":
            pointer = self._open[-1].next_pointer if self._open else ""
            self._open.append(_Container(pointer, mark == "{", [self._at]))
            self._expects_name = mark == "{"
        elif mark == ",":
            self._expects_name = bool(self._open) and self._open[-1].is_object
        elif mark in "}]" and self._open:
            self._open.pop()
            self._expects_name = False
            self._end_value(self._at)

    def _end_value(self, end: int) -> None:
        if self._open:
            top = self._open[-1]
            top.ends.append(end)
            top.name = None

    def close(self, first: int = 0) -> ClosedText | None:
        """Closes the text at the last position where closing it gives a valid value.

        Args:
            first: number of characters of the generation that must be kept.

        Returns:
            The closed text, or None if there is no such place.
        """
        for tried, (end, brackets, left_out) in enumerate(self._iterate_possible_closings()):
            kept = end + self._first
            if kept < first or tried == _MAX_TRIED:
                return None
            if self._is_valid(self._text[:end] + brackets):
                return ClosedText(kept, brackets, left_out)
        return None

    def close_at_last_position(self) -> str:
        """Returns the JSON closed at the last possible position. The result may be invalid under
        the schema. Returns "" if the JSON has not begun.
        """
        last = next(self._iterate_possible_closings(), None)
        return "" if last is None else self._text[: last[0]] + last[1]

    def _is_valid(self, text: str) -> bool:
        try:
            parse_json(self._schema, text)
        except ValueValidationError:
            return False
        return True

    def _iterate_possible_closings(self) -> Iterator[tuple[int, str, str]]:
        """Yields the ways to complete the JSON with brackets, the last position first. Each is a
        tuple of the position, the brackets to add, and the JSON Pointer of the first missing value.
        """
        if (
            self._string is not None
            and not self._expects_name
            and self._open
            and self._may_cut_string()
        ):
            yield (
                self._at,
                f'"{self._closing_brackets(len(self._open))}',
                self._open[-1].next_pointer,
            )
        for depth in range(len(self._open), 0, -1):
            container = self._open[depth - 1]
            pointer = container.next_pointer
            for count in range(len(container.ends) - 1, -1, -1):
                if count < len(container.ends) - 1:
                    pointer = self._value_pointer(container, count)
                yield container.ends[count], self._closing_brackets(depth), pointer

    def _value_pointer(self, container: _Container, count: int) -> str:
        """Returns the JSON Pointer of the value that has `count` values before it in its container."""
        if not container.is_object:
            return f"{container.pointer}/{count}"
        after = self._text[container.ends[count] : container.ends[count + 1]]
        name = re.search(r'"((?:[^"\\]|\\.)*)"', after)
        return (
            f"{container.pointer}/{'-' if name is None else _encode_pointer_token(name.group(1))}"
        )

    def _closing_brackets(self, depth: int) -> str:
        return "".join("}" if each.is_object else "]" for each in reversed(self._open[:depth]))

    def _may_cut_string(self) -> bool:
        """Returns True if the string being written may end anywhere."""
        path = [
            _name(each.name or "") if each.is_object else len(each.ends) - 1 for each in self._open
        ]
        return is_prose(self._schema, path)


def create_unfinished_json(constraint: Constraint) -> UnfinishedJson | None:
    """Creates a reader for the texts of a constraint. Returns None if the texts are not JSON.
    Reasoning may precede the JSON.
    """
    match constraint:
        case JsonSchema():
            return UnfinishedJson(constraint)
        case Continuation(JsonSchema() as whole, text, None):
            return UnfinishedJson(whole, before=text)
        case Continuation(_, _, JsonSchema() as part):
            return UnfinishedJson(part)
        case InOrder((before, JsonSchema() as answer)) if (
            mark := _find_reasoning_end_mark(before)
        ) is not None:
            return UnfinishedJson(answer, mark=mark)
    return None


def _find_reasoning_end_mark(constraint: Constraint) -> str | None:
    """Returns the text that ends the reasoning. Returns None if the constraint does not describe
    reasoning.
    """
    match constraint:
        case StructuralTag((tag,), _, True, True):
            return tag.begin
        case Repeated(item):
            return _find_reasoning_end_mark(item)
        case InOrder(parts):
            return next(
                (mark for part in parts if (mark := _find_reasoning_end_mark(part)) is not None),
                None,
            )
    return None


def _name(text: str) -> str:
    """Decodes a name written in JSON."""
    return str(json.loads(f'"{text}"'))


def _encode_pointer_token(text: str) -> str:
    """Returns a member's step in a JSON Pointer (RFC 6901), from its name as written in JSON."""
    return _name(text).replace("~", "~0").replace("/", "~1")
