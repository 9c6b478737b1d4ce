"""Tracks a JSON text as it is written, only to ensure that no object has a name twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

# bytes that begin or end names and containers, and escapes
MARK = re.compile(rb'\\.?|["{}\[\],]', re.DOTALL)
_QUOTE, _BACKSLASH, _COMMA, _OBJECT, _ARRAY = b'"\\,{['


@lru_cache(maxsize=4096)  # mostly called with tokens, few of which are frequent
def _find_json_punctuation(text: bytes, start: bool) -> list[tuple[int, int]]:
    """Returns the quotation marks, brackets, commas and escapes in a text, as pairs of index and
    first byte. If `start` is True, skips the first byte of the text, which belongs to an earlier
    escape.
    """
    return [(match.start(), text[match.start()]) for match in MARK.finditer(text, start)]


class UniqueNames:
    """Tracks a JSON text whose only mask rule is that the names in an object are unique. Has the
    interface of JsonText.

    Attributes:
        is_strict: whether a text that breaks the rules is rejected; else it is left to the check of
            the finished value.
        has_rules: whether positions of a schema have rules.
        missing: names that must come before the innermost object ends.
        quoted: whether the text is inside a string.
        escaped: whether the text ends inside an escape of a string.
    """

    is_strict = has_rules = False
    missing: Sequence[bytes] = ()

    def __init__(self) -> None:
        # names that have come in the open objects; None for an array
        self._open: list[frozenset[bytes] | None] = []
        self._used: list[frozenset[bytes]] | None = None  # cached `used_names`
        self._name: bytes | None = None  # beginning of the name that is being written
        self.quoted = self.escaped = False
        # whether a name may begin, or must (after a comma)
        self._may_begin = self._expected = False

    def copy(self) -> UniqueNames:
        copied = UniqueNames()
        vars(copied).update(vars(self), _open=self._open.copy())
        return copied

    def track_text(self, text: bytes) -> bool:
        """Appends a text. Returns False if it repeats a name."""
        if not text:
            return True
        if self.quoted and not self.escaped and b'"' not in text and b"\\" not in text:
            if self._name is not None:
                self._name += text
            return True
        start = 0
        unique = True
        name = self._name
        escaped = False
        for at, byte in _find_json_punctuation(text, self.escaped):
            if self.quoted:
                if byte == _BACKSLASH:
                    escaped = at + 1 == len(text)
                elif byte == _QUOTE:
                    self.quoted = False
                    if name is not None:
                        unique = self._add_used_name(name + text[start : at + 1]) and unique
                        name = None
            elif byte == _QUOTE:
                self.quoted = True
                if self._may_begin:
                    name = b""
                    start = at
                    self._expected = False
            elif byte == _COMMA:
                self._may_begin = self._expected = bool(self._open) and self._open[-1] is not None
            elif byte in (_OBJECT, _ARRAY):
                self._open.append(frozenset() if byte == _OBJECT else None)
                self._may_begin = byte == _OBJECT
                self._expected = False
                self._used = None
            elif byte != _BACKSLASH:
                del self._open[-1:]
                self._may_begin = False
                self._expected = False
                self._used = None
        self.escaped = escaped
        self._name = None if name is None else name + text[start:]
        return unique

    def _add_used_name(self, name: bytes) -> bool:
        """Adds a name to the innermost object. Returns False if the object already has it."""
        names = self._open[-1] or frozenset()
        self._open[-1] = names | {name}
        self._used = None
        self._may_begin = False
        return name not in names

    @property
    def name_so_far(self) -> bytes:
        """Beginning of the name that is being written; empty outside of names."""
        return self._name or b""

    @property
    def is_naming(self) -> bool:
        """True inside a name, but not inside an escape of it."""
        return self._name is not None and not self.escaped

    @property
    def is_restricted(self) -> bool:
        """True where a token may break a rule even if it contains no whole name."""
        return self._name is not None or self._expected or self.escaped

    @property
    def used_names(self) -> list[frozenset[bytes]]:
        """Names used so far in each open object, as JSON texts."""
        if self._used is None:
            self._used = [names for names in self._open if names]
        return self._used

    def forbidden_continuations(self) -> list[bytes]:
        """Returns the texts that must not come next, because they would complete a name that the
        innermost object already has.
        """
        used = self._open[-1] if self._open else None
        if not used or self.escaped or not (self._expected or self._name is not None):
            return []
        begun = self._name or b""
        return [each[len(begun) :] for each in used if each.startswith(begun)]
