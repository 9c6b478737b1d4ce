"""Event of an agent, which its caller can follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sglang_lite.protocol import ToolError, Usage

if TYPE_CHECKING:
    from sglang_lite.lang.tools import ToolCall


@dataclass(frozen=True, slots=True)
class ToolEvent:
    """Step of `use_tools`.

    Attributes:
        kind: "turn" after the model has written a turn; "call" before a call is made; "result"
            after the call; "answer" at the end.
        name: variable of the turn that the event belongs to, or of the answer.
        call: the call, for a "call" or a "result".
        text: text of the turn, the result as the model reads it, or the answer; "" for a "call".
        error: why the call failed, if a "result" is a failure.
        usage: usage of a "turn".
    """

    kind: Literal["turn", "call", "result", "answer"]
    name: str
    call: ToolCall | None = None
    text: str = ""
    error: ToolError | None = None
    usage: Usage | None = None
