"""Programs that are open or being played: they grow while they are played, branch by branch (program_branch.py)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType

from sglang_lite.program.nodes import Decision, Fork, Gen, GrammarBegin, Node, Path, Rollback
from sglang_lite.protocol import (
    Constraint,
    ConstraintError,
    Delta,
    EngineClosedError,
    Generation,
    ParameterError,
    Played,
    ProgramError,
    ProgramResult,
    ProgramSink,
    RequestAbortedError,
    Selection,
    SglError,
    Span,
)
from sglang_lite.runtime.core.branch_queue import Queued
from sglang_lite.runtime.core.branch_text import BranchText
from sglang_lite.runtime.core.engine_parts import EngineParts
from sglang_lite.runtime.core.program_branch import Branch, Waiting
from sglang_lite.runtime.core.program_control_flow import Decisions, PreparedPart
from sglang_lite.runtime.core.submission import MOST_QUEUED, check_nodes, too_many_error
from sglang_lite.runtime.resolved_params import ResolvedParams
from sglang_lite.runtime.schedule_hints import NOTHING_EXPECTED, ahead_of
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
from sglang_lite.runtime.tokens.token_log import TokenLog


class ProgramPlayer:
    """Player of a program. `extend` gives a branch more nodes, which are played as soon as those before are; an open
    program with nothing to play holds no slot, and no page unless a verdict is awaited, and does not count as open.

    Args:
        parts: of the engine that plays it.
        log: the prompt that it continues.
        sink: gets what each node brings and, when it was closed and everything is played, a ProgramResult; or an
            SglError: that of the main branch, or what ended the whole. Called on the engine's thread.
        stream: deltas are wanted.
        namespace: of the prefix tree.
        priority: of all its requests.
        entered: it counts as an open request already.
    """

    def __init__(
        self,
        parts: EngineParts,
        log: TokenLog,
        sink: ProgramSink,
        *,
        stream: bool = False,
        namespace: str = "",
        priority: int = 0,
        entered: bool = False,
    ) -> None:
        self.parts, self.stream, self.namespace, self.priority = parts, stream, namespace, priority
        self._sink = sink
        # the loop's thread's
        self._queued = 0  # nodes
        self._entered = entered
        self._asked = False  # for room, which has not come
        self._room: Callable[[], None] = partial(parts.loop.inbox.tell, self._go_on)
        self._busy = 0  # branches
        self._closed = self.ended = False
        self._branches: dict[Path, Branch] = {}
        self._values: dict[Path, str | list[str]] = {}  # of generations and selections
        self._decisions: Decisions | None = None
        self._adding = False  # nodes of a part
        self.branch(()).begin(BranchText(log, (), None))

    # ------------------------------------------------------------------------------------------ any thread

    def extend(
        self, path: Path, nodes: Sequence[Node], refused: Mapping[int, ParameterError] = MappingProxyType({})
    ) -> None:
        """Adds nodes to a branch; to one whose fork is yet to come, too. Where too many wait to be played, the first of
        these fails with OverloadedError, and with it what comes after in its branch, up to a rollback.

        Args:
            refused: what generations among the nodes fail with, by their index, when it is their turn.

        Raises:
            ParameterError: something is no node.
            EngineClosedError: the engine is closed.
        """
        check_nodes(nodes, path)
        entries = [self._prepared(node) for node in nodes]
        for i, error in refused.items():
            entries[i].params = error
        self.take(path, entries)

    def take(self, path: Path, entries: Sequence[Queued]) -> None:
        """`extend` with nodes that are prepared."""
        self.parts.open.count("programs_extended")
        self.parts.loop.inbox.post(partial(self._extend, path, entries))

    def decide(self, first: Decision, parts: Sequence[PreparedPart]) -> None:
        """Has the nodes of a program's parts come, decision by decision. Nothing else will."""
        self.parts.loop.inbox.post(partial(self._decide, Decisions(self, first, parts)))

    def drop(self, path: Path) -> None:
        """Ends what is queued or under way in a branch, which its caller has given up: nothing more of it is told. A
        rollback continues from before."""
        self.parts.loop.inbox.tell(partial(self._drop, path))

    def close(self) -> None:
        """Says that nothing more will come."""
        self.parts.loop.inbox.tell(self._close)

    def abort(self) -> None:
        """Ends the program with RequestAbortedError, unless it has ended."""
        self.parts.loop.inbox.tell(partial(self.fail, RequestAbortedError("the program was aborted.")))

    def checked(self, nodes: Sequence[Node]) -> list[Queued]:
        """Nodes of a whole program, prepared.

        Raises:
            ParameterError: a generation has a bad parameter.
        """
        entries = [self._prepared(node) for node in nodes]
        _check(entries)
        return entries

    def _prepared(self, node: Node) -> Queued:
        """A node, with its grammar being compiled, and its parameters resolved or refused."""
        entry = Queued(node)
        if isinstance(node, Gen):
            entry.grammar = self._compiled(node.constraint)
            try:
                entry.params = self.parts.builder.resolved(node.params)
            except ParameterError as error:  # it is told when it is its turn
                entry.params = error
            else:
                for stop in entry.params.stop:  # takes a while when a byte is new: not on the loop's thread
                    self.parts.tokenizer.tokens_with(stop.encode("utf-8", "surrogatepass")[-1])
        elif isinstance(node, GrammarBegin):
            entry.grammar = self._compiled(node.constraint)
        elif isinstance(node, Fork):
            entry.branches = [[self._prepared(each) for each in nodes] for nodes in node.branches]
        branches = tuple(sum((each.ahead for each in entries), NOTHING_EXPECTED) for entries in entry.branches)
        entry.ahead = ahead_of(node, entry.params if isinstance(entry.params, ResolvedParams) else None, branches)
        return entry

    def _compiled(self, constraint: Constraint | None) -> Future[CompiledGrammar] | None:
        return None if constraint is None else self.parts.compiler.request(constraint)

    # ------------------------------------------------------------------------------------ the loop's thread

    def branch(self, path: Path) -> Branch:
        """The branch of this path; one that nobody has forked yet waits for that."""
        found = self._branches.get(path)
        if found is None:
            found = self._branches[path] = Branch(self, path)
        return found

    def value(self, path: Path, waiting: Waiting) -> str | list[str] | None:
        """The value of a node; None: it has none yet, and then who waits is woken when there may be one.

        Raises:
            SglError: the node has failed, and will have none.
        """
        found = self._values.get(path)
        if found is None:
            branch = self.branch(path[:-1])
            error = branch.failed(path[-1]) if path else None
            if error is not None:
                raise error
            branch.wake_when_through(waiting)
        return found

    def set_value(self, path: Path, value: str | list[str]) -> None:
        self._values[path] = value

    def forget_values(self, path: Path, after: int) -> None:
        """Forgets the values of a branch's nodes after a place, which it has gone back to."""
        gone = [at for at in self._values if at[:-1] == path and at[-1] > after]
        for at in gone:
            del self._values[at]

    def tell(self, path: Path, name: str | None, event: Delta | Generation | Selection | SglError) -> None:
        if not self.ended:
            self._sink(Played(path, name, event))

    def may_play(self) -> bool:
        """Tells whether it counts as an open request. If not, the branches continue when there is room."""
        if not self._entered and not self._asked:
            self._entered = self.parts.open.enter()
            if not self._entered:
                self._ask_for_room(first=False)
        return self._entered

    def _ask_for_room(self, *, first: bool) -> None:
        self._asked = True
        self.parts.open.wait_for_room(self._room, 1, first=first)

    def _go_on(self) -> None:
        """Takes room that there may be now. Where it is not taken, that has to be said: nobody else is told."""
        wanted = self._asked and not self.ended and any(branch.queued for branch in self._branches.values())
        self._asked = False
        if not wanted:
            self.parts.open.leave(self._room)
            self.settle()
            return
        self._entered = self.parts.open.enter()
        if not self._entered:
            self._ask_for_room(first=True)
            return
        for branch in list(self._branches.values()):
            branch.go_on()
        self.settle()

    def encoded(self, text: Sequence[Span]) -> Future[array[int]]:
        """The ids of text that follows generated tokens."""
        try:
            return self.parts.encoder.submit(self.parts.builder.log("").encode_after, text, first=False)
        except RuntimeError as error:  # as in encode
            failed: Future[array[int]] = Future()
            failed.set_exception(error)
            return failed

    def matcher(self, grammar: Future[CompiledGrammar]) -> Future[Matcher]:
        """A matcher of a grammar that is being compiled; made where texts are tokenised, as it may take as long."""
        made: Future[Matcher] = Future()

        def make() -> None:
            try:
                made.set_result(grammar.result().matcher())
            except SglError as error:
                made.set_exception(error)
            except Exception as error:  # a library's, which must not end the loop
                made.set_exception(ConstraintError(f"no mask can be made: {error!r}"))

        def compiled(_: object) -> None:
            try:
                self.parts.encoder.submit(make)
            except RuntimeError:  # as in encode
                made.set_exception(EngineClosedError("the engine is closed."))

        grammar.add_done_callback(compiled)
        return made

    def encode(self, job: Callable[[], Callable[[], None]]) -> None:
        """Runs a job where texts are tokenised, and what it returns here."""
        try:
            self.parts.encoder.submit(self._encode, job)
        except RuntimeError:  # the engine is closed
            self.fail(EngineClosedError("the engine is closed."))

    def _encode(self, job: Callable[[], Callable[[], None]]) -> None:
        try:
            done = job()
        except Exception as error:  # a library's: nobody else would hear of it
            failure = ProgramError(f"the program can't go on: {type(error).__name__}: {error}")
            failure.__cause__ = error
            done = partial(self.fail, failure)
        try:
            self.parts.loop.inbox.post(done)
        except EngineClosedError as error:  # nothing else is left that could tell
            self.fail(error)

    def played(self, count: int) -> None:
        """Counts `count` nodes as not queued any more."""
        self._queued -= count

    def busy(self, change: int) -> None:
        self._busy += change

    def settle(self) -> None:
        """Looks whether it has ended, or holds nothing any more."""
        if self._busy or self.ended or self._asked:
            return
        if self._decisions is not None and self._decisions.pending is not None:
            if not self._adding:
                self.fail(ProgramError("a decision waits for a node that was never played."))
            return
        if self._closed:
            for branch in self._branches.values():
                if branch.joining:
                    branch.fail(ProgramError("a join or a hole waits for nodes that its branch never had."))
                    return
            main = self.branch(())
            self._end(main.error or ProgramResult(main.text))
        elif self._entered:
            self._entered = False
            self.parts.open.go_out()

    def fail(self, error: SglError) -> None:
        """Ends the program, and whatever of it is under way."""
        if not self.ended:
            branches = list(self._branches.values())
            self._end(error)
            for branch in branches:
                branch.drop()

    def _end(self, outcome: ProgramResult | SglError) -> None:
        self.ended = True
        if self._asked:
            self._asked = False
            self.parts.open.leave(self._room)
        if self._entered:
            self._entered = False
            self.parts.open.go_out()
        for branch in self._branches.values():
            branch.end()
        sink, self._sink = self._sink, _nobody
        # No cycle is left that the garbage collector had to find.
        self._branches, self._values, self._room, self._decisions = {}, {}, _nothing, None
        sink(outcome)

    def _extend(self, path: Path, entries: Sequence[Queued]) -> None:
        if self.ended:
            return
        branch = self.branch(path)
        back = max((i for i, entry in enumerate(entries, 1) if isinstance(entry.node, Rollback)), default=0)
        if back:  # what it goes back from is not queued any more
            self._queued += back
            branch.take(entries[:back])
        rest = entries[back:]
        if self._queued + len(rest) > MOST_QUEUED:
            branch.refuse(len(rest), too_many_error())
        else:
            self._queued += len(rest)
            branch.take(rest)
        branch.go_on()
        self.settle()

    def _drop(self, path: Path) -> None:
        if not self.ended:
            self.branch(path).drop()
            self.settle()

    def _close(self) -> None:
        self._closed = True
        self.settle()

    def _decide(self, decisions: Decisions) -> None:
        self._decisions = decisions
        decisions.go_on()
        self.settle()

    def add(self, nodes: Sequence[tuple[Path, Sequence[Queued]]], *, last: bool) -> None:
        """Adds the nodes of a part, the last one or not."""
        self._adding, self._closed = True, last
        for path, entries in nodes:
            self._queued += len(entries)
            self.branch(path).take(entries)
        for path, _ in nodes:
            self.branch(path).go_on()
        self._adding = False


def _nothing() -> None:
    """Does nothing: room has come for a program that has ended."""


def _nobody(event: Played | ProgramResult | SglError) -> None:
    """Gets what comes after the end."""


def _check(entries: Sequence[Queued]) -> None:
    for entry in entries:
        if isinstance(entry.params, ParameterError):
            raise entry.params
        for branch in entry.branches:
            _check(branch)
