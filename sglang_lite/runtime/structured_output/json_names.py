"""Tracks the names used so far in a JSON object, to find which names may still come and whether the
object may end.

If a place allows several kinds of objects, a kind is excluded once the object has a name that the
kind has no member for, or a value that the kind does not allow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.constraints.formal.counting import CountedTexts
from sglang_lite.constraints.formal.nodes import Node
from sglang_lite.constraints.json_schema.mask_rules import DistinctNames


class Kind:
    """Kind of object that a schema allows in some place. Counts its possible names, to know when
    none is left.

    Args:
        names: rules of the kind's names.
        counted: function that counts the texts of a language; returns None for an empty language.
    """

    def __init__(
        self, names: DistinctNames, counted: Callable[[Node], CountedTexts | None]
    ) -> None:
        self.required = names.required
        self.min_names = names.least
        self.max_names = names.most
        self._names = counted(names.names)
        self._values = {name: (each, counted(each.scalars)) for name, each in names.values.items()}

    def prefix_counts(self, text: str) -> Sequence[int | None]:
        """Returns how many names begin with each prefix of a text, from the empty prefix to the
        whole text. A count is None if there are infinitely many such names.
        """
        return [0] * (len(text) + 1) if self._names is None else self._names.prefix_counts(text)

    def allows_name(self, text: str) -> bool:
        """Returns True if a member may have this name, given as JSON text."""
        return self.prefix_counts(text)[-1] != 0

    def restricts_value_of(self, name: str) -> bool:
        """Returns True if the kind restricts the value of the member with this name."""
        return name in self._values

    def allows_value(self, name: str, text: bytes) -> bool:
        """Returns True if the member `name` may have this value, given as JSON text."""
        if name not in self._values:
            return True
        values, scalars = self._values[name]
        if text[:1] in (b"[", b"{"):
            return values.arrays if text[:1] == b"[" else values.objects
        return scalars is not None and scalars.has_text(text.decode("utf-8", "ignore"))


@dataclass(frozen=True, slots=True)
class PossibleKind:
    """Kind of object that is still possible.

    Attributes:
        kind: the kind.
        missing: required names that have not come yet.
    """

    kind: Kind
    missing: frozenset[str]


@dataclass(frozen=True, slots=True)
class MemberNames:
    """Names used so far in an object. Immutable, except for a cache.

    Attributes:
        possible: possible kinds of objects; empty if names only have to be unique.
        used: names so far, as JSON texts.
        counts: for each prefix of a used name, number of used names that begin with the prefix.
        exhausted: shortest prefixes with which no unused name begins.
    """

    possible: tuple[PossibleKind, ...] = ()
    used: frozenset[bytes] = frozenset()
    counts: Mapping[str, int] = field(default_factory=dict)
    exhausted: frozenset[bytes] = frozenset()
    # cache, as many tokens end the same name
    _next: dict[tuple[bytes, ...], MemberNames] = field(default_factory=dict)

    def with_name(self, name: bytes) -> MemberNames:
        """Returns the names with one more added."""
        key = (name,)
        if key not in self._next:
            self._next[key] = _add_name(self, name)
        return self._next[key]

    def with_value(self, name: bytes, value: bytes) -> MemberNames:
        """Returns the names after the member `name` has got this value. Kinds of objects that don't
        allow the value are excluded.
        """
        key = name, value
        if key not in self._next:
            parsed = parse_json_or_keep(name)
            self._next[key] = _narrow_to_kinds(
                self, (each for each in self.possible if each.kind.allows_value(parsed, value))
            )
        return self._next[key]

    def depends_on_value_of(self, name: bytes) -> bool:
        """Returns True if several kinds of objects are possible and one restricts the value of the
        member `name`.
        """
        return len(self.possible) > 1 and any(
            each.kind.restricts_value_of(parse_json_or_keep(name)) for each in self.possible
        )

    @property
    def may_end(self) -> bool:
        """True if the object may end: all required names of some possible kind have come."""
        ends = (
            not each.missing and len(self.used) >= each.kind.min_names for each in self.possible
        )
        return not self.possible or any(ends)

    @property
    def missing(self) -> list[str]:
        """Names that the first possible kind of object requires and that have not come."""
        return sorted(self.possible[0].missing) if self.possible else []

    def has_unused_name(self, prefix: bytes) -> bool:
        """Returns True if an unused name may begin with `prefix`."""
        return not self.possible or not any(
            prefix.startswith(exhausted) for exhausted in self.exhausted
        )


def _add_name(names: MemberNames, name: bytes) -> MemberNames:
    if not names.possible:  # infinitely many names
        used = names.used | {name}
        return MemberNames((), used, exhausted=used)
    text = name.decode("utf-8", "ignore")
    parsed = parse_json_or_keep(name)
    counts = dict(names.counts)
    for end in range(len(text) + 1):
        counts[text[:end]] = counts.get(text[:end], 0) + 1
    possible = tuple(PossibleKind(each.kind, each.missing - {parsed}) for each in names.possible)
    used = names.used | {name}
    now = MemberNames(
        possible, used, counts, _add_exhausted_prefix(names.exhausted, name, counts, possible)
    )
    if len(possible) < 2:
        return now
    return _narrow_to_kinds(
        now,
        (
            each
            for each in possible
            if each.kind.allows_name(text) and _fits_missing_names(each, len(used))
        ),
    )


def _fits_missing_names(each: PossibleKind, used: int) -> bool:
    return each.kind.max_names is None or used + len(each.missing) <= each.kind.max_names


def _narrow_to_kinds(names: MemberNames, possible: Iterable[PossibleKind]) -> MemberNames:
    """Returns the names after the possible kinds of objects have been reduced to `possible`."""
    remaining = tuple(possible)
    if len(remaining) == len(names.possible):
        return names
    exhausted: frozenset[bytes] = frozenset()
    for name in names.used:
        exhausted = _add_exhausted_prefix(exhausted, name, names.counts, remaining)
    return MemberNames(remaining, names.used, names.counts, exhausted)


def _add_exhausted_prefix(
    exhausted: frozenset[bytes],
    name: bytes,
    counts: Mapping[str, int],
    possible: Sequence[PossibleKind],
) -> frozenset[bytes]:
    """Returns the exhausted prefixes after `name` has been used. The new one is the name's shortest
    prefix with which no unused name begins. If there is none, it is the whole name.
    """
    text = name.decode("utf-8", "ignore")
    counted = [each.kind.prefix_counts(text) for each in possible]
    for end in range(len(text) + 1):
        if counted and all(
            (count := each[end]) is not None and count <= counts[text[:end]] for each in counted
        ):
            name = text[:end].encode()
            break
    return frozenset(each for each in exhausted if not each.startswith(name)) | {name}


def parse_json_or_keep(text: bytes) -> Any:  # JSON
    """Parses a JSON text. Returns the bytes themselves if they are not valid JSON."""
    try:
        return json.loads(text)
    except ValueError:  # another grammar has let the text through
        return text
