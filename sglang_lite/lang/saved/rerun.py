"""Rerun of a program after a value in it was changed: answers that the value does not affect are reused.

An answer is identified by its question: the prompt, the parameters and the constraint. So whatever the body does with
the changed value, a node with an unchanged question receives the answer that it had.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

import msgspec

from sglang_lite.lang.backend.base_backend import BaseBackend, priority_keywords
from sglang_lite.lang.backend.delegating_backend import DelegatingBackend
from sglang_lite.lang.execution.operations import ForkOp, GenOp, JoinOp, MarkOp, SelectOp
from sglang_lite.lang.execution.player import Player
from sglang_lite.lang.execution.push_down import ProgramAtBackend
from sglang_lite.program.choosing import ChoicesDecision
from sglang_lite.program.nodes import GrammarBegin, GrammarEnd, ImagePart, Text
from sglang_lite.program.seeds import reseeded
from sglang_lite.protocol import (
    Constraint,
    Continuation,
    Delta,
    Generation,
    Image,
    ParameterError,
    ProgramSink,
    Prompt,
    SamplingParams,
    Selection,
    Usage,
)
from sglang_lite.protocol.saved import SavedAnswer, SavedChoice


class Question:
    """Prompt so far, from which questions are digested.

    Attributes:
        hashed: SHA-256 of the text so far.
    """

    def __init__(self, text: str = "", images: Iterable[Image] = ()) -> None:
        self.hashed = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
        self._images = [*images]

    def copy(self) -> Question:
        other = Question(images=self._images)
        other.hashed = self.hashed.copy()
        return other

    def add(self, text: str, images: Iterable[Image] = ()) -> None:
        self.hashed.update(text.encode("utf-8", "surrogatepass"))
        self._images += images

    def digest(self, *about: object) -> str:
        """Digest of the prompt and of the parameters in `about`."""
        found = self.hashed.copy()
        found.update(repr((self._images, about)).encode("utf-8", "surrogatepass"))
        return found.hexdigest()


class RememberingBackend(DelegatingBackend):
    """Backend that answers known questions from memory, and passes unknown ones on to another backend (as one program,
    if that backend plays programs). A substituted answer is validated against its constraint.

    Args:
        backend: backend that answers unknown questions.
        answers: known answers; each one is used once.
    """

    def __init__(self, backend: BaseBackend, answers: Iterable[SavedAnswer]) -> None:
        super().__init__(backend)
        self._answers: defaultdict[str, deque[SavedAnswer]] = defaultdict(deque)
        for answer in answers:
            self._answers[answer.asked].append(answer)

    has_saved_answers = True

    @property
    def plays_programs(self) -> bool:
        return self.backend.plays_programs

    @property
    def takes_priority(self) -> bool:
        return self.backend.takes_priority

    def open_program(self, sink: ProgramSink, *, stream: bool, priority: int = 0) -> ProgramAtBackend:
        return self.backend.open_program(sink, stream=stream, **priority_keywords(priority))

    def _next_answer(self, question: str) -> SavedAnswer | None:
        return self._answers[question].popleft() if self._answers.get(question) else None

    def saved_answers(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Sequence[Generation] | None:
        saved = self._next_answer(Question(prompt.text, prompt.images).digest(params, constraint))
        if saved is None:
            return self.backend.saved_answers(prompt, params, constraint)
        answers = [answer for answer in saved.answers if isinstance(answer, Generation)]
        # A remembered answer costs nothing.
        return [msgspec.structs.replace(answer, usage=Usage()) for answer in answers]

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        remembered = self.saved_answers(prompt, params, constraint)
        if remembered is None:
            async for event in self.backend.agenerate(prompt, params, constraint, stream=stream):
                yield event
            return
        for answer in remembered:
            yield answer

    async def aselect(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection:
        remembered = self.saved_selection(prompt, choices, unconditional=unconditional)
        if remembered is None:
            return await self.backend.aselect(prompt, choices, unconditional=unconditional)
        return remembered

    def saved_selection(self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool) -> Selection | None:
        saved = self._next_answer(Question(prompt.text, prompt.images).digest(tuple(choices), unconditional))
        if saved is None:
            return self.backend.saved_selection(prompt, choices, unconditional=unconditional)
        (answer,) = saved.answers
        assert isinstance(answer, SavedChoice)
        if answer.decision not in choices:
            raise ParameterError("value", f"{answer.decision!r:.60} is not one of the choices {list(choices)!r:.200}.")
        return msgspec.structs.replace(answer.selection, picked=answer.decision, usage=Usage())


def answers_of(player: Player) -> list[SavedAnswer]:
    """Answers that a branch and the branches forked from it have received."""
    names = {id(variable): name for name, variable in player.names.variables.items()}
    return list(_Reader(Question(), None, names).read(player))


def with_value(answers: Sequence[SavedAnswer], name: str, value: str | None) -> list[SavedAnswer]:
    """Answers, with a substitute for those of the variable `name`.

    Args:
        value: text of the substituted answer, or None to remove the old one, so that the question is asked again.

    Raises:
        ParameterError: no node set the variable, or `value` is not a string.
    """
    of_name = [answer for answer in answers if answer.name == name]
    if not of_name:
        names = ", ".join(dict.fromkeys(repr(answer.name) for answer in answers if answer.name)) or "none"
        raise ParameterError("at", f"no node of this state set {name!r:.60}. Nodes set: {names}.")
    rest = [answer for answer in answers if answer.name != name]
    if value is None:
        return rest
    if not isinstance(value, str):
        raise ParameterError(
            "value", f"{value!r:.60} is not a string.", hint="Give the text that the model would have written."
        )
    first = of_name[0]
    fresh = (
        SavedChoice(Selection((), picked=value), value)
        if isinstance(first.answers[0], SavedChoice)
        else Generation(value)
    )
    return [SavedAnswer(first.asked, name, (fresh,)), *rest]


class _Reader:
    """Reads answers from the log of a branch.

    Args:
        question: prompt before the branch's log begins.
        grammar: open grammar, and its text so far; None if no grammar is open.
        names: names of variables, by id of the variable.
    """

    def __init__(self, question: Question, grammar: tuple[Constraint, str] | None, names: dict[int, str]) -> None:
        self._question, self._grammar, self._names = question, grammar, names
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
                    yield from self._generation(op)
                case SelectOp():
                    yield from self._selection(op)
                case ForkOp():
                    for child in op.children:
                        reader = _Reader(self._question.copy(), self._grammar, self._names)
                        yield from reader.read(child)
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

    def _generation(self, op: GenOp) -> Iterator[SavedAnswer]:
        own = op.expression.options is None or op.expression.options.backend is None
        constraint = op.node.constraint
        if self._grammar is not None:
            constraint = Continuation(*self._grammar, constraint)
        record = op.variable.record
        samples = () if record is None else tuple(record) if isinstance(record, list) else (record,)
        attempts = [*(refused.answers for refused in op.failed_attempts), samples]
        name = self._names.get(id(op.variable))
        for i, answers in enumerate(attempts):
            params = op.node.params
            if i:
                params = msgspec.structs.replace(params, seed=reseeded(params.seed, i))
            if answers and own:
                named = name if answers is samples else None
                yield SavedAnswer(self._question.digest(params, constraint), named, answers)
        if samples:
            spans = samples[0].spans if own else ()
            self._add("".join(span.text for span in spans) if spans else samples[0].text)

    def _selection(self, op: SelectOp) -> Iterator[SavedAnswer]:
        record, multi = op.variable.record, op.expression.multi
        if record is None or isinstance(record, dict):
            return
        remaining = list(op.node.choices)
        for count, (selection, decision) in enumerate(record if isinstance(record, list) else [record]):
            choices: Sequence[str] = remaining
            if multi is not None and count:
                choices = [multi.separator + choice for choice in remaining] + [multi.end]
            if selection.scores:  # only the choices that the open grammar allows have scores
                choices = [score.text for score in selection.scores]
            question = self._question.digest(
                tuple(choices), op.expression.choices_method.requires_unconditional_logprobs
            )
            yield SavedAnswer(question, self._names.get(id(op.variable)), (choice_of(selection, decision),))
            if multi is not None and decision.decision == multi.end:
                break
            self._add(decision.decision)
            if multi is not None:
                remaining.remove(decision.decision.removeprefix(multi.separator) if count else decision.decision)


def choice_of(selection: Selection, decision: ChoicesDecision) -> SavedChoice:
    return SavedChoice(selection, decision.decision, decision.meta_info)
