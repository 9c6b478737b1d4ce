"""Tracks a JSON text as it is written: its open objects and arrays, and the names and items that
must not be repeated.

The text is followed through the positions of a schema (constraints/json_schema/mask_rules.py):
names in an object are unique, items differ, and required names come before their object ends. If
the masks only have to keep names unique, unique_names.py is faster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

from sglang_lite.constraints.formal.counting import CountedTexts, count_texts, has_unused_text
from sglang_lite.constraints.formal.nodes import NOTHING, Node
from sglang_lite.constraints.json_schema.mask_rules import RulePosition
from sglang_lite.runtime.structured_output.json_names import (
    Kind,
    MemberNames,
    PossibleKind,
    parse_json_or_keep,
)

_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPENING = b"{["
_CLOSING = b"}]"
_BLANKS = b" \t\r\n"
_SHUT = (b'"', b"{", b"[")  # first bytes of values that have an explicit end

Value: TypeAlias = Any  # JSON value in a hashable form


class RulePositions:
    """Positions of the values in a schema. Counts the texts that are possible in each position.

    Args:
        positions: positions with rules, the start first.
    """

    def __init__(self, positions: Sequence[RulePosition]) -> None:
        self._positions = positions
        self.texts = cache(lambda node: None if node == NOTHING else count_texts(node))
        self._kinds = {
            id(each): tuple(
                PossibleKind(Kind(names, self.texts), names.required) for names in each.names
            )
            for each in positions
        }
        self._endless: dict[tuple[int, bytes], bool] = {}

    def has_endless_texts(self, texts: CountedTexts, text: bytes) -> bool:
        """Returns True if infinitely many counted texts begin with `text`, ignoring its closing
        byte. Also returns True if no counted text begins with `text`.
        """
        key = id(texts), text
        if key not in self._endless:
            before = text[:-1] if text[:1] in _SHUT else text
            counts = [
                texts.count_with_prefix(each.decode("utf-8", "ignore")) for each in (text, before)
            ]
            self._endless[key] = counts[0] == 0 or counts[1] is None
        return self._endless[key]

    def names(self, position: RulePosition | None) -> MemberNames:
        """Returns the names of an object at a position before any of them has been used."""
        return MemberNames(self._kinds.get(id(position), ()))

    def __getitem__(self, number: int | None) -> RulePosition | None:
        return None if number is None else self._positions[number]


class _Container:
    """Object or array that is being written. Copies share its sets, which are replaced but never
    changed.

    Attributes:
        position: position of the container's value in the schema, or None if neither the value nor
            its parts have rules.
        is_object: whether the container is an object, not an array.
        names: names so far.
        name: last name.
        value_start: index in the whole text at which the last name's value begins, if that value
            matters; else -1.
        used: texts of the items so far.
        values: values of the items so far, if they have to differ.
        start: index in the whole text at which the current name or item begins, or -1 between them.
        pending: whether a comma has come, so that another name or item must follow.
        child: number of the schema position of the current member or item, or None if it has none.
        count: number of items so far.
    """

    __slots__ = (
        "child", "count", "is_object", "name", "names", "pending", "position", "start", "used", "value_start", "values",
    )  # fmt: skip

    def __init__(
        self, position: RulePosition | None, names: MemberNames, *, is_object: bool
    ) -> None:
        self.position = position
        self.names = names
        self.is_object = is_object
        self.name = b""
        self.value_start = -1
        self.used: frozenset[bytes] = frozenset()
        self.values: frozenset[Value] = frozenset()
        self.start = -1
        self.count = 0
        self.pending = False
        self.child: int | None = None

    def copy(self) -> _Container:
        copied = object.__new__(_Container)
        copied.position = self.position
        copied.names = self.names
        copied.is_object = self.is_object
        copied.name = self.name
        copied.value_start = self.value_start
        copied.used = self.used
        copied.values = self.values
        copied.start = self.start
        copied.count = self.count
        copied.pending = self.pending
        copied.child = self.child
        return copied

    def next_item_language(self) -> Node | None:
        """Returns the language of the next item's texts, or None if the items need not differ.

        If items may be any JSON values, the language contains only the scalars.
        """
        return (
            None
            if self.position is None or self.position.items is None
            else self.position.items.texts_at(self.count)
        )

    def record_value(self, text: bytes) -> None:
        """Records the value of the current member at its end."""
        self.names = self.names.with_value(self.name, text)
        self.value_start = -1

    @property
    def differs(self) -> bool:
        """True if the container is an array whose items have to differ."""
        return not self.is_object and self.position is not None and self.position.items is not None


class JsonText:
    """Tracker of a JSON text as it is written.

    Args:
        positions: positions of the schema that the text follows.

    Attributes:
        is_strict, is_restricted, is_naming, quoted, escaped: same as in UniqueNames.
    """

    is_strict = is_restricted = True
    is_naming = False  # a name may have to be one of a few, so each of its tokens must be tried

    def __init__(self, positions: RulePositions) -> None:
        self._positions = positions
        self._open: list[_Container] = []
        self._text = b""  # kept only while a container needs it
        # cached `used_names`; None after a new name or container
        self._used: list[frozenset[bytes]] | None = None
        self.quoted = self.escaped = self._is_name = self._name_next = False

    def copy(self) -> JsonText:
        copied = JsonText(self._positions)
        vars(copied).update(vars(self), _open=[each.copy() for each in self._open])
        return copied

    # ------------------------------------------------------------------------------------ following

    def track_text(self, text: bytes) -> bool:
        """Appends a text. Returns False if it repeats a name or item, or if no permitted one could
        follow.
        """
        if self.quoted and not self.escaped and b'"' not in text and b"\\" not in text:
            if not self._text:
                return True  # nothing depends on this string
            self._text += text
            return all(
                self._may_end_unused(top, prefix) for top, prefix in self._unfinished_containers()
            )
        start = len(self._text)
        allowed = True
        self._text += text
        for at, byte in enumerate(text, start):
            if not self.quoted:
                allowed &= self._read_outside_string(byte, at)
            elif self.escaped:
                self.escaped = False
            elif byte == _BACKSLASH:
                self.escaped = True
            elif byte == _QUOTE:
                allowed &= self._end_string(at + 1)
        # In each position that needs a name or item, one that has not come must be possible.
        allowed = allowed and all(
            self._may_end_unused(top, prefix) for top, prefix in self._unfinished_containers()
        )
        if not any(each.start >= 0 or each.value_start >= 0 for each in self._open):
            self._text = b""
        return allowed

    def _read_outside_string(self, byte: int, at: int) -> bool:
        top = self._open[-1] if self._open else None
        if byte in _BLANKS or byte == _COLON:
            return self._end_item(top, at) if byte in _BLANKS else True
        if byte == _COMMA:
            allowed = self._end_item(top, at)
            if top is not None:
                top.count += not top.is_object
                top.pending = True
                self._name_next = top.is_object
            return allowed
        if byte in _CLOSING:
            return self._close_container(top, at)
        if top is not None and top.start < 0 and not top.is_object:
            top.child = None if top.position is None else top.position.item_position(top.count)
            top.pending = False
            if top.differs:
                top.start = at
        elif (
            top is not None
            and top.value_start < 0
            and not self._name_next
            and top.names.depends_on_value_of(top.name)
        ):
            top.value_start = at
        if byte == _QUOTE:
            self.quoted = True
            self._is_name = self._name_next
            if self._is_name and top is not None:
                top.start = at
                top.pending = False
        elif byte in _OPENING:
            position = self._positions[self._open[-1].child if self._open else 0]
            self._used = None
            self._open.append(
                _Container(position, self._positions.names(position), is_object=byte == _OPENING[0])
            )
            self._name_next = byte == _OPENING[0]
        return True

    def _end_string(self, end: int) -> bool:
        self.quoted = False
        top = self._open[-1] if self._open else None
        if top is None or not self._is_name:
            return self._end_item(top, end)
        name = self._text[top.start : end]
        top.start = -1
        self._name_next = self._is_name = False
        repeated = name in top.names.used
        top.name, top.names, self._used = name, top.names.with_name(name), None
        if top.position is not None:
            top.child = top.position.member(parse_json_or_keep(name))
        return not repeated

    def _end_item(self, top: _Container | None, end: int) -> bool:
        """Ends the current item or member value, if one has begun. Returns False if it is an item
        that repeats an earlier one.
        """
        if top is None:
            return True
        if top.value_start >= 0:
            top.record_value(self._text[top.value_start : end])
        if top.start < 0 or top.is_object:
            return True
        text = self._text[top.start : end]
        top.start = -1
        value = to_hashable(parse_json_or_keep(text))
        repeated = value in top.values
        top.values |= {value}
        top.used |= {text}
        return not repeated

    def _close_container(self, top: _Container | None, at: int) -> bool:
        allowed = self._end_item(top, at)
        if top is not None:
            del self._open[-1]
            self._used = None
            allowed = allowed and top.names.may_end
        above = self._open[-1] if self._open else None
        return self._end_item(above, at + 1) and allowed

    # ------------------------------------------------------------------------------ what may follow

    @property
    def missing(self) -> list[bytes]:
        """JSON texts of the names that the innermost object still needs before it can end. Empty
        unless a name may come next.
        """
        top = self._open[-1] if self._open and self._name_next and not self.quoted else None
        return (
            []
            if top is None
            else [json.dumps(name, ensure_ascii=False).encode() for name in top.names.missing]
        )

    @property
    def has_rules(self) -> bool:
        return any(each.position is not None for each in self._open)

    @property
    def name_so_far(self) -> bytes:
        """Beginning of the name that is being written, or nothing."""
        return (
            self._text[self._open[-1].start :]
            if self.quoted and self._is_name and self._open
            else b""
        )

    @property
    def used_names(self) -> list[frozenset[bytes]]:
        """Names used so far in each open object, as JSON texts."""
        if self._used is None:
            self._used = [each.names.used for each in self._open if each.names.used]
        return self._used

    def forbidden_continuations(self) -> list[bytes]:
        """Returns texts that must not come next. After such a text, only names or items that are
        already used would be possible.
        """
        if self.escaped or (self.quoted and not self._text):  # no name or item can end here
            return []
        found: set[bytes] = set()
        for top, prefix in self._unfinished_containers():
            if top.is_object:
                found |= {
                    each[len(prefix) :]
                    for each in top.names.exhausted
                    if each.startswith(prefix) and each != prefix
                }
                continue
            node = top.next_item_language()
            texts = None if node is None else self._positions.texts(node)
            found |= {
                self._find_exhausting_continuation(texts, top, prefix, used)
                for used in top.used
                if used.startswith(prefix)
            }
        return sorted(found - {b""})

    def _find_exhausting_continuation(
        self, texts: CountedTexts | None, top: _Container, prefix: bytes, used: bytes
    ) -> bytes:
        """Returns the shortest continuation of `prefix` that leaves no unused text possible. The
        continuation is a piece of the text `used`. Empty if unused texts remain possible after
        every such piece.
        """
        if texts is None or self._positions.has_endless_texts(texts, used):
            return used[len(prefix) :] if used[:1] == b'"' else b""
        ends = range(len(prefix) + 1, len(used) + 1)
        return next(
            (
                used[len(prefix) : end]
                for end in ends
                if not _has_unused_text(texts, used[:end], top)
            ),
            b"",
        )

    def _unfinished_containers(self) -> Iterator[tuple[_Container, bytes]]:
        """Yields each container in which a name or item is being written or must follow, together
        with that name or item so far.
        """
        for each in self._open:
            if each.start >= 0:
                yield each, self._text[each.start :]
        if self._open and self._open[-1].start < 0 and self._open[-1].pending:
            yield self._open[-1], b""

    def _may_end_unused(self, top: _Container, prefix: bytes) -> bool:
        if top.is_object:
            return top.names.has_unused_name(prefix)
        node = top.next_item_language()
        texts = None if node is None or not top.used else self._positions.texts(node)
        return texts is None or _has_unused_text(texts, prefix, top)


def _has_unused_text(texts: CountedTexts, prefix: bytes, top: _Container) -> bool:
    """Returns True if a text that has not been used begins with `prefix`. Also returns True if no
    counted text begins with it.
    """
    beginning = prefix.decode("utf-8", "ignore")
    return texts.count_with_prefix(beginning) == 0 or has_unused_text(
        texts, beginning, [used.decode() for used in top.used]
    )


def to_hashable(value: Value) -> Value:
    """Returns a hashable form of a JSON value. The forms of two values are equal if and only if the
    values are equal.
    """
    match value:
        case bool():
            return "boolean", value
        case list():
            return "array", tuple(map(to_hashable, value))
        case dict():
            return "object", frozenset((name, to_hashable(each)) for name, each in value.items())
    return value
