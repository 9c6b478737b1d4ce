"""What a way made of a case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """Answer to a case.

    Attributes:
        value: the answer as JSON data; None if there is none.
        text: what the model wrote last.
        error: why there is no value; empty if there is one.
        calls: names and JSON arguments of the calls that were read from the text.
        invalid: number of calls of a tool that isn't there, or with arguments that it doesn't take.
        prompt_tokens, completion_tokens: of all attempts and steps.
        setup_seconds: time before the first request, such as that of imports, which is no time of the way.
    """

    value: Any = None
    text: str = ""
    error: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    invalid: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    setup_seconds: float = 0.0
