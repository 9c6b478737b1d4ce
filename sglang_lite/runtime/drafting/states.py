"""Drafter for texts that a grammar constrains. It guesses the token that was written before in the
same state of the grammar. The preceding text doesn't matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.contexts import ContextTable
from sglang_lite.runtime.drafting.guess import Chance, Guess, Guesser
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request


class StateDrafter:
    """Drafts names, enumerations and other choices in a template.

    Records the next token only for states in which a draft began, because the tokens after other
    states are mostly known.

    Args:
        config: limits how many tokens it remembers.
    """

    name = "state"

    def __init__(self, config: EngineConfig) -> None:
        self._table = ContextTable(config.draft_capacity)

    def can_draft(self, request: Request) -> bool:
        return request.output.matcher is not None

    def make_guesser(self, request: Request, known: Ints, chance: Chance) -> Guesser:
        return partial(self._guess_in_state, request.space.namespace)

    def _guess_in_state(self, namespace: str, text: Sequence[int], state: Hashable) -> Guess | None:
        token, weight = self._table.likely_next_token(hash((namespace, state)), ())
        return Guess(token, weight) if weight else None

    def learn_tokens(self, request: Request, text: Sequence[int], start: int) -> None:
        matcher = request.output.matcher
        kinds = request.output.draft.kinds
        if matcher is None:
            return
        if self.name in kinds:
            self._table.note(kinds[self.name], (), text[start])
        kinds[self.name] = hash((request.space.namespace, matcher.state_key))
