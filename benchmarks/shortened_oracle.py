"""What a shortened answer has to be, read off the log of draws by code that shares nothing with the
package.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema

Place: TypeAlias = tuple[str | int, ...]

_NUMBER = re.compile(r"[-+0-9.eE]+")
_BARE_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_SPACE = " \t\r\n"
_LITERALS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
_EXAMPLES = 4


class Vocabulary:
    """Bytes of the tokens of a GGUF file with a byte-level vocabulary (GPT-2's alphabet)."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        fields = GGUFReader(path).fields
        kinds = fields["tokenizer.ggml.token_type"].contents()
        printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printed]
        alphabet = {chr(b): b for b in printed} | {chr(256 + i): b for i, b in enumerate(others)}
        self._tokens = [
            b""
            if kind == 3
            else bytes(alphabet[c] for c in text)
            if all(c in alphabet for c in text)
            else text.encode()
            for text, kind in zip(fields["tokenizer.ggml.tokens"].contents(), kinds)
        ]

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens, without control tokens and without an incomplete character at its end."""
        data = b"".join(self._tokens[token] for token in ids)
        text = data.decode("utf-8", "replace")
        return text.rstrip("\ufffd") if text.endswith("\ufffd") else text


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens that one request drew, or had appended by its grammar, and why it ended.

    Attributes:
        prompt: ids of its prompt.
        ids: ids of its tokens.
        finish: reason for its end; "length" if the log ended it.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    finish: str

    def begins(self, other: Draws) -> bool:
        """True if the other has these draws, and maybe more."""
        return self.ids == other.ids[: len(self.ids)]


@dataclass(slots=True)
class Outcome:
    """What a caller received: `shortened` is None where the answer says nothing about it; `error`
    is an exception's type and text, `pieces` a stream's texts so far.
    """

    text: str | None
    finish: str = ""
    shortened: Any = None
    error: str | None = None
    calls: list[str] = field(default_factory=list)

    @property
    def marked(self) -> bool:
        return self.finish not in ("stop", "tool_calls") or bool(self.shortened)


@dataclass(slots=True)
class _Frame:
    opening: str
    key: str | int = 0


class Scan:
    """What the beginning of a JSON text has.

    Attributes:
        scalars: values of the scalars whose end is in the text, by place.
        kinds: "{" or "[" of each container that has begun.
        begun: places of all values of which a character, or the member's name, is in the text.
        cuts: places in the text after which closing brackets alone may follow, with these.
        whole: whether the text has a complete value.
    """

    def __init__(self, text: str) -> None:
        self.scalars: dict[Place, Any] = {}
        self.kinds: dict[Place, str] = {}
        self.begun: set[Place] = set()
        self.cuts: list[tuple[int, str]] = []
        self.whole = False
        self._text, self._at, self._stack = text, 0, list[_Frame]()
        self._read()

    def _read(self) -> None:
        expects = "value"
        while expects:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at == len(self._text):
                return
            c = self._text[self._at]
            if expects == "name" or (expects == "name or end" and c != "}"):
                expects = self._name()
            elif expects in ("value or end", "name or end") and c in "]}":
                expects = self._close()
            elif expects == "next":
                expects = self._next(c)
            else:
                expects = self._value(c)

    @property
    def _place(self) -> Place:
        return tuple(frame.key for frame in self._stack)

    def _value(self, c: str) -> str:
        place = self._place
        self.begun.add(place)
        if c in "{[":
            self.kinds[place] = c
            self._stack.append(_Frame(c))
            self._at += 1
            self._cut()
            return "name or end" if c == "{" else "value or end"
        end = self._end_of_scalar(c)
        if end is None:
            return ""
        self.scalars[place] = json.loads(self._text[self._at : end], strict=False)
        self._at = end
        return self._ended()

    def _end_of_scalar(self, c: str) -> int | None:
        """Index behind a scalar, or None if its end is not in the text."""
        if c == '"':
            return self._end_of_string()
        if c in _LITERALS:
            end = self._at + len(_LITERALS[c][0])
            return end if end <= len(self._text) else None
        number = _NUMBER.match(self._text, self._at)
        if number is None:
            raise ValueError(f"no JSON at {self._at}: {self._text[self._at :]!r:.60}")
        return None if number.end() == len(self._text) else number.end()

    def _end_of_string(self) -> int | None:
        at = self._at + 1
        while at < len(self._text) and self._text[at] != '"':
            at += 2 if self._text[at] == "\\" else 1
        return at + 1 if at < len(self._text) else None

    def _name(self) -> str:
        end = self._end_of_string()
        if end is None:
            return ""
        self._stack[-1].key = json.loads(self._text[self._at : end], strict=False)
        self.begun.add(self._place)
        colon = self._text.find(":", end)
        self._at = colon + 1
        return "value" if colon >= 0 else ""

    def _next(self, c: str) -> str:
        if c in "]}":
            return self._close()
        self._at += 1
        frame = self._stack[-1]
        if frame.opening == "{":
            return "name"
        assert isinstance(frame.key, int)
        frame.key += 1
        return "value"

    def _close(self) -> str:
        self._stack.pop()
        self._at += 1
        return self._ended()

    def _ended(self) -> str:
        """A value has ended, and nothing else."""
        self.whole = not self._stack
        self._cut()
        return "" if self.whole else "next"

    def _cut(self) -> None:
        if self._stack:
            self.cuts.append(
                (self._at, "".join("}" if f.opening == "{" else "]" for f in reversed(self._stack)))
            )


def places(value: Any, at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Scalars of a value with their places, and empty containers."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from places(inner, (*at, index))
    else:
        yield at, value


def place_of(pointer: str, value: Any) -> Place:
    """Place that a JSON Pointer names: whether a part is a name or an index depends on the value
    around it.
    """
    found: list[str | int] = []
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        index = isinstance(value, list) and name.isdecimal()
        found.append(int(name) if index else name)
        value = _inside(value, found[-1:])
    return tuple(found)


def _inside(value: Any, place: Sequence[str | int], default: Any = None) -> Any:
    """The value at a place, or the default if nothing is there."""
    for part in place:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return default
    return value


_NOTHING = object()


class Judge:
    """Compares limited answers with the draws of the unlimited ones, and counts.

    Attributes:
        counts: of each way, cases by what they were.
        violations: of each way, by kind; `examples` has a few of each kind.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._validators: dict[int, Any] = {}
        self.counts: dict[str, Counter[str]] = {}
        self.violations: dict[str, Counter[str]] = {}
        self.notes: dict[str, Counter[str]] = {}
        self.examples: dict[str, list[str]] = {}

    def text(self, draws: Draws) -> str:
        return self._vocabulary.text(draws.ids)

    def unlimited(self, draws: Draws, *, number: bool) -> str | None:
        """Text of the unlimited answer, or None if it did not end."""
        if draws.finish != "stop":
            return None
        text = self.text(draws)
        found = _BARE_NUMBER.match(text) if number else None
        return text if found is None else found[0]

    def violation(self, way: str, kind: str, what: str) -> None:
        self.violations.setdefault(way, Counter())[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if len(shown) < _EXAMPLES:
            shown.append(f"{way}: {what}")

    def case(self, way: str, what: str) -> None:
        self.counts.setdefault(way, Counter())[what] += 1

    def note(self, way: str, what: str) -> None:
        self.notes.setdefault(way, Counter())[what] += 1

    def judge(
        self, way: str, schema: Any, limit: int, free: Draws, drawn: Draws, got: Outcome, name: str
    ) -> None:
        """Judges one limited answer.

        Args:
            schema: JSON Schema, or None where the text is not JSON.
            limit: limit in tokens.
            free: draws of the unlimited answer.
            drawn: draws of this one.
            got: what the caller received.
            name: of the case, for messages.
        """
        number = isinstance(schema, dict) and schema.get("type") in ("integer", "number")
        whole, raw = self.unlimited(free, number=number), self._vocabulary.text(free.ids[:limit])
        what = f"{name}, limit {limit}: {got!r:.400}; unlimited {self.text(free)[:300]!r}"
        self.case(way, "cases")
        if whole is None or len(free.ids) > limit:
            self.case(way, "reached limit")
        if not drawn.begins(free):
            self.violation(way, "draws differ from the unlimited ones", what)
        elif whole is None and len(drawn.ids) < limit:
            self.violation(way, "ended before its limit", what)
        if got.error is not None and got.error.startswith("TruncatedError"):
            self.case(way, "marked without value")
            if whole is not None and len(free.ids) <= limit:
                self.violation(way, "marked, though the unlimited answer fits", what)
        elif got.error is not None or got.text is None:
            self.violation(way, "error", what)
        elif not got.marked:
            self.case(way, "unmarked")
            if got.text != whole and not self._ends_before(schema, raw, got.text):
                self.violation(way, "unmarked, and not the unlimited answer", what)
        else:
            if whole is not None and len(free.ids) <= limit:
                self.violation(way, "marked, though the unlimited answer fits", what)
            self._marked(way, schema, raw, self.text(free) if whole is None else whole, got, what)

    def judge_call(
        self,
        way: str,
        limit: int,
        free: Draws,
        drawn: Draws,
        got: Outcome,
        whole: Outcome,
        name: str,
    ) -> None:
        """Judges a limited answer that has to call a tool: its arguments are those of the unlimited
        one, or as cut.
        """
        raw, what = (
            self.text(free),
            f"{name}, limit {limit}: {got!r:.400}; unlimited {whole!r:.300}",
        )
        self.case(way, "cases")
        fits = free.finish == "stop" and len(free.ids) <= limit
        if not fits:
            self.case(way, "reached limit")
        if not drawn.begins(free):
            self.violation(way, "draws differ from the unlimited ones", what)
        if got.error is not None:
            self.violation(way, "error", what)
        elif not got.marked:
            self.case(way, "unmarked")
            if free.finish != "stop" or (got.calls, got.text) != (whole.calls, whole.text):
                self.violation(way, "unmarked, and not the unlimited answer", what)
        else:
            self.case(way, "marked without value")
            if fits:
                self.violation(way, "marked, though the unlimited answer fits", what)
            if any(call not in raw for call in [*got.calls, got.text or ""]):
                self.violation(way, "text is not as drawn", what)

    def _ends_before(self, schema: Any, raw: str, text: str) -> bool:
        """True if drawn text is behind the end of a text that is no object or list: what did not go
        on with it.
        """
        bare = schema is None or raw.lstrip()[:1] not in ("{", "[")
        return bare and text != "" and raw.startswith(text)

    def _marked(self, way: str, schema: Any, raw: str, text: str, got: Outcome, what: str) -> None:
        assert got.text is not None
        if got.finish != "length":
            self.violation(way, f"marked, and its reason is {got.finish!r}", what)
        if got.shortened is not None and not got.shortened and not _is_whole(got.text, text):
            self.violation(way, "nothing is shortened, and the unlimited answer has more", what)
        bare = schema is None or raw.lstrip()[:1] not in ("{", "[")
        possible = None if bare else self._longest(schema, raw)
        if (
            bare
            or got.shortened == [""]
            or (got.text == raw and not isinstance(got.shortened, list))
        ):
            self.case(way, "marked without value")
            if got.text != raw and not self._ends_before(schema, raw, got.text):
                self.violation(way, "no value, and its text is not as cut", what)
            if possible is not None:
                self.note(way, "no value, though one closes")
                self._show("no value, though one closes", f"{way}: {possible!r}; {what}")
            return
        self.case(way, "marked with value")
        try:
            value = json.loads(got.text, strict=False)
        except ValueError:
            self.violation(way, "marked with a value that is no JSON", what)
            return
        self._check_text(way, raw, got.text, what)
        self._check_value(way, schema, text, value, what)
        if isinstance(got.shortened, list):
            self._check_pointers(way, text, value, got.shortened, what)
        if possible is not None and got.text != possible:
            kind = (
                "keeps less than closes"
                if len(got.text) < len(possible)
                else "keeps other than closes"
            )
            self.note(way, kind)
            self._show(kind, f"{way}: {possible!r}; {what}")

    def _show(self, kind: str, what: str) -> None:
        shown = self.examples.setdefault(kind, [])
        if len(shown) < _EXAMPLES:
            shown.append(what)

    def _check_text(self, way: str, raw: str, text: str, what: str) -> None:
        """The text without its closing brackets has to be drawn, and the end of its last scalar as
        well.
        """
        kept = text.rstrip("]}" + _SPACE)
        if not raw.startswith(kept):
            self.violation(way, "text is not as drawn", what)
        elif kept[-1:] not in ("[", "{", '"', ""):
            last = _NUMBER.search(kept[-40:][::-1])
            number = last is not None and last.start() == 0 and kept[-1].isdigit()
            if number and (len(raw) == len(kept) or _NUMBER.match(raw, len(kept))):
                self.violation(way, "a number's end was not drawn", what)

    def _check_value(self, way: str, schema: Any, text: str, value: Any, what: str) -> None:
        scan = Scan(text)
        for place, inner in places(value):
            if isinstance(inner, (dict, list)):
                if scan.kinds.get(place) != ("{" if isinstance(inner, dict) else "["):
                    self.violation(
                        way, "a container is not in the unlimited answer", f"{place}; {what}"
                    )
            elif not _is_same(scan.scalars.get(place, _NOTHING), inner):
                self.violation(
                    way, "a scalar differs from the unlimited answer", f"{place}; {what}"
                )
        if schema is not None and not self._is_valid(schema, value):
            self.violation(way, "a value is not valid", what)

    def _check_pointers(
        self, way: str, text: str, value: Any, pointers: list[str], what: str
    ) -> None:
        scan = Scan(text)
        for pointer in pointers:
            place = place_of(pointer, value)
            there = _inside(value, place, _NOTHING)
            if there is not _NOTHING and not isinstance(there, (dict, list)):
                self.violation(way, "a pointer names what is there", f"{pointer}; {what}")
            elif there is not _NOTHING:
                self.note(way, "a pointer names a container that is there")
            elif place not in scan.begun:
                around = _inside(value, place[:-1], _NOTHING)
                if not (isinstance(around, list) and place[-1] == len(around)) and not isinstance(
                    around, dict
                ):
                    self.violation(way, "a pointer names no place", f"{pointer}; {what}")
                elif isinstance(around, dict):
                    self.note(way, "a pointer names a member that the unlimited answer lacks")

    def _longest(self, schema: Any, raw: str) -> str | None:
        """Longest beginning of a text with closing brackets that is valid, or None if none is."""
        for end, closing in reversed(Scan(raw).cuts):
            text = raw[:end] + closing
            try:
                if self._is_valid(schema, json.loads(text, strict=False)):
                    return text
            except ValueError:
                continue
        return None

    def _is_valid(self, schema: Any, value: Any) -> bool:
        validator = self._validators.get(id(schema))
        if validator is None:
            kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            validator = self._validators[id(schema)] = kind(schema)
        return bool(validator.is_valid(value))


def _is_whole(text: str, other: str) -> bool:
    """True if two texts are JSON of the same value: of one, closing brackets alone were not drawn."""
    try:
        return bool(json.loads(text) == json.loads(other))
    except ValueError:
        return False


def _is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other
