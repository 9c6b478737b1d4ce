"""Token counts of a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from sglang_lite.protocol import Usage


@dataclass
class TokenUsage:
    """Tokens that a backend has used since it was made or reset."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)  # answers come on several threads

    def add(self, usage: Usage) -> None:
        with self._lock:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens

    def reset(self) -> None:
        with self._lock:
            self.prompt_tokens = self.completion_tokens = 0
