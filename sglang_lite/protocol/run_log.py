"""Records of a run's log: the answers of its nodes, the calls of its tools, and what was decided
about calls. A journal is a file of these records; a suspended state is saved with them.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias

from sglang_lite.protocol.record import Record, Variant
from sglang_lite.protocol.results import Generation, Selection


class LoggedAnswer(Variant, frozen=True):
    """Answer of a generation or selection.

    Attributes:
        run: path of the run among the programs that a program runs; "" for the outermost.
        node: path of the node in its program's tree.
        name: name of its variable, or None.
        asked: digest of its question.
        before: end of the text before it, for error messages.
        results: samples of the generation, or steps of the selection.
        code: code of the line in a journal.
    """

    run: str
    node: str
    name: str | None
    asked: str
    before: str
    results: tuple[Generation | Selection, ...]
    code: str = ""


class LoggedTools(Variant, frozen=True):
    """Tools of a loop: the name of each, and its description and schema as JSON."""

    run: str
    loop: str
    tools: tuple[tuple[str, str], ...]
    code: str = ""


class LoggedCall(Variant, frozen=True):
    """Call that is about to be made.

    Attributes:
        run: as for LoggedAnswer.
        call: path of the node that wrote the call, and its index in the turn.
        tool: name of the tool.
        arguments: its arguments, as JSON.
    """

    run: str
    call: str
    tool: str
    arguments: str
    code: str = ""


class LoggedResult(Variant, frozen=True):
    """Result of a call, or of a call that was not made.

    Attributes:
        text: what the model reads.
        error: why the call failed; None if it did not.
        raised: whether the error was raised in the program.
    """

    run: str
    call: str
    text: str
    error: str | None = None
    raised: bool = False
    code: str = ""


class LoggedTurn(Variant, frozen=True):
    """Turn that shows the model the results of calls.

    Attributes:
        turn: path of the node that wrote the calls.
        text: text of the turn; "" for the beginning of a loop.
        closing: why the model has to answer now; "" if it may go on.
    """

    run: str
    turn: str
    text: str
    closing: str
    code: str = ""


class CallDecision(Variant, frozen=True):
    """Decision about a call, for `state.resume`. Made by the methods of a PendingCall.

    Attributes:
        run, call: as for LoggedCall.
        verdict: "approve" to make the call, "deny" not to make it, "result" if the result is known,
            "enter" to make the call again because a program in it was suspended, or "withdraw" if
            the decision before could not be used.
        arguments: arguments instead of the model's, as JSON; "" for the model's.
        text: what the model reads instead of a result.
    """

    run: str
    call: str
    verdict: Literal["approve", "deny", "result", "enter", "withdraw"]
    arguments: str = ""
    text: str = ""
    code: str = ""


class PendingCall(Record, frozen=True):
    """Call that waits for a decision.

    Attributes:
        tool: name of the tool.
        written: its arguments, as JSON.
        in_doubt: whether the call had begun when the program was killed, so that its effect is
            unknown.
        call, run: place of the call in the program, the same each time the program runs.
    """

    tool: str
    written: str
    in_doubt: bool = False
    call: str = ""
    run: str = ""

    def __repr__(self) -> str:
        doubt = ", in doubt" if self.in_doubt else ""
        return f"PendingCall({self.tool}, {self.arguments}{doubt})"

    @property
    def arguments(self) -> dict[str, Any]:  # JSON
        """Arguments of the call, as JSON data."""
        found: dict[str, Any] = json.loads(self.written)
        return found

    @property
    def id(self) -> str:
        """Text that identifies the call in its run, the same in each process."""
        return f"{self.run}{self.call}"

    def approve(self, /, **arguments: Any) -> CallDecision:  # JSON
        """Decides to make the call. A call that is in doubt is made again.

        Args:
            **arguments: arguments that replace the model's arguments of the same names.
        """
        changed = json.dumps({**self.arguments, **arguments}) if arguments else ""
        return CallDecision(self.run, self.call, "approve", changed)

    def deny(self, reason: str = "it was not approved.") -> CallDecision:
        """Decides not to make the call, or not to make it again. The model reads the reason."""
        return CallDecision(self.run, self.call, "deny", text=reason)

    def give_result(self, text: str) -> CallDecision:
        """Supplies the result of the call. The call is then not made, or not made again. The model
        reads the text.
        """
        return CallDecision(self.run, self.call, "result", text=text)


LogRecord: TypeAlias = (
    LoggedAnswer | LoggedTools | LoggedCall | LoggedResult | LoggedTurn | CallDecision
)
