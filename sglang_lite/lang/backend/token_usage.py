"""Tokens that a backend has used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TokenUsage:
    """Tokens that a backend has used since it was made, or reset."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0
