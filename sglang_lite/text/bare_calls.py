"""Tool calls that a model writes without its format's marks: JSON objects that name a tool, at the
beginning of a line or in a code fence. Qwen2.5-Coder writes such calls although its chat template
asks for marks. It writes some of them in double braces, copying the template's example.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

import regex

from sglang_lite.text.tool_arguments import literal_expression

_FENCE = r"```\w{0,20}[ \t]{0,20}\r?\n"
_STARTS = regex.compile(r"```|`{1,2}\Z|(?m:^)\{")  # where an object or a fence may begin
_STRING = r'"(?:[^"\\]|\\.)*+"'
END = regex.compile(r"\s{0,100}\}")
DOUBLED_END = regex.compile(r"\s{0,100}\}\s{0,100}\}")
FENCE_END = regex.compile(r"\s{0,100}```(?=\W)")  # a word would be the language of the next fence


@dataclass(frozen=True, slots=True)
class FoundCall:
    """Beginning of a call in a text. At the end of the text, it may be incomplete.

    Attributes:
        start, end: range of this beginning in the text. Includes a code fence before the call, and
            the arguments if they are a string.
        name: name of the tool; "" if the text ends before it.
        arguments: JSON text of arguments that are written as a JSON string, or "" if they are an
            object, which follows.
        doubled: whether the object is in double braces.
        whole: False if more text is needed to decide whether this is a call.
    """

    start: int
    end: int
    name: str
    arguments: str
    doubled: bool
    whole: bool


class BareCalls:
    """Finds where tool calls without marks begin.

    Args:
        heads: text before and after the tool's name, in which a blank matches any blanks.
        names: names of the tools.
    """

    def __init__(self, heads: tuple[str, str], names: tuple[str, ...]) -> None:
        self._head, self._named = _build_call_patterns(heads, names)

    def find(self, text: str, *, at_line: bool) -> FoundCall | None:
        """Returns the first call that begins in a text. At the end of the text, its beginning may
        be incomplete.

        Args:
            at_line: whether the text begins a line.
        """
        for start in _STARTS.finditer(text):
            at = start.start()
            if not at and not at_line and start[0] == "{":
                continue
            found = self._head.match(text, at, partial=True)
            if found is None:
                continue
            if found.partial:
                named = self._named.match(text, at)
                return FoundCall(
                    at, len(text), named["name"] if named else "", "", doubled=False, whole=False
                )
            arguments = "" if found["string"] is None else _decode_object(found["string"])
            if arguments is not None:
                doubled = found["outer"] is not None
                return FoundCall(at, found.end(), found["name"], arguments, doubled, whole=True)
        return None


def _decode_object(string: str) -> str | None:
    """Returns the JSON text of an object that is written as a JSON string, or None if the string
    doesn't contain an object.
    """
    try:
        text = json.loads(string)
        return text if isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None


@lru_cache(maxsize=64)
def _build_call_patterns(
    heads: tuple[str, str], names: tuple[str, ...]
) -> tuple[regex.Pattern[str], regex.Pattern[str]]:
    """Returns two patterns of a call: one up to its arguments, and one up to the end of its name."""
    begin, middle = (literal_expression(text, blanks=True) for text in heads)
    named = rf"(?:{_FENCE})?(?P<outer>\{{)?{begin}(?P<name>{'|'.join(map(regex.escape, names))})"
    arguments = rf"\s{{0,100}}(?:(?=\{{)|(?P<string>{_STRING})(?=\s{{0,100}}\}}))"
    return regex.compile(f"{named}{middle}{arguments}"), regex.compile(f'{named}"')
