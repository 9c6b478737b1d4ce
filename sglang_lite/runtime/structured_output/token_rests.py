"""Rests of a vocabulary's tokens: the bytes that remain of a token once a text has consumed its
first bytes.

A text is read byte by byte. Between two bytes, some token is partly written, and only its rest
matters: the bytes still to come. Several tokens may still be possible, so a place in the text is
described by all the rests that are possible there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol, TypeAlias

from sglang_lite.constraints.formal.automaton import Automaton
from sglang_lite.constraints.formal.charsets import Ranges, union
from sglang_lite.constraints.formal.terms import DEAD
from sglang_lite.constraints.formal.terms import State as Term
from sglang_lite.runtime.structured_output.utf8 import byte_ranges, character_set_pattern

_FEW = 4096  # most rests for which a run is computed eagerly
_CHECKED = 24  # most rests of a place for which its `worth` is computed
_MAX_BYTES = 64 << 20  # approximate memory kept between two searches

# the place after some bytes, or None if no rest continues there; and whether a token may end there
Step: TypeAlias = "tuple[Rests | None, bool]"
Ways: TypeAlias = "list[tuple[Term, Ranges]]"
Costs: TypeAlias = "dict[Rests, int]"  # fewest tokens that have ended before each place


class Rests(Protocol):
    """Place in a text between two bytes, described by the rests of tokens that are possible there.

    Attributes:
        worth: largest number of tokens that one of the rests takes if it is spelled separately; 0
            if unknown.
        price: number of tokens to count when a rest ends.
    """

    @property
    def worth(self) -> int: ...

    @property
    def price(self) -> int: ...

    def step_byte(self, low: int, high: int) -> Step:
        """Returns the place after any byte from `low` to `high`, and whether a token may end there."""
        ...

    def leave(self, low: int, high: int) -> Step:
        """Returns the same as `step_byte`, but only for rests that leave a preceding run of
        characters. A rest that could continue the run with a whole character is ignored.
        """
        ...

    def run(self, ranges: Ranges) -> Step:
        """Returns the place after any number of characters of a set, and whether a token may end
        there.
        """
        ...


class ListedRests:
    """Place with a sorted list of its rests, none of which is empty.

    Args:
        tokens: tokens of all places.
        rests: the rests.
    """

    __slots__ = ("_known", "_tokens", "price", "rests", "worth")

    def __init__(self, tokens: TokenRests, rests: tuple[bytes, ...]) -> None:
        self._tokens = tokens
        self.rests = rests
        self._known: dict[object, Step] = {}
        self.price = 1
        self.worth = max(map(tokens.fewest_tokens_to_spell, rests)) if len(rests) <= _CHECKED else 0

    def step_byte(self, low: int, high: int) -> Step:
        key = low, high
        found = self._known.get(key)
        if found is None:
            rests = self.rests
            start = bisect_left(rests, bytes((low,)))
            end = len(rests) if high == 255 else bisect_left(rests, bytes((high + 1,)))
            after = [rest[1:] for rest in rests[start:end]]
            found = self._known[key] = self._tokens.intern_place(after, ordered=low == high)
        return found

    leave = step_byte

    def run(self, ranges: Ranges) -> Step:
        found = self._known.get(ranges)
        if found is None:
            found = self._known[ranges] = self._compute_run(ranges)
        return found

    def _compute_run(self, ranges: Ranges) -> Step:
        pattern = character_set_pattern(ranges)
        if len(self.rests) > _FEW:
            long = LongRun(self._tokens, self.rests, ranges)
            return long, long.ends
        after = []
        for rest in self.rests:
            match = pattern.match(rest)
            end = match.end() if match else 0
            after += [
                rest[at:]
                for at in range(end + 1)
                if at == len(rest) or rest[at] & 0xC0 != 0x80 or not at
            ]
        return self._tokens.intern_place(after)


class LongRun:
    """Place after any number of characters of a set, starting from a place with very many rests.

    Args:
        tokens: tokens of all places.
        rests: rests before the run.
        ranges: the characters.

    Attributes:
        ends: whether a token may end in the run.
    """

    __slots__ = (
        "_ends",
        "_exits",
        "_known",
        "_ranges",
        "_rests",
        "_tokens",
        "ends",
        "price",
        "worth",
    )

    def __init__(self, tokens: TokenRests, rests: Sequence[bytes], ranges: Ranges) -> None:
        self._tokens = tokens
        self._rests = rests
        self._ranges = ranges
        self._known: dict[object, Step] = {}
        self.price = 1
        self.worth = 0
        match = character_set_pattern(ranges).match
        self._ends = [found.end() if (found := match(rest)) else 0 for rest in rests]
        self.ends = any(end == len(rest) for end, rest in zip(self._ends, rests))
        self._exits: dict[int, set[bytes]] = {}
        for rest, end in zip(rests, self._ends):
            if end < len(rest):
                self._exits.setdefault(rest[end], set()).add(rest[end + 1 :])

    def step_byte(self, low: int, high: int) -> Step:
        key = low, high
        found = self._known.get(key)
        if found is None:
            after = {rest for byte in range(low, high + 1) for rest in self._exits.get(byte, ())}
            if any(
                first <= high and low <= last for (first, last), *_ in byte_ranges(self._ranges)
            ):
                for rest, end in zip(self._rests, self._ends):
                    after.update([rest[at + 1 :] for at in range(end) if low <= rest[at] <= high])
            found = self._known[key] = self._tokens.intern_place(after)
        return found

    def leave(self, low: int, high: int) -> Step:
        key = low, high, "leave"
        found = self._known.get(key)
        if found is None:
            after = {rest for byte in range(low, high + 1) for rest in self._exits.get(byte, ())}
            found = self._known[key] = self._tokens.intern_place(after)
        return found

    def run(self, ranges: Ranges) -> Step:
        if ranges == self._ranges:
            return self, self.ends
        found = self._known.get(ranges)
        if found is None:
            after = {
                rest[at:]
                for rest, end in zip(self._rests, self._ends)
                for at in range(end + 1)
                if at == len(rest) or rest[at] & 0xC0 != 0x80
            }
            place, ends = self._tokens.intern_place(after)
            more, ends_later = (None, False) if place is None else place.run(ranges)
            found = self._known[ranges] = more, ends or ends_later
        return found


@dataclass(frozen=True)
class Written:
    """Place in text that already exists, whose bytes are read without counting tokens.

    Attributes:
        tokens: tokens of all places.
        text: the text.
        places: byte indexes that may have been reached.
    """

    tokens: TokenRests = field(repr=False)
    text: bytes
    places: tuple[int, ...] = (0,)
    price: ClassVar[int] = 0
    worth: ClassVar[int] = 0

    def step_byte(self, low: int, high: int) -> Step:
        return self._place_at_offsets(
            [at + 1 for at in self.places if low <= self.text[at] <= high]
        )

    leave = step_byte

    def run(self, ranges: Ranges) -> Step:
        found = set[int]()
        pattern = character_set_pattern(ranges)
        for start in self.places:
            if start not in found:
                match = pattern.match(self.text, start)
                end = match.end() if match else start
                found.update(
                    at
                    for at in range(start, end + 1)
                    if not self._is_continuation_byte(at) or at == start
                )
        return self._place_at_offsets(sorted(found))

    def _is_continuation_byte(self, at: int) -> bool:
        return at < len(self.text) and self.text[at] & 0xC0 == 0x80

    def _place_at_offsets(self, places: list[int]) -> Step:
        open_places = tuple(at for at in places if at < len(self.text))
        place = Written(self.tokens, self.text, open_places) if open_places else None
        return place, len(open_places) < len(places)


class TokenRests:
    """Creates and caches the places that texts reach within the tokens of a vocabulary.

    Args:
        token_bytes: bytes of each token.
        special: tokens that have no text.
    """

    def __init__(self, token_bytes: Sequence[bytes], special: Container[int]) -> None:
        self._texts = {text for i, text in enumerate(token_bytes) if text and i not in special}
        self.longest = max(map(len, self._texts), default=1)
        self._places: dict[tuple[bytes, ...], ListedRests] = {}
        self._counts: dict[bytes, int] = {}
        self._ends: dict[str, int] = {}
        self._ways: dict[tuple[int, Term], Ways] = {}
        self._bytes = 0

    @cached_property
    def start(self) -> ListedRests:
        """Place between two tokens, where any token may begin."""
        return ListedRests(self, tuple(sorted(self._texts)))

    def drop_if_large(self) -> None:
        """Drops the cached results of searches if they take too much memory. Must not be called
        during a search.
        """
        if self._bytes > _MAX_BYTES:
            self._places = {}
            self._counts = {}
            self._bytes = 0
            self.__dict__.pop("start", None)

    def intern_place(self, rests: Sequence[bytes] | set[bytes], *, ordered: bool = False) -> Step:
        """Returns the place with the given rests, or None if none of them has bytes left. Also
        returns whether one of the rests is empty.
        """
        different = tuple(rests) if ordered else tuple(sorted(set(rests)))
        ends = bool(different) and not different[0]
        if ends:
            different = different[1:]
        if not different:
            return None, ends
        found = self._places.get(different)
        if found is None:
            found = self._places[different] = ListedRests(self, different)
            self._bytes += 200 + 50 * len(different)
        return found, ends

    def transitions_from(self, states: Automaton, state: Term) -> Ways:
        """Returns the states that an automaton reaches from a state with one character. Each state
        comes with the characters that lead to it.
        """
        found: dict[Term, list[tuple[int, int]]] = {}
        for symbol in states.classes:
            after = states.step(state, symbol)
            if after != DEAD:
                found.setdefault(after, []).extend(states.class_characters(symbol).ranges)
        return [(after, union(ranges)) for after, ranges in found.items()]

    def fewest_ends_inside(self, text: str) -> int:
        """Returns the smallest number of tokens that can end inside a text: after its first byte
        and before its last one. Tokens may begin before the text and end after it.
        """
        found = self._ends.get(text)
        if found is None:
            found = self._ends[text] = self._compute_fewest_ends(text.encode())
        return found

    def _compute_fewest_ends(self, text: bytes) -> int:
        if len(text) <= self.longest and text in self._joined:
            return 0
        size = len(text)
        longest = self.longest
        rests = self.start.rests
        best = [0] * size  # for each place at which a token begins
        for at in range(size - 1, 0, -1):
            piece = text[at:]
            i = bisect_left(rests, piece)
            if i < len(rests) and rests[i].startswith(piece):
                continue
            ends = range(at + 1, min(at + longest + 1, size))
            best[at] = 1 + min(
                (best[end] for end in ends if text[at:end] in self._texts), default=1 << 29
            )
        found = 1 << 30
        for at in range(1, min(size, longest + 1)):
            if best[at] + 1 < found and self._ends_token(text[:at]):
                found = best[at] + 1
        return found

    def _ends_token(self, text: bytes) -> bool:
        backwards = text[::-1]
        i = bisect_left(self._sorted_reversed_texts, backwards)
        return i < len(self._sorted_reversed_texts) and self._sorted_reversed_texts[i].startswith(
            backwards
        )

    @cached_property
    def _sorted_reversed_texts(self) -> list[bytes]:
        return sorted([text[::-1] for text in self._texts])

    @cached_property
    def _joined(self) -> bytes:
        return b"\xff\xff\xff".join(self._texts)  # a separator that occurs in no text

    def fewest_tokens_to_spell(self, text: bytes) -> int:
        """Returns the fewest tokens that spell a text; a very large number if none do."""
        found = self._counts.get(text)
        if found is None:
            best = [0] + [1 << 30] * len(text)
            for end in range(1, len(text) + 1):
                before = [
                    best[i]
                    for i in range(max(0, end - self.longest), end)
                    if text[i:end] in self._texts
                ]
                best[end] = min(before, default=1 << 30) + 1
            found = self._counts[text] = best[-1]
        return found
