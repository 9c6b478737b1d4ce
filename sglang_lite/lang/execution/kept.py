"""Answers of an earlier run that a rerun keeps. For one of the nodes, the caller may supply a new
answer.

A node is identified by its path in the program's tree. It keeps its answer if its question is the
same: the prompt, and either the parameters and the constraint, or the choices and the method of
choosing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.execution.operations import AnswerOp, GenOp, SelectOp
from sglang_lite.lang.expressions import MULTI_END, MULTI_SEPARATOR
from sglang_lite.protocol import (
    UNSET,
    Constraint,
    Continuation,
    Generation,
    Media,
    ParameterError,
    Selection,
    TraceNode,
    Usage,
)

if TYPE_CHECKING:
    from sglang_lite.lang.execution.transcript import Transcript


class Question:
    """Text before a node. The digest of the node's question is computed from it.

    Attributes:
        grammar: open grammar, and its text so far; None if no grammar is open.
        hashed: SHA-256 of the text so far.
    """

    def __init__(
        self,
        text: str = "",
        images: Iterable[Media] = (),
        grammar: tuple[Constraint, str] | None = None,
    ) -> None:
        self.grammar = grammar
        self.hashed = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
        self._images = [*images]

    @classmethod
    def from_transcript(cls, transcript: Transcript, text: str) -> Question:
        """Creates the question of the transcript, whose text is `text`."""
        walk = transcript.matcher
        return cls(
            text,
            transcript.images,
            None if walk is None else (walk.constraint, walk.text),
        )

    def copy(self) -> Question:
        other = Question(images=self._images, grammar=self.grammar)
        other.hashed = self.hashed.copy()
        return other

    def add_question_text(self, text: str, images: Iterable[Media] = ()) -> None:
        self.hashed.update(text.encode("utf-8", "surrogatepass"))
        self._images += images
        if self.grammar is not None:
            self.grammar = self.grammar[0], self.grammar[1] + text

    def digest_for(self, op: AnswerOp) -> str:
        """Returns the digest of a node's question, which consists of the text and the node's own
        settings, such as parameters and choices.
        """
        about: tuple[object, ...] = ()
        if isinstance(op, GenOp):
            tools = op.expression.tools
            constraint = op.node.constraint
            if self.grammar is not None:
                constraint = Continuation(*self.grammar, constraint)
            about = (
                op.node.params,
                constraint,
                *((tools.shown,) if tools is not None and op.shows_tools else ()),
            )
        elif isinstance(op, SelectOp):
            own = op.expression
            method = type(op.expression.choices_method).__qualname__
            about = own.choices, own.multi, method, op.node.temperature, self.grammar
            about += () if op.node.lora_path is UNSET else (op.node.lora_path,)
        found = self.hashed.copy()
        found.update(repr((self._images, about)).encode("utf-8", "surrogatepass"))
        return found.hexdigest()


class Kept:
    """Answers that a rerun keeps, by the paths of their nodes.

    Args:
        answers: answers of the earlier run. If that was a rerun itself, the answers that it kept
            come first.
        node: path of the node that gets a new answer.
        value: text of that answer, or None to ask the backend for it.

    Attributes:
        answers: the answers, without those of `node`, by node and question.
        node, value: the arguments.
        taken: settled when the node has used the supplied value, or with an error if the value is
            not possible for the node.
    """

    def __init__(self, answers: Iterable[TraceNode], node: str, value: str | None) -> None:
        self.answers = {
            (each.node, each.asked): each
            for each in answers
            if each.asked and each.results and each.node != node
        }
        self._steps: dict[str, Iterator[Generation | Selection]] = {}
        self.node = node
        self.value = value
        self._given: Iterator[str] | None = None  # choices that the value consists of
        self.taken = Variable()

    def find_answer(self, op: AnswerOp, asked: Callable[[], str], text: str) -> TraceNode | None:
        """Returns the kept answer of a node, or None if the backend has to be asked.

        Args:
            asked: computes the digest of the node's question.
            text: text before the node.
        """
        return self.answers.get((op.variable.node, asked()))

    def caller_supplies_answer(self, op: AnswerOp) -> bool:
        """Returns True if the caller supplies the answer of this node."""
        if self.value is None or op.variable.node != self.node:
            return False
        op.variable.when_done(partial(self._settle_supplied_answer, op.variable))
        return True

    def _settle_supplied_answer(self, variable: Variable) -> None:
        error = variable.error_or_none()
        self.taken.set(True, error if isinstance(error, ParameterError) else None)

    def reuse_generations(self, op: GenOp, transcript: Transcript) -> list[Generation]:
        """Returns the samples that a generation keeps from the earlier run. Their usage is zero.
        Returns an empty list if the backend has to be asked.

        Args:
            transcript: text before the node.
        """
        found = [
            each for each in self._remaining_answers(op, transcript) if isinstance(each, Generation)
        ]
        return [msgspec.structs.replace(each, usage=Usage()) for each in found]

    def next_selection(
        self, op: SelectOp, choices: Sequence[str], transcript: Transcript
    ) -> Selection | None:
        """Returns the next selection that the caller supplies or that is kept from the earlier run.
        Returns None if the backend has to be asked.

        Args:
            choices: choices of this step.
            transcript: text before the node.

        Raises:
            ParameterError: the caller's value is not one of the choices.
        """
        if self.caller_supplies_answer(op):
            return self._next_supplied_choice(op, choices)
        saved = next(self._remaining_answers(op, transcript), None)
        return (
            msgspec.structs.replace(saved, usage=Usage()) if isinstance(saved, Selection) else None
        )

    def _remaining_answers(
        self, op: AnswerOp, transcript: Transcript
    ) -> Iterator[Generation | Selection]:
        """Returns the kept answers that a node has not used yet. The node's question is compared
        only the first time, because later questions follow from the first answer.
        """
        node = op.variable.node
        if node not in self._steps:
            question = Question.from_transcript(transcript, transcript.collect_text())
            text = transcript.collect_text()
            saved = self.find_answer(op, lambda: question.digest_for(op), text)
            self._steps[node] = iter(() if saved is None else saved.results)
        return self._steps[node]

    def _next_supplied_choice(self, op: SelectOp, choices: Sequence[str]) -> Selection:
        assert self.value is not None
        if self._given is None:
            first, *others = (
                _split_into_choices(self.value, op.node.choices)
                if op.expression.multi
                else [self.value]
            )
            self._given = iter([first, *(MULTI_SEPARATOR + each for each in others), MULTI_END])
        picked = next(self._given)
        if picked not in choices:
            raise ParameterError(
                "value", f"{self.value!r:.60} is not one of the choices {list(choices)!r:.200}."
            )
        return Selection((), picked=picked)


def _split_into_choices(text: str, choices: Sequence[str]) -> list[str]:
    """Splits a text that lists distinct choices into those choices. Returns any other text as a
    single item.
    """
    for choice in choices:
        if text.startswith(choice + MULTI_SEPARATOR):
            others = [*choices]
            others.remove(choice)
            rest = _split_into_choices(text.removeprefix(choice + MULTI_SEPARATOR), others)
            if rest[-1] in others:
                return [choice, *rest]
    return [text]
