"""Drafters that remember what came behind the same tokens in texts of the same kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.guess import Chance, Guess, Guesser
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request

_LENGTHS = (16, 8, 5, 3, 2, 1)  # numbers of tokens before the next one that are looked at
_MAX_WEIGHT = 4  # how often a token has to follow before more don't matter
_WEIGHTS = _MAX_WEIGHT + 1


class ContextTable:
    """Next token by kind of text and tokens before it: the one that came most often of late. The older half of a table
    is dropped when the newer is full, which bounds its memory.

    Args:
        entries: maximum number of entries, some 130 bytes each.
        lengths: numbers of tokens of the contexts of a text.
    """

    def __init__(self, entries: int, lengths: Sequence[int] = ()) -> None:
        self._entries, self._lengths = max(entries // 2, 1), lengths  # of a half
        self._newer: dict[int, int] = {}  # token * _WEIGHTS + weight, by hash
        self._older: dict[int, int] = {}
        self._salt = random.getrandbits(62)  # so that nobody can write a text with the hash of another one's

    def learn(self, kind: int, text: Sequence[int], start: int) -> None:
        """Takes note of the tokens of a text from index `start` on."""
        for at in range(start, len(text)):
            for length in self._lengths:
                if length <= at:
                    self.note(kind, text[at - length : at], text[at])

    def note(self, kind: int, context: Sequence[int], token: int) -> None:
        """Takes note of a token behind some others."""
        key = hash((self._salt, kind, *context))
        packed = self._newer.get(key) or self._older.get(key, 0)
        known, weight = divmod(packed, _WEIGHTS)
        if weight and known == token:
            weight = min(weight + 1, _MAX_WEIGHT)
        elif weight > 1:
            token, weight = known, weight - 1
        else:
            weight = 1
        if len(self._newer) >= self._entries and key not in self._newer:
            self._older, self._newer = self._newer, {}
        self._newer[key] = token * _WEIGHTS + weight

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def following(self, kind: int, context: Sequence[int]) -> tuple[int, int]:
        """Token that follows some tokens, and its weight, which is 0 if none did."""
        key = hash((self._salt, kind, *context))
        return divmod(self._newer.get(key) or self._older.get(key, 0), _WEIGHTS)


class ContextDrafter:
    """Drafter from texts of the same kind, those that are being written included.

    Args:
        name: its name.
        kind: function that returns the kind of a request's text; texts of different namespaces are never of one kind.
        config: has how many tokens it remembers, and how many it looks at.
    """

    def __init__(self, name: str, kind: Callable[[Request], Hashable], config: EngineConfig) -> None:
        self.name, self._kind = name, kind
        self._lengths = [length for length in _LENGTHS if length <= config.draft_context]
        self._table = ContextTable(config.draft_capacity * len(self._lengths), self._lengths)

    def drafts(self, request: Request) -> bool:
        return True

    def guesser(self, request: Request, known: Ints, chance: Chance) -> Guesser:
        return partial(self._guess, self._kind_of(request), chance)

    def _guess(self, kind: int, chance: Chance, text: Sequence[int], state: Hashable) -> Guess | None:
        """Guess with the best chance of all contexts."""
        best, likeliest = None, 0.0
        for i, length in enumerate(self._lengths):
            if length > len(text):
                continue
            token, weight = self._table.following(kind, text[-length:])
            evidence = i * _WEIGHTS + weight
            if weight and chance(evidence) > likeliest:
                best, likeliest = Guess(token, evidence), chance(evidence)
        return best

    def learn(self, request: Request, text: Sequence[int], start: int) -> None:
        self._table.learn(self._kind_of(request), text, start)

    def _kind_of(self, request: Request) -> int:
        kinds = request.output.draft.kinds
        if self.name not in kinds:
            kinds[self.name] = hash((request.space.namespace, self._kind(request)))
        return kinds[self.name]


def again(config: EngineConfig) -> ContextDrafter:
    """Drafter from earlier answers to the same prompt: of the request run or drawn again, and of its other samples."""
    return ContextDrafter("again", lambda request: request.tokens[: request.prompt_len].tobytes(), config)


def node(config: EngineConfig) -> ContextDrafter:
    """Drafter from answers of the same node of programs, or under the same constraint, also of other branches."""
    return ContextDrafter("node", lambda request: request.output.origin, config)
