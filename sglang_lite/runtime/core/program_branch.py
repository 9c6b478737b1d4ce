"""One branch of a program that is played: a prompt that grows, and the nodes that are yet to come."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.program.choosing import METHODS, decide
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    ImagePart,
    Join,
    Mark,
    Node,
    Path,
    Rollback,
    Select,
    Text,
)
from sglang_lite.protocol import (
    CapabilityError,
    ConstraintError,
    EngineClosedError,
    Generation,
    ParameterError,
    ProgramError,
    RequestAbortedError,
    Selection,
    SglError,
    Span,
)
from sglang_lite.runtime.core.choice_scoring import ChoiceScoring, no_choices
from sglang_lite.runtime.output_builder import Event
from sglang_lite.runtime.request import Request
from sglang_lite.runtime.sampling_params import ResolvedParams
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
from sglang_lite.runtime.structured_output.prefixed import walked
from sglang_lite.runtime.tokens.token_log import TokenLog

if TYPE_CHECKING:
    from sglang_lite.runtime.core.program_player import Player


@dataclass(eq=False, slots=True)
class Queued:
    """A node that is to be played.

    Attributes:
        grammar: of its constraint, being compiled.
        params: of a generation, or why they are refused.
        branches: of a fork.
        text: the text that it was foreseen to go on from, after the last generated token; None: not foreseen.
        ids: of `text`, being made.
        matcher: of its grammar, being made for the one row that is next.
    """

    node: Node
    grammar: Future[CompiledGrammar] | None = None
    params: ResolvedParams | ParameterError | None = None
    branches: Sequence[Sequence[Queued]] = ()
    text: list[Span] | None = None
    ids: Future[array[int]] | None = None
    matcher: Future[Matcher] | None = None


@dataclass(slots=True)
class _Within:
    """A grammar that a branch is in, and the text that is there of it. Going through that takes long: not on the loop's
    thread.

    Attributes:
        asked: something of it was generated or selected. What was only written the program's author has checked.
    """

    grammar: CompiledGrammar
    text: str
    asked: bool = False

    def possible(self, choices: Sequence[str]) -> list[str]:
        """Those that go on in the grammar. Raises ConstraintError: none does."""
        found = [choice for choice in choices if self._begins(self.text + choice)]
        if not found:
            raise ConstraintError(f"none of the choices goes on in the grammar: {', '.join(map(repr, choices))}.")
        return found

    def end(self) -> None:
        """Raises ConstraintError: the text is not complete."""
        if not walked(self.grammar, self.text).complete:
            raise ConstraintError(f"the grammar is not complete at its end, after {self.text[-80:]!r}.")

    def _begins(self, text: str) -> bool:
        try:
            walked(self.grammar, text)
        except ConstraintError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Place:
    """What a mark remembers."""

    log: TokenLog
    new: tuple[Span, ...]
    added: int
    within: _Within | None


class Branch:
    """
    Everything happens on the loop's thread, but for the texts, which are tokenised elsewhere.

    Attributes:
        error: what it has failed with, or that it was dropped; a rollback takes it back.
        joining: it waits for other branches.
    """

    def __init__(self, player: Player, path: Path) -> None:
        self._player, self._path = player, path
        self._queue: deque[tuple[int, Queued]] = deque()  # with the place of each among its nodes
        self._count = 0  # nodes that have come
        self._played = 0  # and how many of them are played
        self._log: TokenLog | None = None  # None: its fork is yet to come
        self._new: list[Span] = []  # what is not in the log yet
        self._added: list[Span] = []  # what it has added, all in all
        self._lengths: dict[int, int] = {}  # of that, after each node
        self._within: _Within | None = None
        self._foreseen: list[Span] | None = None  # the text after the last generated token, when all queued is played
        self._marks: dict[int, _Place] = {}
        self._forks: list[tuple[int, int]] = []  # place and size of each since the last join
        self._waiting: list[Branch] = []  # branches that join this one
        self._busy = False
        self._epoch = 0  # what comes of an earlier one is nobody's any more
        self._live: set[Request | ChoiceScoring] = set()
        self._refused: SglError | None = None  # what its next node fails with, when all that is queued is played
        self.error: SglError | None = None
        self.joining = False

    @property
    def queued(self) -> bool:
        """Nodes of it are to be played."""
        return bool(self._queue)

    @property
    def text(self) -> str:
        """What it has added."""
        return "".join(span.text for span in self._added)

    def begin(
        self,
        log: TokenLog,
        new: Sequence[Span] = (),
        within: _Within | None = None,
        foreseen: list[Span] | None = None,
    ) -> None:
        """It goes on from a prompt."""
        self._log, self._new, self._within, self._foreseen = log, list(new), within, foreseen

    def take(self, entries: Sequence[Queued]) -> None:
        """Queues nodes. A rollback takes effect at once."""
        for entry in entries:
            place, self._count = self._count, self._count + 1
            node = entry.node
            if isinstance(node, Rollback):
                self._roll_back(node.mark, place, entry)
                continue
            if self.error is not None or self._refused is not None:
                self._player.played(1)
                continue
            if isinstance(node, Gen) and self._foreseen and self._has_to_wait():
                entry.text = self._foreseen
                entry.ids = self._player.encoded(entry.text)
            self._foresee(node)
            self._queue.append((place, entry))
        if self._busy:
            self._prepare_next()

    def refuse(self, count: int, error: SglError) -> None:
        """So many nodes come that can't be queued: the first of them fails, when those before are played."""
        place, self._count = self._count, self._count + count
        if self.error is None and self._refused is None:
            self._refused = error
            self._player.tell((*self._path, place), None, error)
            if not self._busy and not self._queue:
                self._end_refused()

    def _end_refused(self) -> None:
        if self._refused is not None:
            self._give_up(self._refused)
            self._wake()

    def _has_to_wait(self) -> bool:
        """Something comes before what is queued next."""
        return self._busy or any(isinstance(entry.node, Gen | Select | Join) for _, entry in self._queue)

    def _prepare_next(self) -> None:
        """Has the matcher made of the generation that is next: it may go on in the slot of what is under way."""
        if self._within is not None:
            return  # it begins with the text that is yet to come
        for _, entry in self._queue:
            if isinstance(entry.node, Gen | Select | Join | GrammarBegin | GrammarEnd):
                if entry.grammar is not None and entry.matcher is None and isinstance(entry.node, Gen):
                    entry.matcher = self._player.matcher(entry.grammar)
                return

    def _foresee(self, node: Node) -> None:
        """Foresees what text stands after the last generated token behind a node."""
        if isinstance(node, Gen):
            self._foreseen = self._foreseen if node.held else []
        elif isinstance(node, Text):
            if node.ids is not None:
                self._foreseen = []
            elif self._foreseen is not None and node.text:
                self._foreseen = [*self._foreseen, Span(node.text, special=node.special)]
        elif isinstance(node, Select) or (isinstance(node, Join) and node.mode == "concate_and_append"):
            self._foreseen = None

    def go_on(self) -> None:
        """Plays on, if nothing of it is under way."""
        if self._busy or not self._queue or self._log is None or self._player.ended:
            return
        self._set_busy(True)
        self._play()

    def drop(self) -> None:
        """Ends what is queued or under way."""
        self._give_up(RequestAbortedError("the branch was dropped."))
        self._wake()

    def fail(self, error: SglError, place: int | None = None, name: str | None = None) -> None:
        """Ends it with an error, and tells so.

        Args:
            place: of the node; None for the next one.
        """
        if place is None:
            place = self._queue[0][0] if self._queue else self._count
        self._give_up(error)
        self._player.tell((*self._path, place), name, error)
        self._wake()
        self._player.settle()

    def added(self, end: int | None) -> list[Span]:
        """What its first `end` nodes (None: all) have added."""
        if end is None:
            return self._added
        places = [place for place in self._lengths if place < end]
        return self._added[: self._lengths[max(places)]] if places else []

    def through(self, end: int | None) -> bool:
        """Whether its first `end` nodes (None: all) have been played."""
        return self._log is not None and self._played >= (self._count if end is None else end)

    # ------------------------------------------------------------------------------------------- playing

    def _play(self, *, in_slot: bool = False) -> Request | None:
        """Plays up to what has to wait.

        Args:
            in_slot: a request has just ended, in whose slot the next one can go on; that is returned.
        """
        self.joining = False
        while self._queue:
            place, entry = self._queue[0]
            try:
                if isinstance(entry.node, Gen | Select) and not self._player.may_play():
                    break  # it is called when there is room
                if isinstance(entry.node, Gen | Select) and self._within is not None:
                    self._within.asked = True
                if isinstance(entry.node, Gen):
                    self._take_next()
                    return self._generate(place, entry, entry.node, in_slot=in_slot)
                if isinstance(entry.node, Select):
                    self._take_next()
                    self._select(place, entry.node)
                    return None
                if isinstance(entry.node, GrammarBegin) and entry.grammar is not None and not entry.grammar.done():
                    entry.grammar.add_done_callback(self._later(self._play))
                    return None
                if isinstance(entry.node, GrammarEnd) and self._within is not None and self._within.asked:
                    self._end_grammar(self._within, place)
                    return None
                if isinstance(entry.node, Join) and not self._join(entry.node):
                    self.joining = True
                    self._set_busy(False)
                    return None
                self._take_next()
                self._play_at_once(place, entry)
            except SglError as error:
                self.fail(error, place, getattr(entry.node, "name", None))
                return None
            self._through(place)
        self._set_busy(False)
        if not self._queue:
            self._end_refused()
        return None

    def _play_at_once(self, place: int, entry: Queued) -> None:
        match entry.node:
            case Text(text, ids, special):
                self._write((Span(text, ids, special),))
            case ImagePart():
                raise CapabilityError("the model takes no images.", where=entry.node.where)
            case GrammarBegin(text=text):
                if self._within is not None:
                    raise ProgramError("a grammar is open already.")
                assert entry.grammar is not None
                self._within = _Within(entry.grammar.result(), text)
            case GrammarEnd():
                self._within = None
            case Fork():
                self._fork(place, entry.branches)
            case Mark():
                assert self._log is not None
                within = None if self._within is None else replace(self._within)
                self._marks[place] = _Place(self._log.copy(), tuple(self._new), len(self._added), within)

    def _end_grammar(self, within: _Within, place: int) -> None:
        """Plays on without the grammar that the branch was in, if its text is complete."""
        epoch = self._epoch

        def ended(error: SglError | None = None) -> None:
            if self._epoch != epoch:
                return
            if error is not None:
                self.fail(error, place)
                return
            self._within = None
            self._play()
            self._player.settle()

        def job() -> Callable[[], None]:
            try:
                within.end()
            except SglError as error:
                return partial(ended, error)
            return ended

        self._player.encode(job)

    def _take_next(self) -> None:
        self._queue.popleft()
        self._player.played(1)

    def _through(self, place: int) -> None:
        self._played = place + 1
        self._lengths[place] = len(self._added)
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for branch in waiting:
            branch.go_on()

    def _set_busy(self, busy: bool) -> None:
        if busy is not self._busy:
            self._busy = busy
            self._player.busy(1 if busy else -1)

    def _give_up(self, error: SglError) -> None:
        """Ends what is under way: what comes of it is nobody's any more."""
        self._epoch += 1
        self.error, self._refused, self.joining = error, None, False
        live, self._live = self._live, set()
        for each in live:
            if isinstance(each, ChoiceScoring):
                each.abort()
            else:
                self._player.parts.loop.abort(each)
        self._player.played(len(self._queue))
        self._queue.clear()
        self._set_busy(False)

    def _later(self, call: Callable[[], object]) -> Callable[[object], None]:
        """To be called back on any thread: calls on the loop's, unless the branch has been given up."""
        back = self._unless_over(call)

        def later(_: object) -> None:
            try:
                self._player.parts.loop.inbox.post(back)
            except EngineClosedError as error:
                self._player.fail(error)

        return later

    def _unless_over(self, call: Callable[[], object]) -> Callable[[], None]:
        epoch = self._epoch

        def back() -> None:
            if self._epoch == epoch:
                call()
                self._player.settle()

        return back

    def _roll_back(self, mark: int, at: int, entry: Queued) -> None:
        place = self._marks.get(mark)
        if place is None and any(at == mark for at, _ in self._queue):  # nothing after it has been played
            while self._queue[-1][0] > mark:
                self._queue.pop()
                self._player.played(1)
            self._foreseen = self._refused = None
            self._queue.append((at, entry))  # which does nothing when it is played, but is played
            return
        self._player.played(1)
        self._give_up(RequestAbortedError("the branch went back."))
        self.error = self._foreseen = None
        if place is None:
            self.fail(ProgramError("there is no mark to go back to."))
            return
        self._marks = {at: each for at, each in self._marks.items() if at <= mark}
        self._forks = [each for each in self._forks if each[0] < mark]
        self._log, self._new = place.log.copy(), list(place.new)
        self._within = None if place.within is None else replace(place.within)
        del self._added[place.added :]
        self._through(at)

    # ------------------------------------------------------------------------------------------ its nodes

    def _generate(self, place: int, entry: Queued, node: Gen, *, in_slot: bool) -> Request | None:
        """Starts a generation, or returns the request that goes on in the slot."""
        if isinstance(entry.params, ParameterError):
            raise entry.params
        for awaited in (entry.grammar, entry.ids, entry.matcher):
            if awaited is not None and not awaited.done():
                again = partial(self._generate, place, entry, node, in_slot=False)
                awaited.add_done_callback(self._later(again))
                return None
        assert self._log is not None
        assert entry.params is not None
        log, new = self._log, self._new
        if entry.ids is not None and entry.text == [*log.open, *new] and log.fixed and entry.ids.exception() is None:
            log.learn(entry.text, entry.ids.result())
            new.clear()
        samples = _Samples(self, place, node, entry.params)
        in_slot = in_slot and entry.params.n == 1 and not new and log.ready
        if in_slot and self._within is None and (entry.grammar is None or entry.matcher is not None):
            request = samples.make(log, entry)[0]
            self._live.add(request)
            self._prepare_next()
            return request
        self._new, within = [], self._within and replace(self._within)
        submit = self._unless_over(partial(self._submit, samples))

        def job() -> Callable[[], None]:  # meanwhile the log is its own: the branch is busy
            try:
                log.append(new)
                samples.make(log, entry, within)
            except SglError as error:
                return partial(samples.fail, error)
            return submit

        self._player.encode(job)
        self._prepare_next()
        return None

    def _submit(self, samples: _Samples) -> None:
        for request in samples.requests:
            self._live.add(request)
            self._player.parts.loop.receive(request)

    def _select(self, place: int, node: Select) -> None:
        assert self._log is not None
        if not node.choices or not all(node.choices):
            raise no_choices()
        log, new, within, epoch = self._log, self._new, self._within, self._epoch
        within = within and replace(within)
        self._new = []

        def chosen(outcome: Selection | SglError) -> None:
            if self._epoch == epoch:
                self._live.discard(selecting)
                self._selected(place, node, outcome)
                self._player.settle()

        selecting = ChoiceScoring(self._player.parts, chosen)
        self._live.add(selecting)
        unconditional = node.unconditional
        if node.method is not None:
            unconditional = METHODS[node.method].requires_unconditional_logprobs

        def job() -> Callable[[], None]:  # as in _generate
            try:
                log.append(new)
                log.ids()
                selecting.start(
                    log,
                    node.choices if within is None else within.possible(node.choices),
                    unconditional=unconditional,
                    namespace=self._player.namespace,
                    special=node.special,
                )
            except SglError as error:
                return partial(chosen, error)
            return _nothing

        self._player.encode(job)

    def _selected(self, place: int, node: Select, outcome: Selection | SglError) -> None:
        try:
            if isinstance(outcome, SglError):
                raise outcome
            choice = None
            if node.method is not None:
                choice = decide(outcome, node.choices, METHODS[node.method], node.temperature, node.seed).decision
            self._player.tell((*self._path, place), node.name, outcome)
            if choice is not None:
                self._write((Span(choice, special=node.special),))
        except SglError as error:
            self.fail(error, place, node.name)
            return
        self._through(place)
        self._play()

    def _generated(self, place: int, node: Gen, generation: Generation, *, in_slot: bool) -> Request | None:
        if not node.held:
            self._write(generation.spans)
        self._through(place)
        return self._play(in_slot=in_slot)

    def _fork(self, place: int, branches: Sequence[Sequence[Queued]]) -> None:
        assert self._log is not None
        self._forks.append((place, len(branches)))
        text = None
        if self._log.fixed and not any(span.ids for span in self._new):
            text = [*self._log.open, *self._new]
        for i, entries in enumerate(branches):
            child = self._player.branch((*self._path, place, i))
            child.begin(self._log.copy(), self._new, None if self._within is None else replace(self._within), text)
            self._player.played(-len(entries))  # they are queued now
            child.take(entries)
            child.go_on()

    def _join(self, node: Join) -> bool:
        """Appends what branches have added. False: they are not through; then they wake this one.

        Raises:
            SglError: one has failed.
        """
        if node.mode == "gather_variable":
            return True
        forks = self._forks if node.fork is None else [each for each in self._forks if each[0] == node.fork]
        children = [self._player.branch((*self._path, place, i)) for place, size in forks for i in range(size)]
        ends: Sequence[int | None] = node.ends or [None] * len(children)
        if len(children) != len(ends):
            raise ProgramError("a join names a fork that this branch does not have.")
        for child, end in zip(children, ends):
            if not child.through(end):
                if child.error is not None:
                    raise child.error
                child._waiting.append(self)
                return False
        for child, end in zip(children, ends):
            self._write(child.added(end))
        self._forks = [each for each in self._forks if each not in forks]
        return True

    def _write(self, spans: Sequence[Span]) -> None:
        assert self._log is not None
        for span in spans:
            if not self._new and span.ids is not None and self._log.ready:
                self._log.append((span,))
            else:
                self._new.append(span)
        self._added += spans
        if self._within is not None:
            self._within.text += "".join(span.text for span in spans)


