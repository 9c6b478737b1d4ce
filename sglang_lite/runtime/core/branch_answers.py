"""Results that a program's branch waits for: of its generations and selections, and of ends of grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from sglang_lite.program.nodes import Gen, Path, Select
from sglang_lite.protocol import Delta, Generation, ParameterError, Selection, SglError, Span
from sglang_lite.runtime.core.branch_queue import QueuedNode
from sglang_lite.runtime.core.branch_text import BranchText, OpenGrammar
from sglang_lite.runtime.core.generation_job import GenerationJob
from sglang_lite.runtime.core.running_jobs import RunningJobs
from sglang_lite.runtime.core.selection_job import SelectionJob
from sglang_lite.runtime.core.submission import no_choices_error
from sglang_lite.runtime.request import Request
from sglang_lite.runtime.resolved_params import ResolvedParams
from sglang_lite.runtime.schedule_hints import ScheduleHints

if TYPE_CHECKING:
    from sglang_lite.runtime.core.program_branch import ProgramOfBranches


class Answered(Protocol):
    """Callback for the answer of a node."""

    def __call__(self, place: int, spans: Sequence[Span] | None, *, in_slot: bool = False) -> Request | None:
        """Continues the branch.

        Args:
            place: place of the node.
            spans: text that the node adds; None if the caller decides on the result.
            in_slot: whether the next request can continue in the slot of this one.

        Returns:
            That next request, or None.
        """
        ...


class BranchAnswers:
    """Starts what one branch has to wait for, and reports its events.

    Args:
        player: program of the branch.
        path: path of the branch.
        hints: scheduling hints of the branch.
        jobs: running jobs of the branch.
        answered: callback for each answer.
        failed: callback with an error, and the place and name of the node that failed.
    """

    def __init__(
        self,
        player: ProgramOfBranches,
        path: Path,
        hints: ScheduleHints,
        jobs: RunningJobs,
        answered: Answered,
        failed: Callable[[SglError, int, str | None], object],
    ) -> None:
        self._player, self._path, self._hints, self._jobs = player, path, hints, jobs
        self._answered, self._failed = answered, failed

    def generate(self, text: BranchText, place: int, entry: QueuedNode, node: Gen, *, in_slot: bool) -> Request | None:
        """Starts a generation, or returns its request if it can continue in the slot."""
        if isinstance(entry.params, ParameterError):
            raise entry.params
        for awaited in (entry.grammar, entry.ids, entry.matcher):
            if awaited is not None and not awaited.done():
                again = partial(self.generate, text, place, entry, node, in_slot=False)
                awaited.add_done_callback(self._jobs.future_callback(again))
                return None
        assert entry.params is not None
        log = text.log
        if (
            entry.ids is not None
            and entry.text == [*log.open, *text.new]
            and log.fixed
            and entry.ids.exception() is None
        ):
            log.learn(entry.text, entry.ids.result())
            text.take_new()
        job = self._generation_job(place, node, entry.params)
        in_slot = in_slot and entry.params.n == 1 and not text.new and log.ready
        if in_slot and text.grammar is None and (entry.grammar is None or entry.matcher is not None):
            job.make(log, entry.grammar, entry.matcher)
            self._jobs.begin(job)
            return job.in_slot()
        self._jobs.begin(job)
        new, within = text.take_new(), text.open_grammar()
        submit = self._jobs.guarded(job.submit)

        def make() -> Callable[[], None]:  # may use the log: the branch is busy and doesn't change it meanwhile
            try:
                log.append(new)
                job.make(log, entry.grammar, entry.matcher, within)
            except SglError as error:
                return partial(job.fail, error)
            return submit

        self._player.encode(make)
        return None

    def _generation_job(self, place: int, node: Gen, params: ResolvedParams) -> GenerationJob:
        def send(event: Delta | Generation | SglError) -> None:
            if isinstance(event, SglError):
                self._failed(event, place, node.name)
            else:
                self._player.send((*self._path, place), node.name, event)

        def done(job: GenerationJob, generation: Generation, in_slot: bool) -> Request | None:
            self._jobs.end(job)
            return self._answered(place, None if node.held else generation.spans, in_slot=in_slot)

        player = self._player
        return GenerationJob(
            player.parts, params, send, done,
            stream=player.stream or node.stream, namespace=player.namespace, hints=self._hints,
        )  # fmt: skip

    def select(self, text: BranchText, place: int, node: Select) -> None:
        """Starts a selection."""
        if not node.choices:
            raise no_choices_error()
        done = partial(self._selected, place, node)
        job = SelectionJob(self._player.parts, node, self._player.namespace, self._hints, done)
        self._jobs.begin(job)
        self._player.encode(partial(job.start, text.log, text.take_new(), text.open_grammar()))

    def _selected(
        self, place: int, node: Select, job: SelectionJob, outcome: Selection | SglError, choice: str | None
    ) -> None:
        self._jobs.end(job)
        if isinstance(outcome, SglError):
            self._failed(outcome, place, node.name)
        else:
            self._player.send((*self._path, place), node.name, outcome)
            spans = None if choice is None else (Span(choice, special=node.special),)
            self._answered(place, spans)

    def end_grammar(self, grammar: OpenGrammar, place: int, ended: Callable[[], object]) -> None:
        """Checks, off the loop's thread, that the text completes a grammar; then calls `ended`."""

        def checked(error: SglError | None) -> None:
            if error is not None:
                self._failed(error, place, None)
            else:
                ended()

        self._player.encode(partial(grammar.end, self._jobs.guarded(checked)))

    def end(self) -> None:
        """Breaks reference cycles when the program ends, so that no garbage collection is needed."""
        self._answered, self._failed = _answer_nothing, _answer_nothing


def _answer_nothing(*_: object, **options: object) -> None:
    """Does nothing with an answer that comes after the end of the program."""
