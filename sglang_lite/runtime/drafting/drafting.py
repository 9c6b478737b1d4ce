"""Drafts of rows: asks drafters in turn, and shortens what they propose to what may come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from sglang_lite.runtime.drafting.draft import Draft, constrained_draft, free_draft
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.request import Request

logger = logging.getLogger("sglang_lite")


class Drafter(Protocol):
    """Source of proposals. A proposal depends on nothing of another namespace than the request's.

    Attributes:
        name: its name in `EngineConfig.speculation`.
    """

    @property
    def name(self) -> str: ...

    def propose(self, request: Request, known: Ints, count: int) -> Sequence[int]:
        """Proposes up to `count` tokens that may come next; none if it has no idea.

        Args:
            request: request of the row.
            known: all its tokens, prompt included, int32.
            count: maximum number of tokens.
        """
        ...

    def learn(self, request: Request, known: Ints) -> None:
        """Takes note of a request that has finished, with all its tokens."""
        ...


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafted tokens that no grammar forces, and of those that were accepted."""

    drafted: int = 0
    accepted: int = 0


class Drafting:
    """Maker of drafts. Used on the loop's thread alone.

    Args:
        drafters: drafters, asked in this order; the first that proposes something is taken.
        most: maximum number of drafted tokens of a row that are drawn.
        vocab_size: number of token ids.
        eos_ids: tokens that may end a generation.
        jump: whether text that a grammar forces is appended as a whole.

    Attributes:
        most: the argument of this name.
        counts: counts by drafter.
    """

    def __init__(
        self, drafters: Sequence[Drafter], most: int, vocab_size: int, eos_ids: frozenset[int], *, jump: bool
    ) -> None:
        self._drafters, self.most, self._vocab_size, self._eos_ids = list(drafters), most, vocab_size, eos_ids
        self._jump = jump
        self.counts = {drafter.name: DraftCounts() for drafter in drafters}

    def draft(self, request: Request, known: Ints, room: int) -> Draft | None:
        """Draft of a row, or None.

        Args:
            request: request of the row.
            known: all its tokens, prompt included.
            room: maximum number of tokens.
        """
        if room <= 0 or request.processor is not None:
            return None
        matcher = request.output.matcher
        start = None if matcher is None else matcher.copy()
        if matcher is not None and start is None:
            return None
        name, proposed = self._propose(request, known, min(room, self.most))
        if not proposed:
            return None
        if start is None:
            return free_draft(name, proposed)
        jump = self._jump and not request.params.scores_tokens
        draft = constrained_draft(name, proposed, start, room, jump=jump)
        return draft if len(draft.tokens) else None

    def _propose(self, request: Request, known: Ints, count: int) -> tuple[str, list[int]]:
        """Name of the first drafter that proposes something, and the tokens before any that nothing may follow."""
        for drafter in self._drafters:
            try:
                proposed = list(drafter.propose(request, known, count))[:count]
            except Exception:  # must not end the request: it goes on without drafts
                logger.exception("the drafter %r failed, and is off from now on", drafter.name)
                self._drafters = [other for other in self._drafters if other is not drafter]
                continue
            if proposed := self._plain(request, proposed):
                return drafter.name, proposed
        return "", []

    def _plain(self, request: Request, proposed: list[int]) -> list[int]:
        for i, token in enumerate(proposed):
            if not 0 <= token < self._vocab_size or token in self._eos_ids or token in request.output.ends:
                return proposed[:i]
        return proposed

    def record(self, draft: Draft, matched: int) -> None:
        """Records how many of a draft's first tokens have come."""
        counts = self.counts[draft.drafter]
        counts.drafted += draft.guessed
        counts.accepted += draft.accepted(matched)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by drafter, as plain data."""
        return {name: asdict(counts) for name, counts in self.counts.items()}

    def learn(self, request: Request, known: Ints) -> None:
        """Takes note of a request that has finished, with all its tokens."""
        for drafter in self._drafters:
            drafter.learn(request, known)
