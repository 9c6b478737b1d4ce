"""A branch of a program that is being played: a growing prompt, and the nodes that are queued for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np

from sglang_lite.program.control_flow import fill_value, unfilled
from sglang_lite.program.nodes import (
    Fill,
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    ImagePart,
    Join,
    Mark,
    Path,
    Rollback,
    Select,
    Text,
)
from sglang_lite.protocol import (
    CapabilityError,
    Delta,
    Generation,
    ParameterError,
    ProgramError,
    RequestAbortedError,
    Selection,
    SglError,
    Span,
)
from sglang_lite.runtime.core.branch_forks import BranchForks
from sglang_lite.runtime.core.branch_queue import BranchQueue, QueuedNode
from sglang_lite.runtime.core.branch_text import BranchText, OpenGrammar, TextMark
from sglang_lite.runtime.core.engine_parts import EngineParts
from sglang_lite.runtime.core.generation_job import GenerationJob
from sglang_lite.runtime.core.running_jobs import RunningJobs
from sglang_lite.runtime.core.selection_job import SelectionJob
from sglang_lite.runtime.core.submission import no_choices_error
from sglang_lite.runtime.request import Request
from sglang_lite.runtime.resolved_params import ResolvedParams
from sglang_lite.runtime.schedule_hints import ScheduleHints
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher


class Waiter(Protocol):
    """Party that waits for a branch to advance or to fail; `resume` resumes it."""

    def resume(self) -> None: ...


class ProgramOfBranches(Protocol):
    """Interface of the program that a branch needs; implemented by program_player.py."""

    parts: EngineParts
    stream: bool
    namespace: str
    priority: int
    ended: bool

    def branch(self, path: Path) -> Branch: ...
    def value(self, path: Path, waiter: Waiter) -> str | list[str] | None: ...
    def set_value(self, path: Path, value: str | list[str]) -> None: ...
    def forget_values(self, path: Path, after: int) -> None: ...
    def send(self, path: Path, name: str | None, event: Delta | Generation | Selection | SglError) -> None: ...
    def may_play(self) -> bool: ...
    def encoded(self, text: Sequence[Span]) -> Future[array[int]]: ...
    def matcher(self, grammar: Future[CompiledGrammar]) -> Future[Matcher]: ...
    def encode(self, job: Callable[[], Callable[[], None]]) -> None: ...
    def count_dequeued(self, count: int) -> None: ...
    def count_busy(self, change: int) -> None: ...
    def settle(self) -> None: ...
    def fail(self, error: SglError) -> None: ...


class Branch:
    """Branch of a program. All methods run on the loop's thread; only the tokenisation of texts runs on others.

    Args:
        player: program that the branch belongs to.
        path: path of the branch in the program; () for the main branch.

    Attributes:
        error: error that the branch has failed with or was dropped with, else None; a rollback resets it.
        joining: True while the branch waits for other branches, or for the value of a node.
    """

    def __init__(self, player: ProgramOfBranches, path: Path) -> None:
        self._player, self._path = player, path
        self._hints = ScheduleHints(player, player.priority)
        self._queue = BranchQueue(self._hints, player.count_dequeued)
        self._played = 0  # number of nodes played, counted from the branch's start
        self._text: BranchText | None = None  # None until the branch has been forked
        self._early: list[Callable[[], None]] = []  # calls made before that; run after the nodes that the fork brings
        self._marks: dict[int, TextMark] = {}
        self._forks = BranchForks(player, path)
        self._waiters: list[Waiter] = []
        self._busy = False
        self._jobs = RunningJobs(player)
        self._awaits_caller = False  # True while the caller has yet to decide on what the last node generated
        self._refused: SglError | None = None  # error that the branch fails with once its queue is empty
        self.error: SglError | None = None
        self.joining = False

    @property
    def queued(self) -> bool:
        """True if nodes of the branch are queued."""
        return bool(self._queue)

    @property
    def text(self) -> str:
        """Text that the branch has added."""
        return "" if self._text is None else "".join(span.text for span in self._text.added)

    def begin(self, text: BranchText, tail: list[Span] | None = None, entries: Sequence[QueuedNode] = ()) -> None:
        """Starts the branch.

        Args:
            text: text that the branch continues.
            tail: text after the last generated token, or None if unknown.
            entries: first nodes of the branch.
        """
        self._text, self._queue.predicted_tail = text, tail
        self.queue_nodes(entries)
        early, self._early = self._early, []
        for each in early:
            each()

    def queue_nodes(self, entries: Sequence[QueuedNode]) -> None:
        """Queues nodes. A rollback among them takes effect at once."""
        if self._text is None:
            self._early.append(partial(self.queue_nodes, entries))
            return
        for entry in entries:
            place, node = self._queue.place(), entry.node
            if isinstance(node, Rollback):
                self._roll_back(node.mark, place, entry)
                continue
            if self.error is not None or self._refused is not None:
                self._player.count_dequeued(1)
                continue
            if isinstance(node, Gen) and self._queue.predicted_tail and (self._busy or self._queue.waits):
                entry.text = self._queue.predicted_tail
                entry.ids = self._player.encoded(entry.text)
            self._queue.add(place, entry)
            self._awaits_caller = False
        self._update_hints()
        if self._busy:
            self._prepare_next()

    def refuse(self, count: int, error: SglError) -> None:
        """Counts `count` nodes as added but not queued: the branch fails with `error` after the earlier ones."""
        if self._text is None:
            self._early.append(partial(self.refuse, count, error))
            return
        place = self._queue.place(count)
        if self.error is None and self._refused is None:
            self._refused = error
            self._player.send((*self._path, place), None, error)
            if not self._busy and not self._queue:
                self._end_refused()

    def _end_refused(self) -> None:
        if self._refused is not None:
            self._give_up(self._refused)
            self._wake()

    def _prepare_next(self) -> None:
        """Starts making the matcher of a generation that is next, which may then continue in the running slot."""
        if self._text is not None and self._text.grammar is not None:
            return  # the matcher will first have to advance over text that is not known yet
        entry = self._queue.next_to_wait
        if entry is not None and isinstance(entry.node, Gen) and entry.grammar is not None and entry.matcher is None:
            entry.matcher = self._player.matcher(entry.grammar)

    def resume(self) -> None:
        """Resumes playing, unless the branch is busy, has nothing queued or has not started."""
        if self._busy or not self._queue or self._text is None or self._player.ended:
            return
        self._set_busy(True)
        self._play()

    def hold(self) -> None:
        """Asks the scheduler to keep the cached prefix of the branch's text, if the branch has nodes to play."""
        self._update_hints()
        if self._hints.returns and self._text is not None:
            ids = np.array(self._text.log.fixed, dtype=np.int32)
            self._player.parts.loop.scheduler.held_prefixes.want(self._hints, ids, self._player.namespace)

    def drop(self) -> None:
        """Drops everything that is queued or running, without an event."""
        if self._text is None:
            self._early.append(self.drop)
            return
        self._give_up(RequestAbortedError("the branch was dropped."))
        self._wake()

    def fail(self, error: SglError, place: int | None = None, name: str | None = None) -> None:
        """Ends the branch with an error, and sends the error to the sink.

        Args:
            error: error to send.
            place: place of the node that failed; None for the next node.
            name: name of the node's variable, if any.
        """
        if place is None:
            place = self._queue.next_place
        self._give_up(error)
        self._player.send((*self._path, place), name, error)
        self._wake()
        self._player.settle()

    def added(self, end: int | None) -> list[Span]:
        """Text that the first `end` nodes of the branch (None: all) have added."""
        return [] if self._text is None else self._text.added_before(end)

    def is_played(self, end: int | None) -> bool:
        """Returns True if the first `end` nodes of the branch (None: all) have been played."""
        return self._text is not None and self._played >= (self._queue.count if end is None else end)

    def wake_when_played(self, waiter: Waiter) -> None:
        """Resumes another branch, or a decision, once the next node of this branch is played or has failed."""
        self._waiters.append(waiter)

    # ------------------------------------------------------------------------------------------- playing

    def _play(self, *, in_slot: bool = False) -> Request | None:
        """Plays nodes until one has to wait, or the queue is empty.

        Args:
            in_slot: whether a request has just ended in whose slot the next request can continue.

        Returns:
            That next request, if it continues in the slot; else None.
        """
        text = self._text
        assert text is not None
        self.joining = False
        while self._queue:
            place, entry = self._queue.first
            try:
                if isinstance(entry.node, Gen | Select) and not self._player.may_play():
                    break  # resumed when the engine has room for the program
                if isinstance(entry.node, Gen | Select) and text.grammar is not None:
                    text.grammar.asked = True
                if isinstance(entry.node, Gen):
                    self._queue.pop_first()
                    return self._generate(text, place, entry, entry.node, in_slot=in_slot)
                if isinstance(entry.node, Select):
                    self._queue.pop_first()
                    self._select(text, place, entry.node)
                    return None
                if isinstance(entry.node, GrammarBegin) and entry.grammar is not None and not entry.grammar.done():
                    entry.grammar.add_done_callback(self._jobs.future_callback(self._play))
                    return None
                if isinstance(entry.node, GrammarEnd) and text.grammar is not None and text.grammar.asked:
                    self._end_grammar(text, text.grammar, place)
                    return None
                waits = isinstance(entry.node, Join) and not self._forks.join(text, entry.node, self)
                if waits or (isinstance(entry.node, Fill) and not self._fill(text, entry.node)):
                    self.joining = True
                    self._set_busy(False)
                    return None
                self._queue.pop_first()
                self._play_at_once(text, place, entry)
            except SglError as error:
                self.fail(error, place, getattr(entry.node, "name", None))
                return None
            if not self._mark_played(place):
                return None
        self._set_busy(False)
        if not self._queue:
            self._end_refused()
        return None

    def _play_at_once(self, text: BranchText, place: int, entry: QueuedNode) -> None:
        match entry.node:
            case Text(written, ids, special):
                text.write((Span(written, ids, special),))
            case ImagePart():
                raise CapabilityError("the model takes no images.", where=entry.node.where)
            case GrammarBegin(text=written):
                if text.grammar is not None:
                    raise ProgramError("a grammar is open already.")
                assert entry.grammar is not None
                text.grammar = OpenGrammar(entry.grammar.result(), written)
            case GrammarEnd():
                text.grammar = None
            case Fork():
                self._forks.begin(text, place, entry.branches)
            case Mark():
                self._marks[place] = text.mark()

    def _end_grammar(self, text: BranchText, grammar: OpenGrammar, place: int) -> None:
        """Checks, off the loop's thread, that the text completes the grammar; then leaves the grammar."""

        def ended(error: SglError | None) -> None:
            if error is not None:
                self.fail(error, place)
            else:
                text.grammar = None
                self._play()

        self._player.encode(partial(grammar.end, self._jobs.guarded(ended)))

    def _update_hints(self) -> None:
        """Updates the hint that the branch will need its text again, and releases the held prefix if not."""
        hints = self._hints
        hints.returns = self._busy or bool(self._queue) or self._awaits_caller
        if not hints.returns:
            self._player.parts.loop.scheduler.held_prefixes.release(hints)

    def end(self) -> None:
        """Ends the branch when its program ends: no more nodes will come."""
        self._awaits_caller = False
        self._update_hints()

    def _mark_played(self, place: int) -> bool:
        """Records that a node has been played. Returns False if a decision then rolled back or ended the branch."""
        epoch = self._jobs.epoch
        self._played = place + 1
        if self._text is not None:
            self._text.mark_played(place)
        if self._waiters:
            self._wake()
        return self._jobs.epoch == epoch

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for each in waiters:
            each.resume()

    def _set_busy(self, busy: bool) -> None:
        if busy is not self._busy:
            self._busy = busy
            self._player.count_busy(1 if busy else -1)
        self._update_hints()

    def _give_up(self, error: SglError) -> None:
        """Discards the queue and all running work; later results of the work are ignored."""
        self.error, self._refused, self.joining = error, None, False
        self._jobs.cancel_all()
        self._queue.clear()
        self._awaits_caller = False
        self._set_busy(False)

    def _roll_back(self, mark: int, at: int, entry: QueuedNode) -> None:
        place = self._marks.get(mark)
        if place is None and self._queue.roll_back(mark, at, entry):  # nothing after the mark has been played
            self._refused = None
            return
        self._player.count_dequeued(1)
        self._give_up(RequestAbortedError("the branch went back."))
        self.error = self._queue.predicted_tail = None
        if place is None:
            self.fail(ProgramError("a rollback names a mark that its branch does not have."))
            return
        self._marks = {at: each for at, each in self._marks.items() if at <= mark}
        self._forks.go_back(mark)
        self._player.forget_values(self._path, mark)
        assert self._text is not None
        self._text.go_back(place)
        self.hold()
        self._mark_played(at)

    # ------------------------------------------------------------------------------------------ its nodes

    def _generate(self, text: BranchText, place: int, entry: QueuedNode, node: Gen, *, in_slot: bool) -> Request | None:
        """Starts a generation, or returns its request if it can continue in the slot."""
        if isinstance(entry.params, ParameterError):
            raise entry.params
        for awaited in (entry.grammar, entry.ids, entry.matcher):
            if awaited is not None and not awaited.done():
                again = partial(self._generate, text, place, entry, node, in_slot=False)
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
            self._prepare_next()
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
        self._prepare_next()
        return None

    def _generation_job(self, place: int, node: Gen, params: ResolvedParams) -> GenerationJob:
        def send(event: Delta | Generation | SglError) -> None:
            if isinstance(event, SglError):
                self.fail(event, place, node.name)
            else:
                self._player.send((*self._path, place), node.name, event)

        def done(job: GenerationJob, generation: Generation, in_slot: bool) -> Request | None:
            self._jobs.end(job)
            if not node.held and self._text is not None:
                self._text.write(generation.spans)
            self._player.set_value((*self._path, place), generation.text if params.n == 1 else job.texts)
            self._awaits_caller = node.held
            following = self._play(in_slot=in_slot) if self._mark_played(place) else None
            self._player.settle()
            return following

        player = self._player
        return GenerationJob(
            player.parts, params, send, done,
            stream=player.stream, namespace=player.namespace, hints=self._hints,
        )  # fmt: skip

    def _select(self, text: BranchText, place: int, node: Select) -> None:
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
        try:
            if isinstance(outcome, SglError):
                raise outcome
            self._player.send((*self._path, place), node.name, outcome)
            self._awaits_caller = choice is None
            if choice is not None and self._text is not None:
                self._text.write((Span(choice, special=node.special),))
                self._player.set_value((*self._path, place), choice)
        except SglError as error:
            self.fail(error, place, node.name)
        else:
            if self._mark_played(place):
                self._play()
        self._player.settle()

    def _fill(self, text: BranchText, node: Fill) -> bool:
        """Appends the value of a node to the text. Returns False, and resumes later, if it has no value yet.

        Raises:
            SglError: the node has failed, or its value lacks the item that the hole names.
        """
        if node.node is None:
            raise unfilled(node)
        value = self._player.value(node.node, self)
        if value is not None:
            text.write((Span(str(fill_value(value, node)), special=node.special),))
        return value is not None

    def failed(self, place: int) -> SglError | None:
        """Error because of which the node at `place` will never have a value, or None if it may still get one."""
        return self.error if place >= self._played else None
