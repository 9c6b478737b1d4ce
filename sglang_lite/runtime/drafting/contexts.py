"""Drafters that guess the next token from texts of the same kind, such as answers to the same
prompt. They remember which token followed the same tokens in those texts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.guess import Chance, Guess, Guesser
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request

_LENGTHS = (16, 8, 5, 3, 2, 1)  # context lengths, in tokens before the next one
_MAX_WEIGHT = 4  # occurrences beyond which more don't matter
_WEIGHTS = _MAX_WEIGHT + 1


class ContextTable:
    """Table that predicts the next token of a text from the tokens before it (the context). It
    predicts the token that has recently followed the same context most often, in texts of the same
    kind.

    The older half of a table is dropped when the newer is full, which bounds its memory.

    Args:
        entries: maximum number of entries, some 130 bytes each.
        lengths: context lengths, in tokens.
    """

    def __init__(self, entries: int, lengths: Sequence[int] = ()) -> None:
        # maximum number of entries in each half
        self._entries = max(entries // 2, 1)
        self._lengths = lengths
        self._newer: dict[int, int] = {}  # token * _WEIGHTS + weight, by hash
        self._older: dict[int, int] = {}
        self._salt = random.getrandbits(62)  # prevents texts crafted to collide with another's hash

    def record_text(self, kind: int, text: Sequence[int], start: int) -> None:
        """Records the contexts of each token of a text, from index `start` on."""
        for at in range(start, len(text)):
            for length in self._lengths:
                if length <= at:
                    self.note(kind, text[at - length : at], text[at])

    def note(self, kind: int, context: Sequence[int], token: int) -> None:
        """Records that `token` has followed `context` in a text of this kind."""
        key = hash((self._salt, kind, *context))
        packed = self._newer.get(key) or self._older.get(key, 0)
        known, weight = divmod(packed, _WEIGHTS)
        if weight and known == token:
            weight = min(weight + 1, _MAX_WEIGHT)
        elif weight > 1:
            token = known
            weight = weight - 1
        else:
            weight = 1
        if len(self._newer) >= self._entries and key not in self._newer:
            self._older = self._newer
            self._newer = {}
        self._newer[key] = token * _WEIGHTS + weight

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def likely_next_token(self, kind: int, context: Sequence[int]) -> tuple[int, int]:
        """Returns the token most likely to follow `context`, and a weight. The weight is 0 if no
        token is known.
        """
        key = hash((self._salt, kind, *context))
        return divmod(self._newer.get(key) or self._older.get(key, 0), _WEIGHTS)


class ContextDrafter:
    """Guesses tokens from texts of the same kind, including texts that are still being written.

    Args:
        name: its name.
        kind: function that returns the kind of a request's text; texts of different namespaces
            never share one.
        config: limits how many tokens it remembers and looks at.
    """

    def __init__(
        self, name: str, kind: Callable[[Request], Hashable], config: EngineConfig
    ) -> None:
        self.name = name
        self._kind = kind
        self._lengths = [length for length in _LENGTHS if length <= config.draft_context]
        self._table = ContextTable(config.draft_capacity * len(self._lengths), self._lengths)

    def can_draft(self, request: Request) -> bool:
        return True

    def make_guesser(self, request: Request, known: Ints, chance: Chance) -> Guesser:
        return partial(self._best_guess, self._hash_request_kind(request), chance)

    def _best_guess(
        self, kind: int, chance: Chance, text: Sequence[int], state: Hashable
    ) -> Guess | None:
        """Makes a guess for each context length, and returns the one with the best chance."""
        best = None
        likeliest = 0.0
        for i, length in enumerate(self._lengths):
            if length > len(text):
                continue
            token, weight = self._table.likely_next_token(kind, text[-length:])
            evidence = i * _WEIGHTS + weight
            if weight and chance(evidence) > likeliest:
                best = Guess(token, evidence)
                likeliest = chance(evidence)
        return best

    def learn_tokens(self, request: Request, text: Sequence[int], start: int) -> None:
        self._table.record_text(self._hash_request_kind(request), text, start)

    def _hash_request_kind(self, request: Request) -> int:
        kinds = request.output.draft.kinds
        if self.name not in kinds:
            kinds[self.name] = hash((request.space.namespace, self._kind(request)))
        return kinds[self.name]


def make_same_prompt_drafter(config: EngineConfig) -> ContextDrafter:
    """Creates the drafter "again", which remembers answers to the same prompt, such as those of
    retries and other samples.
    """
    return ContextDrafter(
        "again", lambda request: request.tokens[: request.prompt_len].tobytes(), config
    )


def make_node_drafter(config: EngineConfig) -> ContextDrafter:
    """Creates the drafter "node", which remembers answers to the same node of a program or under
    the same constraint. The answers may be from other branches.
    """
    return ContextDrafter("node", lambda request: request.output.origin, config)
