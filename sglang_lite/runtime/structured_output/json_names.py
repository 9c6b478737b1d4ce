"""The names that have come in an object, and what that leaves: names that may still come, and whether it may end.

Where several kinds of objects are possible in a place, those go that have no member of a name which came, or another
value for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.constraints.formal.counting import CountedTexts
from sglang_lite.constraints.formal.nodes import Node
from sglang_lite.constraints.json_schema.watched import DistinctNames


class Kind:
    """A kind of objects with its names counted.

    Args:
        names: of it.
        counted: counts the texts of a language; None of one without any.
    """

    def __init__(self, names: DistinctNames, counted: Callable[[Node], CountedTexts | None]) -> None:
        self.required, self.least, self.most = names.required, names.least, names.most
        self._names = counted(names.names)
        self._values = {name: (each, counted(each.scalars)) for name, each in names.values.items()}

    def counts_along(self, text: str) -> Sequence[int | None]:
        """Number of names behind each beginning of a text, the empty one first; None: without end."""
        return [0] * (len(text) + 1) if self._names is None else self._names.counts_along(text)

    def has_name(self, text: str) -> bool:
        """Tells whether a member may have a name, so written."""
        return self.counts_along(text)[-1] != 0

    def tells_by(self, name: str) -> bool:
        """Tells whether the values of a name's member are known."""
        return name in self._values

    def has_value(self, name: str, text: bytes) -> bool:
        """Tells whether a member may have a value, so written."""
        if name not in self._values:
            return True
        values, scalars = self._values[name]
        if text[:1] in (b"[", b"{"):
            return values.arrays if text[:1] == b"[" else values.objects
        return scalars is not None and scalars.has(text.decode("utf-8", "ignore"))


@dataclass(frozen=True, slots=True)
class Alive:
    """A kind of objects that is still possible, and which names have to come."""

    kind: Kind
    missing: frozenset[str]


@dataclass(frozen=True, slots=True)
class Names:
    """The names that have come in an object.

    Attributes:
        alive: kinds of objects that are possible; none where nothing but the names is known.
        used: the names, as they were written.
        counts: how many of them have each beginning.
        dead: beginnings of names with which only such would come that came before, of each the shortest.
    """

    alive: tuple[Alive, ...] = ()
    used: frozenset[bytes] = frozenset()
    counts: Mapping[str, int] = field(default_factory=dict)
    dead: frozenset[bytes] = frozenset()
    _later: dict[tuple[bytes, ...], Names] = field(default_factory=dict)  # as many tokens end one name

    def after(self, name: bytes) -> Names:
        """The names with another one."""
        key = (name,)
        if key not in self._later:
            self._later[key] = _after(self, name)
        return self._later[key]

    def valued(self, name: bytes, value: bytes) -> Names:
        """The names, where the value of the last one's member is known."""
        key = name, value
        if key not in self._later:
            known = loaded(name)
            self._later[key] = _where(self, (each for each in self.alive if each.kind.has_value(known, value)))
        return self._later[key]

    def tell_by(self, name: bytes) -> bool:
        """Tells whether kinds of objects that are possible differ in the value of a name's member."""
        return len(self.alive) > 1 and any(each.kind.tells_by(loaded(name)) for each in self.alive)

    @property
    def may_end(self) -> bool:
        """True where all names came that have to, of some kind of objects."""
        ends = (not each.missing and len(self.used) >= each.kind.least for each in self.alive)
        return not self.alive or any(ends)

    def any_left(self, begun: bytes) -> bool:
        """Tells whether a name that did not come may begin so."""
        return not any(begun.startswith(dead) for dead in self.dead)


def _after(names: Names, name: bytes) -> Names:
    text, known = name.decode("utf-8", "ignore"), loaded(name)
    counts = dict(names.counts)
    for end in range(len(text) + 1):
        counts[text[:end]] = counts.get(text[:end], 0) + 1
    alive = tuple(Alive(each.kind, each.missing - {known}) for each in names.alive)
    used = names.used | {name}
    now = Names(alive, used, counts, _with_dead(names.dead, name, counts, alive))
    if len(alive) < 2:
        return now
    return _where(now, (each for each in alive if each.kind.has_name(text) and _fits(each, len(used))))


def _fits(each: Alive, used: int) -> bool:
    return each.kind.most is None or used + len(each.missing) <= each.kind.most


def _where(names: Names, alive: Iterable[Alive]) -> Names:
    """The names where only some kinds of objects are possible."""
    kept = tuple(alive)
    if len(kept) == len(names.alive):
        return names
    dead: frozenset[bytes] = frozenset()
    for name in names.used:
        dead = _with_dead(dead, name, names.counts, kept)
    return Names(kept, names.used, names.counts, dead)


def _with_dead(
    dead: frozenset[bytes], name: bytes, counts: Mapping[str, int], alive: Sequence[Alive]
) -> frozenset[bytes]:
    """Dead beginnings, with the shortest one of a name that came."""
    text = name.decode("utf-8", "ignore")
    counted = [each.kind.counts_along(text) for each in alive]
    for end in range(len(text) + 1):
        if counted and all((behind := each[end]) is not None and behind <= counts[text[:end]] for each in counted):
            name = text[:end].encode()
            break
    return frozenset(each for each in dead if not each.startswith(name)) | {name}


def loaded(text: bytes) -> Any:  # JSON
    """The value of a JSON text; where it is none, the text."""
    try:
        return json.loads(text)
    except ValueError:  # of a text that another grammar has let through
        return text
