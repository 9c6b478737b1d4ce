"""Speculative generation on calls of a remote API: whether it pays, judged by its results so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

# Speculation ends below this rate of hits, after at least this number of generations.
_LEAST_SEEN, _LEAST_RATE = 32, 0.5


@dataclass(slots=True, eq=False)
class ApiSpeculation:
    """Speculative generation of a program on calls of a remote API, and its results in all runs of that program so far.

    Args:
        tokens: maximum number of tokens that a call may generate ahead, or None to disable speculation.

    Attributes:
        found: number of generations whose text an earlier call had brought.
        missed: number of generations that an earlier call could have brought, but that needed a call.
        saved_tokens: number of prompt tokens that were not sent again.
        thrown_tokens: number of generated tokens that were not used.
    """

    tokens: int | None
    found: int = field(default=0, init=False)
    missed: int = field(default=0, init=False)
    saved_tokens: int = field(default=0, init=False)
    thrown_tokens: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def on(self) -> bool:
        """True if the next run will speculate: False after at least 32 generations of which less than half were
        found."""
        seen = self.found + self.missed
        return self.tokens is not None and (seen < _LEAST_SEEN or self.found >= seen * _LEAST_RATE)

    def note(self, found: int, missed: int, saved: int, thrown: int) -> None:
        """Adds the results of a call to the counts."""
        with self._lock:
            self.found += found
            self.missed += missed
            self.saved_tokens += saved
            self.thrown_tokens += thrown
