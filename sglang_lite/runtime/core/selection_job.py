"""A selection of a branch under way: the scores of its choices, and which of them is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from sglang_lite.program.choosing import METHODS, decide
from sglang_lite.program.nodes import Select
from sglang_lite.protocol import Selection, SglError, Span
from sglang_lite.runtime.core.branch_text import OpenGrammar
from sglang_lite.runtime.core.choice_scoring import ChoiceScoring
from sglang_lite.runtime.core.engine_parts import EngineParts
from sglang_lite.runtime.schedule_hints import ScheduleHints
from sglang_lite.runtime.tokens.token_log import TokenLog

Done: TypeAlias = Callable[["SelectionJob", "Selection | SglError", "str | None"], None]


class SelectionJob:
    """
    Args:
        parts: of the engine.
        node: what is selected.
        namespace: of the prefix tree.
        prospect: of the branch.
        done: called with this job, the scores or why there are none, and the choice; None where the caller chooses.
    """

    def __init__(self, parts: EngineParts, node: Select, namespace: str, prospect: ScheduleHints, done: Done) -> None:
        self._node, self._namespace, self._prospect, self._done = node, namespace, prospect, done
        self._scoring = ChoiceScoring(parts, self._scored)
        self._aborted = False

    def start(self, log: TokenLog, new: Sequence[Span], within: OpenGrammar | None) -> Callable[[], None]:
        """Submits the requests. May take long: not on the loop's thread. Returns what is then left to do there.

        Args:
            log, new: the text before; meanwhile the log is this job's own.
            within: the grammar that the text is in.
        """
        node = self._node
        unconditional = node.unconditional
        if node.method is not None:
            unconditional = METHODS[node.method].requires_unconditional_logprobs
        try:
            log.append(new)
            log.ids()
            self._scoring.start(
                log,
                node.choices if within is None else within.possible(node.choices),
                unconditional=unconditional,
                namespace=self._namespace,
                special=node.special,
                prospect=self._prospect,
            )
        except SglError as error:
            return partial(self._scored, error)
        return _nothing

    def abort(self) -> None:
        """Ends the requests; nothing more is told of them. On the loop's thread."""
        self._aborted = True
        self._scoring.abort()

    def _scored(self, outcome: Selection | SglError) -> None:
        if self._aborted:
            return
        node, choice = self._node, None
        if isinstance(outcome, Selection) and node.method is not None:
            try:
                choice = decide(outcome, node.choices, METHODS[node.method], node.temperature, node.seed).decision
            except SglError as error:
                outcome = error
        self._done(self, outcome, choice)


def _nothing() -> None:
    """Does nothing, where nothing is left to do."""
