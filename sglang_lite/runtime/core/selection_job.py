"""A running selection of a branch: scores its choices and picks one of them."""

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
    """Scoring of a `Select` node for a branch.

    Args:
        parts: parts of the engine.
        node: selection to run.
        namespace: namespace in the prefix tree.
        hints: scheduling hints of the branch.
        done: callback for the end, called with this job, the scores or the error, and the chosen text; the text is None
            on an error, or if the caller makes the choice.
    """

    def __init__(self, parts: EngineParts, node: Select, namespace: str, hints: ScheduleHints, done: Done) -> None:
        self._node, self._namespace, self._hints, self._done = node, namespace, hints, done
        self._scoring = ChoiceScoring(parts, self._scored)
        self._aborted = False

    def start(self, log: TokenLog, new: Sequence[Span], within: OpenGrammar | None) -> Callable[[], None]:
        """Submits the requests. May take long, so not on the loop's thread. Returns a function to call on the loop's
        thread afterwards.

        Args:
            log: prompt of the branch; used by this job alone meanwhile.
            new: text to append to the prompt.
            within: grammar that the text is in, or None.
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
                hints=self._hints,
            )
        except SglError as error:
            return partial(self._scored, error)
        return _nothing

    def abort(self) -> None:
        """Aborts the requests; `done` will not be called. On the loop's thread."""
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
    """Does nothing: the continuation on the loop's thread if the requests were submitted."""
