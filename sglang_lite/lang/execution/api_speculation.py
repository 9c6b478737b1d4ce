"""Speculation of a program on the calls of an API: whether it pays, by what it has brought so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

_LEAST_SEEN, _LEAST_RATE = 32, 0.5  # speculation ends where fewer were found, of so many or more


@dataclass(slots=True, eq=False)
class ApiSpeculation:
    """Speculation of a program on the calls of an API, and what it has brought in all runs of that program so far.

    Args:
        tokens: the most that a call generates ahead; None: no call does.

    Attributes:
        found: generations whose text an earlier call had brought.
        missed: those that it could have brought, and which needed a call.
        saved_tokens: of prompts that were not sent again.
        thrown_tokens: that were generated and not used.
    """

    tokens: int | None
    found: int = field(default=0, init=False)
    missed: int = field(default=0, init=False)
    saved_tokens: int = field(default=0, init=False)
    thrown_tokens: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def on(self) -> bool:
        """True if the next run will speculate: not after 32 generations of which less than half were found."""
        seen = self.found + self.missed
        return self.tokens is not None and (seen < _LEAST_SEEN or self.found >= seen * _LEAST_RATE)

    def note(self, found: int, missed: int, saved: int, thrown: int) -> None:
        """Counts what a call has brought."""
        with self._lock:
            self.found += found
            self.missed += missed
            self.saved_tokens += saved
            self.thrown_tokens += thrown
