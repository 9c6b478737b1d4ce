"""Tracks the lists in a JSON text as it is written. Finds items that are repeated in a row more
often than permitted.

Once an item has been repeated as often as permitted, the tracker finds the shortest prefix of
another repetition after which the grammar allows only the rest of it. A text that reaches this
prefix counts as repeating the item.
"""

from __future__ import annotations

from copy import copy
from typing import TypeAlias

from sglang_lite.constraints.json_schema.repeats import RepeatRules
from sglang_lite.runtime.structured_output.base import Endings
from sglang_lite.runtime.structured_output.json_names import parse_json_or_keep
from sglang_lite.runtime.structured_output.json_text import Value, to_hashable

_FEWEST = 3  # equal items that are always permitted
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPENING = b"{["
_CLOSING = b"}]"
_BLANKS = b" \t\r\n"
_ENDS = "]},"  # characters that may end a number
_SHUT = ('"', "}", "]")  # last characters of values that have an explicit end

Step: TypeAlias = str | int


class _Open:
    """Object or array that is being written.

    Attributes:
        is_object: whether it is an object.
        step: name of the last member, or index of the current item.
        start: index in the text at which the current item begins, or -1 between items.
        end: index at which the last item ended or the array began.
        item: value of the last item.
        run: number of equal items at the end of the array so far.
        bound: prefix of another repetition of the item. If it comes after `end`, only the rest of
            the repetition can follow. Empty if the repetition is permitted, or no prefix is known.
    """

    __slots__ = ("bound", "end", "is_object", "item", "run", "start", "step")

    def __init__(self, end: int, *, is_object: bool) -> None:
        self.is_object = is_object
        self.end = end
        self.step: Step = "" if is_object else 0
        self.start = -1
        self.run = 0
        self.bound = b""
        self.item: Value = None


class ListText:
    """Tracks the lists of a JSON text.

    Args:
        rules: how many equal items may come in a row.
        endings: endings of the text's grammar after `rules.before`, or None if they are not known:
            then an item counts as repeated only when it ends.

    Attributes:
        repeated: number of items beyond the permitted repetitions in a row.
    """

    def __init__(self, rules: RepeatRules, endings: Endings | None) -> None:
        self.repeated = 0
        self._rules = rules
        self._endings = endings
        self._text = b""
        self._open: list[_Open] = []
        self._quoted = self._escaped = self._name_next = False
        self._name_start = 0
        before = rules.before.encode("utf-8", "surrogatepass")
        self._state = None if endings is None else endings.start
        self._known = len(before)  # length of the text after which the state is `_state`
        self.append_and_find_repeat(before)

    def copy(self) -> ListText:
        copied = copy(self)
        vars(copied)["_open"] = [copy(each) for each in self._open]
        return copied

    def append_and_find_repeat(self, text: bytes) -> bool:
        """Appends a text. Returns True if an item is repeated more often in a row than permitted,
        or if only such a repetition can follow.
        """
        start = len(self._text)
        again = False
        self._text += text
        for at, byte in enumerate(text, start):
            again |= self._read_byte(byte, at)
            again |= any(
                each.bound and self._text[each.end : at + 1] == each.bound for each in self._open
            )
        return again

    def _read_byte(self, byte: int, at: int) -> bool:
        if self._quoted:
            if self._escaped or byte == _BACKSLASH:
                self._escaped = not self._escaped
            elif byte == _QUOTE:
                return self._end_string(at + 1)
            return False
        if byte in _BLANKS or byte == _COLON:
            return self._end_item(at)
        if byte == _COMMA:
            again = self._end_item(at)
            self._start_next_item()
            return again
        if byte in _CLOSING:
            again = self._end_item(at)
            del self._open[-1:]
            self._name_next = False
            return self._end_item(at + 1) or again
        self._begin_value(byte, at)
        return False

    def _begin_value(self, byte: int, at: int) -> None:
        top = self._open[-1] if self._open else None
        if top is not None and top.start < 0:
            top.start = at
        if byte == _QUOTE:
            self._quoted = True
            self._name_start = at
        elif byte in _OPENING:
            self._name_next = byte == _OPENING[0]
            self._open.append(_Open(at + 1, is_object=self._name_next))

    def _start_next_item(self) -> None:
        if self._open:
            top = self._open[-1]
            self._name_next = top.is_object
            if isinstance(top.step, int):
                top.step += 1

    def _end_string(self, end: int) -> bool:
        self._quoted = False
        if not self._name_next:
            return self._end_item(end)
        self._name_next = False
        self._open[-1].step = str(parse_json_or_keep(self._text[self._name_start : end]))
        return False

    def _end_item(self, end: int) -> bool:
        """Ends the current item of the innermost array, if one has begun. Returns True if it is
        repeated too often.
        """
        top = self._open[-1] if self._open else None
        if top is None or top.is_object or top.start < 0:
            return False
        item = self._text[top.start : end]
        again = self._text[top.end : end]
        value = to_hashable(parse_json_or_keep(item))
        top.run = top.run + 1 if top.run and value == top.item else 1
        top.item = value
        top.start = -1
        top.end = end
        top.bound = b""
        if top.run < _FEWEST:
            return False
        assert isinstance(top.step, int)
        most = self._rules.max_equal_items([each.step for each in self._open[:-1]], top.step, item)
        if most is None or top.run < most:
            return False
        top.bound = self._find_repeat_prefix(end, again)
        self.repeated += top.run > most
        return top.run > most

    def _find_repeat_prefix(self, end: int, again: bytes) -> bytes:
        """Returns the shortest prefix of a repeated item after which only the rest of the
        repetition can follow. Empty if there is no such prefix or it is not known.

        Args:
            end: length of the text before the repetition.
            again: the repetition: an item and the text that separates it from the previous item.
        """
        if self._endings is None or self._state is None or end < self._known:
            return b""
        self._state = self._endings.advance_state(self._state, self._text[self._known : end])
        self._known = end
        # each character of `again`, with the state before it, and whether it is in a string
        places = []
        state = self._state
        quoted = False
        escaped = False
        for char in again.decode("utf-8", "surrogatepass"):
            if state is None:
                return b""
            places.append((char, state, quoted))
            quoted ^= char == '"' and not escaped
            escaped = char == "\\" and not escaped
            state = self._endings.advance_state(state, char.encode("utf-8", "surrogatepass"))
        if not places[-1][0].endswith(_SHUT) and self._allows_other_characters(
            state, _ENDS, quoted=False
        ):
            return b""  # a number may continue
        while places and not self._allows_other_characters(
            places[-1][1], places[-1][0], quoted=places[-1][2]
        ):
            places.pop()
        return "".join(char for char, _, _ in places).encode("utf-8", "surrogatepass")

    def _allows_other_characters(self, state: object, chars: str, *, quoted: bool) -> bool:
        """Returns True if a character outside `chars` may come next. Blanks outside a string don't
        count.
        """
        assert self._endings is not None
        others = (char for char, _ in self._endings.characters(state))
        return any(char not in chars and (quoted or char not in " \t\r\n") for char in others)
