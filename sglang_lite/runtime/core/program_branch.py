"""A branch of a program that is being played: a growing prompt, and the nodes that are queued for it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np

from sglang_lite.program.nodes import (
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
    ProgramError,
    RequestAbortedError,
    Selection,
    SglError,
    Span,
)
from sglang_lite.runtime.core.branch_answers import BranchAnswers
from sglang_lite.runtime.core.branch_forks import BranchForks, Claim, Claims
from sglang_lite.runtime.core.branch_queue import BranchQueue, QueuedNode
from sglang_lite.runtime.core.branch_rollbacks import BranchRollbacks
from sglang_lite.runtime.core.branch_text import BranchText, OpenGrammar
from sglang_lite.runtime.core.engine_parts import EngineParts
from sglang_lite.runtime.core.running_jobs import RunningJobs
from sglang_lite.runtime.request import Request
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
        self._text: BranchText | None = None  # None until the branch's fork is played
        self._first: Sequence[QueuedNode] | None = None  # nodes that the fork has for it; None until the fork is known
        self._early: list[Callable[[], None]] = []  # calls made before the fork is played; run after `_first` is queued
        self._early_nodes = 0  # number of nodes in these calls
        self._forks, self._claims = BranchForks(player, path), Claims()
        self._rollbacks = BranchRollbacks(self._queue, self._forks, self._claims)
        self._lost = False  # True if its fork was rolled back or will never be played
        self._quiet = self._untold = False  # True if it was lost or dropped quietly; until its error is told
        self._waiters: list[Waiter] = []
        self._busy = False
        self._jobs = RunningJobs(player)
        self._answers = BranchAnswers(player, path, self._hints, self._jobs, self._answered, self.fail)
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

    @property
    def count(self) -> int:
        """Number of nodes that the branch was ever given."""
        return len(self._first or ()) + self._early_nodes if self._is_early else self._queue.count

    @property
    def begun(self) -> bool:
        """True if the branch's fork was played."""
        return self._text is not None

    @property
    def unforked(self) -> bool:
        """True if the branch has nodes, but no fork that begins it is known."""
        return self._is_early and self._first is None and bool(self._early) and self._early[-1] != self.drop

    @property
    def _is_early(self) -> bool:
        return self._text is None and not self._lost

    def announce(self, entries: Sequence[QueuedNode]) -> None:
        """Notes that a fork will begin the branch.

        Args:
            entries: first nodes of the branch.
        """
        self._first = entries

    def begin(self, text: BranchText, tail: list[Span] | None = None) -> None:
        """Starts the branch.

        Args:
            text: text that the branch continues.
            tail: text after the last generated token, or None if unknown.
        """
        self._text, self._queue.predicted_tail = text, tail
        self._claims.settle(text, self._played)
        self._queue_early()

    def _queue_early(self) -> None:
        first, self._first = self._first or (), ()
        early, self._early = self._early, []
        self._player.count_dequeued(-len(first))  # counted as queued from now on
        self.queue_nodes(first)
        for each in early:
            each()

    def queue_nodes(self, entries: Sequence[QueuedNode]) -> None:
        """Queues nodes. A rollback among them takes effect at once."""
        if self._is_early:
            self._early_nodes += len(entries)
            self._early.append(partial(self.queue_nodes, entries))
            return
        for entry in entries:
            place, node = self._queue.place(), entry.node
            if isinstance(node, Rollback):
                self._roll_back(node.mark, place, entry)
                continue
            forked = self._forks.receive(place, entry.branches) if isinstance(node, Fork) else ()
            failure = self.error or self._refused
            if failure is not None:
                if self._untold:
                    self._untold = False
                    self._player.send((*self._path, place), None, failure)
                self._player.count_dequeued(1)
                for branch in forked:
                    branch.lose(failure, quiet=self._quiet)
                continue
            if isinstance(node, Join):
                self._forks.claim(place, node)
            if isinstance(node, Gen) and self._queue.predicted_tail and (self._busy or self._queue.waits):
                entry.text = self._queue.predicted_tail
                entry.ids = self._player.encoded(entry.text)
            self._queue.add(place, entry)
            self._awaits_caller = False
        self._update_hints()
        if self._busy:
            self._prepare_next()

    def refuse(self, entries: Sequence[QueuedNode], error: SglError) -> None:
        """Counts nodes as added but does not queue them: the branch fails with `error` after the earlier ones, and so
        do the branches that they would fork."""
        if self._is_early:
            self._early.append(partial(self.refuse, entries, error))
            return
        place, first = self._queue.count, self.error is None and self._refused is None
        if first:
            self._refused = error
            self._player.send((*self._path, place), None, error)
        self._player.count_dequeued(-len(entries))
        self.queue_nodes(entries)
        if first and not self._busy and not self._queue:
            self._end_refused()

    def claim(self, end: int | None) -> Claim:
        """Claims the text of the first `end` nodes (None: of all nodes so far) for a join."""
        claim = Claim(self.count if end is None else end)
        self._claims.add(claim)
        if self._text is not None:
            self._claims.settle(self._text, self._played)
        if self.error is not None:
            self._claims.fail(self.error)
        return claim

    def _end_refused(self) -> None:
        if self._refused is not None:
            self._give_up(self._refused, quiet=self._quiet)

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
        """Drops the next answer, and all behind it, without an event. The caller may have played what is before it."""
        if self._is_early:
            self._early.append(self.drop)
        elif not self._lost:
            self._refused, self._quiet = self._refused or RequestAbortedError("the branch was dropped."), True
            lives = self.error is None and not self._player.ended and self._queue.next_place == self._played
            if not (lives and self._rollbacks.cut_answers()):
                self._end_refused()

    def fail(self, error: SglError, place: int | None = None, name: str | None = None) -> None:
        """Ends the branch with an error, and sends the error to the sink.

        Args:
            error: error to send.
            place: place of the node that failed; None for the next node.
            name: name of the node's variable, if any.
        """
        if place is None:
            place = self._queue.next_place
        self._player.send((*self._path, place), name, error)
        back = self._rollbacks.skip_failed()
        if back is None:
            self._give_up(error)
        else:  # a queued rollback takes the failed node back
            self._jobs.cancel_all()
            self._claims.fail(error, back)
            self._set_busy(False)
            self.resume()
            self._wake()
        self._player.settle()

    def lose(self, error: SglError, *, quiet: bool = False) -> None:
        """Ends the branch and those forked from it for good, as its fork was rolled back or will never be played.

        Args:
            quiet: whether the error is told only if nodes are added later.
        """
        if self._lost:
            return
        early, self._lost, self._quiet = self._is_early, True, quiet
        if self.error is None:
            if not quiet:
                self._player.send((*self._path, self._queue.next_place), None, error)
            self._give_up(error, quiet=quiet)
        if early:
            self._queue_early()
        self._untold = quiet
        for branch in self._forks.branches:
            branch.lose(error, quiet=quiet)

    def wake_when_played(self, waiter: Waiter) -> None:
        """Resumes another branch once the next node of this branch is played or has failed."""
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
                    request = self._answers.generate(text, place, entry, entry.node, in_slot=in_slot)
                    self._prepare_next()
                    return request
                if isinstance(entry.node, Select):
                    self._queue.pop_first()
                    self._answers.select(text, place, entry.node)
                    return None
                if isinstance(entry.node, GrammarBegin) and entry.grammar is not None and not entry.grammar.done():
                    entry.grammar.add_done_callback(self._jobs.future_callback(self._play))
                    return None
                if isinstance(entry.node, GrammarEnd) and text.grammar is not None and text.grammar.asked:
                    grammar, text.grammar = text.grammar, None
                    self._answers.end_grammar(grammar, place, self._play)
                    return None
                if isinstance(entry.node, Join) and not self._forks.join(text, place, entry.node, self):
                    self.joining = True
                    self._set_busy(False)
                    return None
                self._queue.pop_first()
                self._play_at_once(text, place, entry)
                in_slot = in_slot and not isinstance(entry.node, Rollback)
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
                self._forks.begin(text, place, len(entry.branches))
            case Mark():
                self._rollbacks.set_mark(place, text)
            case Rollback():
                self._go_back(text, place)

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
        self._answers.end()

    def _mark_played(self, place: int) -> bool:
        """Records that a node has been played. Returns False if that rolled back or ended the branch."""
        epoch = self._jobs.epoch
        self._played = place + 1
        if self._text is not None:
            self._text.mark_played(place)
            if self._claims:
                self._claims.settle(self._text, self._played)
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

    def _give_up(self, error: SglError, *, quiet: bool = False) -> None:
        """Ends the branch with an error, and the branches of forks that will not be played (`quiet`: as in `lose`)."""
        self.error = error
        ended = [branch for branch in self._forks.branches if not branch.begun]
        ended += self._rollbacks.clear()
        self._stop()
        self._claims.fail(error)
        for branch in ended:
            branch.lose(error, quiet=quiet)
        self._wake()

    def _stop(self) -> None:
        """Discards the queue and all running work; later results of the work are ignored."""
        self._refused, self.joining, self._awaits_caller = None, False, False
        self._jobs.cancel_all()
        self._queue.clear()
        self._set_busy(False)

    def _roll_back(self, mark: int, at: int, entry: QueuedNode) -> None:
        failed, known = self.error is not None or self._refused is not None, self._rollbacks.has_mark(mark)
        if self._lost or (failed and not known):  # the branch has failed before the mark
            self._player.count_dequeued(1)
        elif not known:
            self._player.count_dequeued(1)
            self.fail(ProgramError("a rollback names a mark that its branch does not have."), at)
        elif self._rollbacks.receive(mark, at, entry):
            self._player.count_dequeued(1)
            self._stop()
            self.error, self._quiet = None, False
            assert self._text is not None
            self._go_back(self._text, at)
            self.hold()
            self._mark_played(at)
        else:
            self._refused, self._quiet = None, False

    def _go_back(self, text: BranchText, at: int) -> None:
        self._rollbacks.go_back(at, text)

    # ------------------------------------------------------------------------------------------ its nodes

    def _answered(self, place: int, spans: Sequence[Span] | None, *, in_slot: bool = False) -> Request | None:
        """Goes on behind a generation or selection that has been answered; see `BranchAnswers`."""
        self._awaits_caller = spans is None
        if spans is not None and self._text is not None:
            self._text.write(spans)
        following = self._play(in_slot=in_slot) if self._mark_played(place) else None
        self._player.settle()
        return following
