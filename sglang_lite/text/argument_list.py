"""Writer and incremental reader of a call's arguments in a notation like `a=1, b="x"`
(`Notation`). The reader returns JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import regex

from sglang_lite.constraints.json_schema.allowed_values import AllowedValues
from sglang_lite.protocol import JsonSchema, Notation
from sglang_lite.protocol.anything import Json
from sglang_lite.text.stop import partial_match_start

NAME: Final = r"""[^\s"'=,:(){}\[\]<>|\\]{1,256}"""  # name without quotes
_BLANKS = regex.compile(r"\s*")
_MAX_SCALAR: Final = 1000  # characters of a value without quotes or brackets
_NUMBER = re.compile(r"[+-]?\.?\d[\w.+-]*")
_PYTHON_QUOTES = ('"""', "'''", '"', "'")
_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}
_WORDS: Final = {"None": "null", "True": "true", "False": "false"}
_HEXADECIMAL_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_ESCAPED: Final = {
    "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip


def argument_list_text(notation: Notation, arguments: Mapping[str, Json]) -> str:
    """Returns the text of a call's arguments."""
    return notation.comma.join(
        f"{name}{notation.equals}{_value_text(notation, value)}"
        for name, value in arguments.items()
    )


def _value_text(notation: Notation, value: Any) -> str:
    null, false, true = notation.words
    match value:
        case None:
            return null
        case bool():
            return true if value else false
        case str() if notation.quote != '"':
            return f"{notation.quote}{value}{notation.quote}"
        case list():
            comma = notation.comma if notation.nested else ", "
            return f"[{comma.join(_value_text(notation, item) for item in value)}]"
        case Mapping() if notation.nested:
            return f"{{{argument_list_text(notation, value)}}}"
        case Mapping():
            members = (
                f"{json_text(k)}: {_value_text(notation, each)}" for k, each in value.items()
            )
            return f"{{{', '.join(members)}}}"
    return json_text(value)


def json_text(value: Json) -> str:
    """Returns a value as JSON. Non-ASCII characters are not escaped."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(slots=True)
class _Open:
    """Object or array that has begun.

    Attributes:
        allowed: values that the schema allows here.
        array: True for an array, False for an object.
        close: closing bracket, or "" for the arguments as a whole.
        count: number of members or items that have begun.
        ready: True if a member or an item may begin: at the start, and after a comma.
    """

    allowed: AllowedValues
    array: bool
    close: str
    count: int = 0
    ready: bool = True

    def closing_json(self) -> str:
        """Returns the JSON text that completes the object or array."""
        brackets = "[]" if self.array else "{}"
        return brackets[1:] if self.count else brackets

    def separator_json(self) -> str:
        """Counts the next member or item, and returns the JSON text that precedes it."""
        self.count += 1
        self.ready = False
        return ", " if self.count > 1 else "[" if self.array else "{"


class ArgumentListReader:
    """Incremental reader of an object whose members are written like arguments. Returns JSON text.

    Also reads forms that models write although the notation lacks them: names and strings in any
    quotes, Python's escapes and numbers, None, True and False, tuples, commas at the end, and any
    blanks. Other text without quotes is a string.

    Args:
        notation: notation of the format.
        schema: schema of the arguments. Text without quotes is read as a string if the schema
            allows a string there, but not the value that the text would otherwise spell.

    Attributes:
        done: True once the following text is not an argument.
    """

    def __init__(self, notation: Notation, schema: JsonSchema | None) -> None:
        self.done = False
        verbatim = () if notation.quote in _PYTHON_QUOTES else (notation.quote,)
        self._quotes = (*verbatim, *_PYTHON_QUOTES)
        self._verbatim = verbatim
        self._name = _name_pattern(*verbatim)
        ends = "]}" if notation.nested else "()[]{}"
        self._scalar = regex.compile(f"[^,{re.escape(ends)}]{{0,{_MAX_SCALAR}}}")
        self._stack = [_Open(AllowedValues.for_schema(schema), array=False, close="")]
        self._allowed = self._stack[0].allowed  # values that are allowed for the next value
        self._quote = ""  # mark that ends the string that is being read
        self._read: Callable[[str, int], tuple[int, str] | None] = self._read_between

    def push(self, text: str) -> tuple[int, str]:
        """Reads as much of the text as possible. Returns the number of characters read, and the
        JSON text for them.
        """
        at = 0
        found: list[str] = []
        while not self.done:
            step = self._read(text, at)
            if step is None:
                break
            at, json_piece = step
            found.append(json_piece)
        return at, "".join(found)

    # Each of the following states reads what it can of a text, from a position on. It returns (the
    # position after it, JSON text), or None if it needs more text.

    def _read_between(self, text: str, start: int) -> tuple[int, str] | None:
        """Reads the comma, the name or the closing bracket between two values."""
        at = _skip_blanks(text, start)
        inner = self._stack[-1]
        if at == len(text):
            return None
        if text[at] == inner.close:
            self._stack.pop()
            return at + 1, inner.closing_json()
        if text[at] == "," and not inner.ready:
            inner.ready = True
            return at + 1, ""
        if inner.ready and inner.array:
            self._allowed = inner.allowed.narrow_to_item(inner.count)
            self._read = self._read_value
            return at, inner.separator_json()
        name = self._name.match(text, at, partial=True) if inner.ready else None
        if name is None:
            return at, self._finish()
        if name.partial:
            return None
        self._read = self._read_value
        found = name["bare"]
        if found is None:
            found = name["verbatim"] if name["escaped"] is None else _unescape(name["escaped"])
        self._allowed = inner.allowed.member(found)
        return name.end(), f"{inner.separator_json()}{json_text(found)}: "

    def _read_value(self, text: str, start: int) -> tuple[int, str] | None:
        """Reads a value that has neither quotes nor brackets, or the beginning of another value."""
        at = _skip_blanks(text, start)
        rest = text[at : at + max(map(len, self._quotes))]
        if any(rest != quote and quote.startswith(rest) for quote in self._quotes):
            return None
        if quote := next((each for each in self._quotes if rest.startswith(each)), ""):
            self._quote = quote
            self._read = self._read_string
            return at + len(quote), '"'
        if close := _CLOSING.get(text[at]):
            self._stack.append(_Open(self._allowed, text[at] != "{", close))
            self._read = self._read_between
            return at + 1, ""
        found = self._scalar.match(text, at)
        assert found is not None  # it matches the empty text
        if found.end() == len(text) < at + _MAX_SCALAR:
            return None
        self._read = self._read_between
        return found.end(), self._scalar_json(found[0].strip())

    def _scalar_json(self, word: str) -> str:
        found = _WORDS.get(word, word)
        if not self._allowed.allows_strings:
            found = _python_number(found)
        spelled = self._allowed.json(found, unquoted=True)
        return json_text(word) if spelled == json_text(found) else spelled

    def _read_string(self, text: str, at: int) -> tuple[int, str] | None:
        """Reads as much of a string as has arrived."""
        found = _string_end(self._quote, escapes=self._quote not in self._verbatim).search(text, at)
        if found is None:
            last = partial_match_start(text, at, self._quote)
            return (last, _string_json(text[at:last])) if last > at else None
        before = _string_json(text[at : found.start()])
        if found[0] == self._quote:
            self._read = self._read_between
            return found.end(), f'{before}"'
        if step := _read_escape(text, found.start()):
            return step[0], before + step[1]
        return (found.start(), before) if before else None

    def _finish(self) -> str:
        """Ends the arguments, and returns the JSON text that completes them."""
        self.done = True
        return "".join(each.closing_json() for each in reversed(self._stack))


@lru_cache(maxsize=16)
def _name_pattern(quote: str = "") -> regex.Pattern[str]:
    """Returns the pattern of a member's name and the sign after it. A name may be between double or
    single quotes, or between marks of `quote`.
    """
    mark = re.escape(quote)
    verbatim = (
        rf"{mark}(?P<verbatim>(?:(?!{mark}).){{0,256}}){mark}" if quote else "(?P<verbatim>(?!))"
    )
    escaped = r"""(?P<quote>["'])(?P<escaped>(?:\\.|(?!(?P=quote))[^\\]){0,256})(?P=quote)"""
    return regex.compile(rf"(?s)(?:(?P<bare>{NAME})|{verbatim}|{escaped})\s{{0,100}}[=:]")


@lru_cache(maxsize=16)
def _string_end(quote: str, *, escapes: bool) -> regex.Pattern[str]:
    """Returns the pattern of what ends plain text in a string: the closing quote, or an escape."""
    return regex.compile(re.escape(quote) + (r"|\\" if escapes else ""))


def _skip_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None  # it matches the empty text
    return int(found.end())


def _read_escape(text: str, at: int) -> tuple[int, str] | None:
    """Reads an escape of a Python string that begins at a position. Returns (the position after it,
    the characters as part of a JSON string), or None if it needs more text.
    """
    kind = text[at + 1 : at + 2]
    if kind in _ESCAPED:
        return at + 2, _string_json(_ESCAPED[kind])
    size = _HEXADECIMAL_DIGITS.get(kind, 0)
    digits = text[at + 2 : at + 2 + size]
    if not kind or (len(digits) < size and not digits.strip("0123456789abcdefABCDEF")):
        return None
    code = int(digits, 16) if size and re.fullmatch(f"[0-9a-fA-F]{{{size}}}", digits) else -1
    if not 0 <= code <= 0x10FFFF:
        return at + 1, "\\\\"  # as in Python, the backslash is part of the string
    surrogate = 0xD800 <= code <= 0xDFFF  # JSON reads a pair of these as one character
    return at + 2 + size, f"\\u{code:04x}" if surrogate else _string_json(chr(code))


def _unescape(text: str) -> str:
    """Decodes the text between the quotes of a Python string. Lone surrogates are replaced."""
    found: list[str] = []
    at = 0
    while (escape := text.find("\\", at)) >= 0:
        end, piece = _read_escape(text, escape) or (escape + 1, "\\\\")
        found += _string_json(text[at:escape]), piece
        at = end
    name: str = json.loads(f'"{"".join(found)}{_string_json(text[at:])}"')
    return name.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _python_number(word: str) -> str:
    """Returns the JSON text of a number in Python's spelling, such as 1_000, 0x1F and .5. Returns
    other texts unchanged.
    """
    if _NUMBER.fullmatch(word) is None:
        return word
    for read in (_read_prefixed_int, int, float):
        try:
            value = read(word)
        except ValueError:
            continue
        return word if math.isinf(value) else json.dumps(value)
    return word


def _read_prefixed_int(word: str) -> int:
    return int(word, 0)


def _string_json(text: str) -> str:
    return json_text(text)[1:-1]
