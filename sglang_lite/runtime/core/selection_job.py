"""Running selection of a program: scores its choices and picks one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.program.choosing import METHODS, decide_choice
from sglang_lite.program.nodes import Select
from sglang_lite.protocol import Generation, Selection, SglError, Span
from sglang_lite.runtime.core.choice_scoring import ChoiceScoring
from sglang_lite.runtime.core.prepared_node import EngineAsk, PreparedNode, prepare_generation_after
from sglang_lite.runtime.core.submission import no_choices_error
from sglang_lite.runtime.core.token_text import OpenGrammar
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch
from sglang_lite.runtime.tokens.token_log import TokenLog

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_program import EngineProgram


class SelectionJob:
    """Scoring of a `Select` node. All methods but `_prepare` run on the loop's thread.

    Args:
        program: program of the node; receives all events.
        ask: the player's ask for the node. After the player has given up this ask, no events are
            sent for it.
        branch: the scheduler's state of its branch.
    """

    def __init__(self, program: EngineProgram, ask: EngineAsk, branch: ScheduledBranch) -> None:
        self._program = program
        self._ask = ask
        self._branch = branch
        self._scoring = ChoiceScoring(program.context, self._finish_selection)
        self._following: PreparedNode | None = None  # next generation, once prepared

    def prepare_next_generation(self) -> None:
        """Starts preparing the next generation."""
        if self._following is None:
            self._following = prepare_generation_after(self._ask, self._program.context)

    # `in_slot` is ignored, because choices have their own slots
    def start(self, *, in_slot: bool = False) -> None:
        """Starts to prepare and submit the scoring, off the loop's thread."""
        node = self._ask.node
        text = self._ask.branch.text
        assert isinstance(node, Select)
        assert text is not None
        if node.choices:
            self._program.run_off_loop(
                partial(self._prepare, node, text.log, text.pop_new_spans(), text.copy_grammar())
            )
        else:
            self._program.fail_node(self._ask, no_choices_error())

    def _prepare(
        self, node: Select, log: TokenLog, new: Sequence[Span], within: OpenGrammar | None
    ) -> Callable[[], object]:
        # This may change the log. The branch waits, and doesn't use the log meanwhile.
        unconditional = node.unconditional
        if node.method is not None:
            unconditional = METHODS[node.method].requires_unconditional_logprobs
        try:
            log.append(new)
            log.ids()
            self._scoring.start(
                log,
                node.choices if within is None else within.allowed_choices(node.choices),
                unconditional=unconditional,
                namespace=self._program.namespace,
                special=node.special,
                lora_path=node.lora_path,
                branch=self._branch,
            )
        except SglError as error:
            return partial(self._finish_selection, error)
        return _skip_continuation

    def unfinished_results(self) -> list[Generation]:
        """Returns one result, which has no text but reports the scoring's usage. Returns an empty
        list if the scoring has not started or has ended.
        """
        partial = self._scoring.partial_result()
        return [] if partial is None else [partial]

    def abort(self) -> None:
        """Aborts the scoring, because the node was given up."""
        self._scoring.abort()

    def _finish_selection(self, outcome: Selection | SglError) -> None:
        ask = self._ask
        node = self._ask.node
        if not ask.is_current:
            return
        assert isinstance(node, Select)
        spans: Sequence[Span] | None = None
        if isinstance(outcome, Selection) and node.method is not None:
            try:
                picked = decide_choice(
                    outcome, node.choices, METHODS[node.method], node.temperature, node.seed
                ).decision
                outcome = msgspec.structs.replace(outcome, picked=picked)
                spans = (Span(picked, special=node.special),)
            except SglError as error:
                outcome = error
        if isinstance(outcome, SglError):
            self._program.fail_node(ask, outcome)
        else:
            self._program.send_event(ask, outcome)
            self._program.finish_node(ask, spans)


def _skip_continuation() -> None:
    """Does nothing: once the requests are submitted, nothing is left to do on the loop's thread."""