class _Samples:
    """A generation under way: its requests, one a sample, and what comes of them."""

    def __init__(self, branch: Branch, place: int, node: Gen, params: ResolvedParams) -> None:
        self._branch, self._place, self._node, self._epoch = branch, place, node, branch._epoch
        self._params = params
        self._ended: dict[int, Generation] = {}
        self.requests: list[Request] = []

    def make(self, log: TokenLog, entry: Queued, within: _Within | None = None) -> Sequence[Request]:
        """Makes the requests. On the loop's thread only where no grammar has to be gone through.

        Raises:
            ParameterError: the prompt has grown too long.
            ConstraintError: the constraint can't be enforced, or the text before does not go on in the grammar.
        """
        player = self._branch._player
        requests = player.parts.builder.build(
            log.ids(), self._params, partial(self._take, 0), stream=player.stream, namespace=player.namespace
        )
        for index, request in enumerate(requests[1:], 1):
            request.output.sink = partial(self._take, index)
        compiled = None if entry.grammar is None else entry.grammar.result()
        if within is not None:
            compiled = player.parts.compiler.continued(within.grammar, within.text, compiled)
        if entry.matcher is not None and within is None and len(requests) == 1:
            requests[0].output.matcher = entry.matcher.result()
        elif compiled is not None:
            for request in requests:
                request.output.matcher = compiled.matcher()
        if len(requests) == 1:
            requests[0].follow = self._follow
        self.requests = requests
        return requests

    def fail(self, error: SglError) -> None:
        if self._branch._epoch == self._epoch:
            self._branch.fail(error, self._place, self._node.name)

    def _take(self, index: int, event: Event) -> None:
        branch = self._branch
        if branch._epoch != self._epoch:
            return
        if isinstance(event, SglError):
            self.fail(event)
            return
        branch._player.tell(
            (*branch._path, self._place),
            self._node.name,
            msgspec.structs.replace(event, index=index) if index else event,
        )
        if isinstance(event, Generation):
            branch._live.discard(self.requests[index])
            self._ended[index] = event
            count = len(self.requests)
            if len(self._ended) < count:
                return
            self.requests = []  # no cycle is left that the garbage collector had to find
            if count > 1:
                branch._generated(self._place, self._node, self._ended[0], in_slot=False)
                branch._player.settle()

    def _follow(self, generation: Generation) -> Request | None:
        branch = self._branch
        if branch._epoch != self._epoch:
            return None
        following = branch._generated(self._place, self._node, generation, in_slot=True)
        branch._player.settle()
        return following


def _nothing() -> None:
    """What is left to do where all is done."""
