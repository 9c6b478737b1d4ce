"""Reading of a run's log: its nodes with their questions and answers, from which the run can be repeated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from sglang_lite.lang.execution.branch import Branch
from sglang_lite.lang.execution.kept import Kept, Question
from sglang_lite.lang.execution.operations import ForkOp, GenOp, JoinOp, MarkOp, SelectOp
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.reading import when_finished
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.program.choosing import ChoicesDecision
from sglang_lite.program.nodes import GrammarBegin, GrammarEnd, ImagePart, Text
from sglang_lite.protocol import Constraint, Continuation, Image, ParameterError, ProgramError, Selection
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.saved import SavedAnswer, SavedChoice


def answers_of(player: Player) -> list[SavedAnswer]:
    """Nodes of the program's body in a branch and in the branches forked from it, with the answers that they have
    received."""
    return list(_Reader(Question(), None).read(player))


def run_again(branch: Branch, at: str, value: str | None) -> UserValue:
    """State of a rerun; arguments and errors as of `ProgramState.rerun`. Everything in the branch has been played."""
    run = branch.run
    if run.called is None:
        raise ProgramError(
            "this state has no program to run again.",
            hint="Load it with sgl.load(path, program); its run's arguments must be plain data.",
            where=user_location(),
        )  # fmt: skip
    if run.backend.blocking:
        raise run.backend.refusal("rerun", "running a state again", "Run the program instead.", user_location())
    if branch.path:
        raise ProgramError(
            "a branch of a fork can't run again by itself.", hint="Run the state of the whole program again.",
            where=user_location(),
        )  # fmt: skip
    kept = _kept(branch, at, value)
    state: Any = run.called.program.run_again(run.called, run, kept)  # a ProgramState, which imports this module
    if value is None:
        return state
    player = state.branch.player
    when_finished(player, partial(kept.taken.set, False))
    try:
        taken = kept.taken.wait()
    except KeyboardInterrupt:  # as in every read that waits
        state.cancel()
        raise
    except ParameterError:
        for each in player.tree():
            each.failure_reported = True
        raise
    if not taken and player.failure is None:
        raise ParameterError("at", f"the program did not ask for {at!r} again.", where=user_location())
    return state


def _kept(branch: Branch, at: str, value: str | None) -> Kept:
    """Answers that a rerun keeps; arguments and errors as of `run_again`."""
    answers = (*branch.run.remembered, *answers_of(branch.player))
    names = {each.node: each.name for each in answers}
    nodes = {name: each.node for name, each in branch.names.declared() if names.get(each.node) == name}
    if at not in nodes:
        known = ", ".join(map(repr, nodes)) or "none"
        raise ParameterError("at", f"no node of the program set {at!r:.60}. Nodes set: {known}.")
    if value is not None and not isinstance(value, str):
        raise ParameterError(
            "value", f"{value!r:.60} is not a string.", hint="Give the text that the model would have written."
        )
    earlier = () if branch.run.kept is None else branch.run.kept.answers.values()
    return Kept((*earlier, *answers), nodes[at], value)


class _Reader:
    """Reads answers from the log of a branch.

    Args:
        question: prompt before the branch's log begins.
        grammar: open grammar, and its text so far; None if no grammar is open.
    """

    def __init__(self, question: Question, grammar: tuple[Constraint, str] | None) -> None:
        self._question, self._grammar = question, grammar
        self._marks: dict[int, tuple[Question, tuple[Constraint, str] | None]] = {}

    def read(self, player: Player) -> Iterator[SavedAnswer]:
        for op in player.played[:]:
            match op:
                case Text():
                    self._add(op.text)
                case ImagePart():
                    self._add(op.text, [op.image])
                case GrammarBegin():
                    self._grammar = op.constraint, ""
                case GrammarEnd():
                    self._grammar = None
                case GenOp():
                    answer = self._generation(op)
                    if op.in_body:
                        yield answer
                case SelectOp():
                    answer = self._selection(op)
                    if op.in_body:
                        yield answer
                case ForkOp():
                    for child in op.children:
                        yield from _Reader(self._question.copy(), self._grammar).read(child)
                case JoinOp():
                    self._join(op)
                case MarkOp() if op.back:
                    question, self._grammar = self._marks[id(op.mark)]
                    self._question = question.copy()
                case MarkOp():
                    self._marks[id(op.mark)] = self._question.copy(), self._grammar

    def _add(self, text: str, images: Iterable[Image] = ()) -> None:
        self._question.add(text, images)
        if self._grammar is not None:
            self._grammar = self._grammar[0], self._grammar[1] + text

    def _join(self, op: JoinOp) -> None:
        for variable in op.added:
            if variable.done and variable.error() is None:
                for piece in variable.result():
                    self._add(*(("", [piece]) if isinstance(piece, Image) else (getattr(piece, "text", piece), [])))

    def _generation(self, op: GenOp) -> SavedAnswer:
        constraint = op.node.constraint
        if self._grammar is not None:
            constraint = Continuation(*self._grammar, constraint)
        asked, record = self._question.of_generation(op, constraint), op.variable.record
        samples = () if record is None else tuple(record) if isinstance(record, list) else (record,)
        own = op.expression.options is None or op.expression.options.backend is None
        if samples:
            spans = samples[0].spans if own else ()
            self._add("".join(span.text for span in spans) if spans else samples[0].text)
        return SavedAnswer(asked, op.node.name, samples if own else (), op.variable.node)

    def _selection(self, op: SelectOp) -> SavedAnswer:
        asked, record, multi = self._question.of_selection(op, self._grammar), op.variable.record, op.expression.multi
        steps = [] if record is None else record if isinstance(record, list) else [record]
        for _, decision in steps:
            if multi is None or decision.decision != multi.end:
                self._add(decision.decision)
        answers = tuple(choice_of(*step) for step in steps)
        return SavedAnswer(asked, op.node.name, answers, op.variable.node)


def choice_of(selection: Selection, decision: ChoicesDecision) -> SavedChoice:
    return SavedChoice(selection, decision.decision, decision.meta_info)
