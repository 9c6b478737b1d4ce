"""Answers of an earlier run that its rerun keeps, and the answer that the caller gives instead of one of them.

A node is known by its path in the program's tree. It keeps its answer if its question is the same: the prompt, and the
parameters and the constraint, or the choices and the method of choosing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.protocol import Constraint, Generation, Image, ParameterError, Prompt, Selection, TraceNode, Usage

if TYPE_CHECKING:
    from sglang_lite.lang.execution.operations import AnswerOp, GenOp, SelectOp


class Question:
    """Prompt so far, from which questions are digested.

    Attributes:
        hashed: SHA-256 of the text so far.
    """

    def __init__(self, text: str = "", images: Iterable[Image] = ()) -> None:
        self.hashed = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
        self._images = [*images]

    @classmethod
    def of(cls, prompt: Prompt) -> Question:
        return cls(prompt.text, prompt.images)

    def copy(self) -> Question:
        other = Question(images=self._images)
        other.hashed = self.hashed.copy()
        return other

    def add(self, text: str, images: Iterable[Image] = ()) -> None:
        self.hashed.update(text.encode("utf-8", "surrogatepass"))
        self._images += images

    def of_generation(self, op: GenOp, constraint: Constraint | None) -> str:
        """Digest of a generation's question.

        Args:
            constraint: constraint of the node, within the open grammar.
        """
        tools = op.expression.tools
        shown = () if tools is None or not op.shows_tools else (tools.shown,)
        return self._digest(op.node.params, constraint, *shown)

    def of_selection(self, op: SelectOp, grammar: tuple[Constraint, str] | None) -> str:
        """Digest of a selection's question.

        Args:
            grammar: open grammar and its text so far, or None.
        """
        own = op.expression
        return self._digest(own.choices, own.multi, type(own.choices_method).__qualname__, op.node.temperature, grammar)

    def _digest(self, *about: object) -> str:
        found = self.hashed.copy()
        found.update(repr((self._images, about)).encode("utf-8", "surrogatepass"))
        return found.hexdigest()


class Kept:
    """Answers that a rerun keeps, by the paths of their nodes.

    Args:
        answers: answers of the earlier run, behind those of the runs that it repeated.
        node: path of the node that gets another answer.
        value: text of that answer, or None to ask for it.

    Attributes:
        answers: the answers, without those of `node`, by node and question.
        value: the argument.
        taken: settled when the node has taken the value, with an error if the value is not possible for it.
    """

    def __init__(self, answers: Iterable[TraceNode], node: str, value: str | None) -> None:
        self.answers = {
            (each.node, each.asked): each for each in answers if each.asked and each.results and each.node != node
        }
        self._steps: dict[str, Iterator[Generation | Selection]] = {}
        self._node, self.value = node, value
        self._given: Iterator[str] | None = None  # choices that the value consists of
        self.taken = Variable()

    def gives(self, op: AnswerOp) -> bool:
        """Returns True if the caller gives the answer of this node."""
        if self.value is None or op.variable.node != self._node:
            return False
        op.variable.when_done(partial(self._settle, op.variable))
        return True

    def _settle(self, variable: Variable) -> None:
        error = variable.error()
        self.taken.set(True, error if isinstance(error, ParameterError) else None)

    def generations(self, op: GenOp, question: Callable[[], str]) -> list[Generation]:
        """Samples that a generation keeps; empty if it has to be asked for. A kept answer costs nothing.

        Args:
            question: returns the node's question.
        """
        found = [each for each in self._kept(op, question) if isinstance(each, Generation)]
        return [msgspec.structs.replace(each, usage=Usage()) for each in found]

    def selection(self, op: SelectOp, choices: Sequence[str], question: Callable[[], str]) -> Selection | None:
        """Next selection that the caller gives to a node or that it keeps; None if it has to be asked for.

        Args:
            choices: choices of this step.
            question: returns the node's question.

        Raises:
            ParameterError: the caller's value is not possible.
        """
        if self.gives(op):
            return self._next_given(op, choices)
        saved = next(self._kept(op, question), None)
        return msgspec.structs.replace(saved, usage=Usage()) if isinstance(saved, Selection) else None

    def _kept(self, op: AnswerOp, question: Callable[[], str]) -> Iterator[Generation | Selection]:
        """Answers that a node has not taken yet. Its question is compared when it asks for the first time: what it asks
        for later follows from its first answer."""
        node = op.variable.node
        if node not in self._steps:
            saved = self.answers.get((node, question()))
            self._steps[node] = iter(() if saved is None else saved.results)
        return self._steps[node]

    def _next_given(self, op: SelectOp, choices: Sequence[str]) -> Selection:
        assert self.value is not None
        if self._given is None:
            multi = op.expression.multi
            parts = [self.value] if multi is None else _parts(self.value, op.node.choices, multi.separator)
            before, last = ("", []) if multi is None else (multi.separator, [multi.end])
            self._given = iter([*parts[:1], *(before + part for part in parts[1:]), *last])
        picked = next(self._given)
        if picked not in choices:
            raise ParameterError("value", f"{self.value!r:.60} is not one of the choices {list(choices)!r:.200}.")
        return Selection((), picked=picked)


def _parts(text: str, choices: Sequence[str], separator: str) -> list[str]:
    """Different choices that a text consists of, with the separator between them; the text itself if it does not."""
    for choice in choices:
        if text.startswith(choice + separator):
            others = [*choices]
            others.remove(choice)
            rest = _parts(text.removeprefix(choice + separator), others, separator)
            if rest[-1] in others:
                return [choice, *rest]
    return [text]
