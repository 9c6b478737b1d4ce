"""Locates every value in a JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_lite.protocol.anything import Json

_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """A value in a text.

    Attributes:
        value: the value, if it is a scalar; None for arrays and objects.
        start, end: index of the value's first character, and of the character after the value.
        parts: items by index, or members by name, in the order of the text; None for scalars.
    """

    value: Json
    start: int
    end: int
    parts: Mapping[str | int, PlacedValue] | None = field(default=None)


def locate_values(text: str) -> PlacedValue:
    """Parses a JSON text and returns its value with the positions of all values inside.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: the value is nested too deeply.
    """
    json.loads(text)  # validates the text, so the positions can be found without checks
    return _locate_value(text, _skip_blanks(text, 0))


def _skip_blanks(text: str, at: int) -> int:
    """Returns the index of the first non-blank character from `at` on."""
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _locate_value(text: str, start: int) -> PlacedValue:
    if text[start] not in "[{":
        value, end = _DECODER.raw_decode(text, start)
        return PlacedValue(value, start, end)
    parts: dict[str | int, PlacedValue] = {}
    at = _skip_blanks(text, start + 1)
    while text[at] not in "]}":
        name: str | int = len(parts)
        if text[start] == "{":
            name, at = _DECODER.raw_decode(text, at)
            at = _skip_blanks(text, _skip_blanks(text, at) + 1)  # after the colon
        parts[name] = part = _locate_value(text, at)
        at = _skip_blanks(text, part.end)
        if text[at] == ",":
            at = _skip_blanks(text, at + 1)
    return PlacedValue(None, start, at + 1, parts)
