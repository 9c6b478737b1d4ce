"""Logs the answers of a run's nodes as they arrive. A resumed run reuses the logged answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from sglang_lite.lang.execution.kept import Kept, Question
from sglang_lite.lang.execution.program_log import log_recorded_calls
from sglang_lite.lang.execution.run_log import RunLog, difference_error
from sglang_lite.protocol import Generation, ResumeError, Selection, TraceNode
from sglang_lite.protocol.run_log import LoggedAnswer

if TYPE_CHECKING:
    from sglang_lite.lang.execution.base_player import BasePlayer
    from sglang_lite.lang.execution.operations import AnswerOp

_BEFORE: Final = 2000  # characters of the text before an answer that are kept for errors
_CONTEXT: Final = 40  # characters around a difference that an error shows


class LoggedAnswers(Kept):
    """Logged answers, which a resumed run uses instead of asking the backend.

    Args:
        log: the log.
        run: path of the run in the log.
    """

    def __init__(self, log: RunLog, run: str) -> None:
        super().__init__((), "", None)
        self._log = log
        self._run = run

    def find_answer(self, op: AnswerOp, asked: Callable[[], str], text: str) -> TraceNode | None:
        found = self._log.answers.get((self._run, op.variable.node))
        if found is None:
            return None
        if found.asked != asked():
            raise _answer_difference_error(found, op, text)
        return TraceNode("gen", node=found.node, asked=found.asked, results=found.results)


def digest_question(player: BasePlayer, op: AnswerOp) -> tuple[str, str] | None:
    """Returns the digest of a node's question and the end of the text before the node. Returns None
    if the node's answer need not be logged. The node's own text must not be in the transcript yet.
    """
    log = player.run.log
    if log is None or not op.in_body or (player.run.path, op.variable.node) in log.answers:
        return None
    text = player.transcript.collect_text()
    asked = Question.from_transcript(player.transcript, text).digest_for(op)
    return asked, text[-_BEFORE:]


def log_answer(
    player: BasePlayer,
    op: AnswerOp,
    question: tuple[str, str] | None,
    results: Sequence[Generation | Selection],
) -> None:
    """Logs the answer of a node, unless `digest_question` returned None for the node."""
    log = player.run.log
    if question is None or log is None:
        return
    record = LoggedAnswer(
        player.run.path, op.variable.node, op.node.name, *question, tuple(results)
    )
    log.add(record)
    # calls that a program made before the log began
    log_recorded_calls(log, player.run.path, op.variable.node, results)


def _answer_difference_error(found: LoggedAnswer, op: AnswerOp, text: str) -> ResumeError:
    logged, now = _around_difference(found.before, text[-_BEFORE:])
    return difference_error(
        f"{found.name or 'a node'!r} was asked behind {logged!r}",
        f"asks for {op.node.name or 'a node'!r} behind {now!r}",
        "" if logged != now else " Their parameters, tools or earlier text differ.",
    )


def _around_difference(before: str, now: str) -> tuple[str, str]:
    """Returns the parts of two texts around their first difference."""
    pairs = enumerate(zip(before, now))
    shorter = min(len(before), len(now))
    at = next((i for i, (one, other) in pairs if one != other), shorter)
    start = max(0, at - _CONTEXT)
    return before[start : at + _CONTEXT], now[start : at + _CONTEXT]
