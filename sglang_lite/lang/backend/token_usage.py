"""Token counts of a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from sglang_lite.protocol import Generation, Played, ProgramEvent, ProgramSink, Selection, Usage


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

    def counted(self, sink: ProgramSink) -> ProgramSink:
        """Callback that adds the tokens of each result of a program before it passes it on."""

        def tell(event: ProgramEvent) -> None:
            if isinstance(event, Played) and isinstance(event.event, Generation | Selection):
                self.add(event.event.usage)
            sink(event)

        return tell

    def reset(self) -> None:
        with self._lock:
            self.prompt_tokens = self.completion_tokens = 0
