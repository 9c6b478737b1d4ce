"""Player of programs, which may grow while they are played; branches are in program_branch.py."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType

from sglang_lite.program.nodes import Fork, Gen, GrammarBegin, Node, Path, Rollback
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
from sglang_lite.runtime.core.branch_queue import QueuedNode
from sglang_lite.runtime.core.branch_text import BranchText
from sglang_lite.runtime.core.engine_parts import EngineParts
from sglang_lite.runtime.core.program_branch import Branch
from sglang_lite.runtime.core.submission import MOST_QUEUED, check_nodes, too_many_error
from sglang_lite.runtime.resolved_params import ResolvedParams
from sglang_lite.runtime.schedule_hints import NOTHING_EXPECTED, expected_tokens
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
from sglang_lite.runtime.tokens.token_log import TokenLog


class ProgramPlayer:
    """Player of one program. `extend` adds nodes to a branch, and they are played as soon as the nodes before them. An
    open program with nothing to play does not count as an open request. It holds no slot, and no page unless the
    caller's decision on a generation is pending.

    Args:
        parts: parts of the engine that plays it.
        log: token log of the prompt that the program continues.
        sink: callback for the events, on the loop's thread: those of each node and, at the end, a ProgramResult once
            the program is closed and fully played, or the SglError of the main branch or of the whole program.
        stream: whether to send deltas.
        namespace: namespace in the prefix tree.
        priority: priority of all its requests.
        holds_room: whether the caller has already counted it as an open request.
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
        holds_room: bool = False,
    ) -> None:
        self.parts, self.stream, self.namespace, self.priority = parts, stream, namespace, priority
        self._sink = sink
        # The attributes below are used on the loop's thread only.
        self._queued = 0  # number of queued nodes
        self._holds_room = holds_room
        self._waits_for_room = False  # True while waiting for room
        self._room_callback: Callable[[], None] = partial(parts.loop.inbox.post_if_open, self._try_room)
        self._busy = 0  # number of busy branches
        self._closed = self.ended = False
        self._branches: dict[Path, Branch] = {}
        self._unforked: SglError | None = None  # error of nodes for a branch that is never forked
        self.branch(()).begin(BranchText(log, (), None))

    # ------------------------------------------------------------------------------------------ any thread

    def extend(
        self, path: Path, nodes: Sequence[Node], refused: Mapping[int, ParameterError] = MappingProxyType({})
    ) -> None:
        """Adds nodes to a branch, even before the branch has been forked. If too many nodes are queued, the first of
        the new ones fails with OverloadedError, and the following nodes of its branch are dropped, up to a rollback.

        Args:
            path: path of the branch.
            nodes: nodes to add.
            refused: errors of generations among the nodes, by index; each is raised when the generation would be
                played.

        Raises:
            ParameterError: an item is not a node.
            EngineClosedError: the engine is closed.
        """
        check_nodes(nodes, path)
        entries = [self._prepared(node) for node in nodes]
        for i, error in refused.items():
            entries[i].params = error
        self.queue_nodes(path, entries)

    def queue_nodes(self, path: Path, entries: Sequence[QueuedNode]) -> None:
        """Adds prepared nodes, as `extend`."""
        self.parts.open_requests.count("programs_extended")
        self.parts.loop.inbox.post(partial(self._extend, path, entries))

    def drop(self, path: Path) -> None:
        """Ends a branch that the caller has given up, from its next answer on; no more events of it are sent. What
        stands before is still played: the caller plays all but answers by itself, and may be ahead. A rollback can
        revive the branch."""
        self.parts.loop.inbox.post_if_open(partial(self._drop, path))

    def close(self) -> None:
        """Closes the program: no more nodes will be added."""
        self.parts.loop.inbox.post_if_open(self._close)

    def abort(self) -> None:
        """Ends the program with RequestAbortedError, unless it has ended."""
        self.parts.loop.inbox.post_if_open(partial(self.fail, RequestAbortedError("the program was aborted.")))

    def checked(self, nodes: Sequence[Node]) -> list[QueuedNode]:
        """Prepares the nodes of a whole program.

        Raises:
            ParameterError: a generation has an invalid parameter.
        """
        entries = [self._prepared(node) for node in nodes]
        _check(entries)
        return entries

    def _prepared(self, node: Node) -> QueuedNode:
        """Prepares a node: starts the compilation of its grammar, and resolves its parameters or stores their error."""
        entry = QueuedNode(node)
        if isinstance(node, Gen):
            entry.grammar = self._compiled(node.constraint)
            try:
                entry.params = self.parts.builder.resolved(node.params)
            except ParameterError as error:  # raised when the node would be played
                entry.params = error
            else:
                for stop in entry.params.stop:  # slow for a new byte: done here, off the loop's thread
                    self.parts.tokenizer.tokens_with(stop.encode("utf-8", "surrogatepass")[-1])
        elif isinstance(node, GrammarBegin):
            entry.grammar = self._compiled(node.constraint)
        elif isinstance(node, Fork):
            entry.branches = [[self._prepared(each) for each in nodes] for nodes in node.branches]
        branches = tuple(sum((each.expected for each in entries), NOTHING_EXPECTED) for entries in entry.branches)
        entry.expected = expected_tokens(
            node, entry.params if isinstance(entry.params, ResolvedParams) else None, branches
        )
        return entry

    def _compiled(self, constraint: Constraint | None) -> Future[CompiledGrammar] | None:
        return None if constraint is None else self.parts.compiler.request(constraint)

    # ------------------------------------------------------------------------------------ the loop's thread

    def branch(self, path: Path) -> Branch:
        """Branch with this path; if it has not been forked yet, a new one that waits for its fork."""
        found = self._branches.get(path)
        if found is None:
            found = self._branches[path] = Branch(self, path)
        return found

    def send(self, path: Path, name: str | None, event: Delta | Generation | Selection | SglError) -> None:
        if not self.ended:
            self._sink(Played(path, name, event))

    def may_play(self) -> bool:
        """Returns True if the program counts as an open request. If not, it queues for room, and its branches resume
        later."""
        if not self._holds_room and not self._waits_for_room:
            self._holds_room = self.parts.open_requests.try_acquire()
            if not self._holds_room:
                self._ask_for_room(first=False)
        return self._holds_room

    def _ask_for_room(self, *, first: bool) -> None:
        self._waits_for_room = True
        self.parts.open_requests.wait_for_room(self._room_callback, 1, first=first)

    def _try_room(self) -> None:
        """Tries to count the program as open, after a notice of room. If the room is not needed any more, gives it up:
        no other caller is notified before."""
        wanted = self._waits_for_room and not self.ended and any(branch.queued for branch in self._branches.values())
        self._waits_for_room = False
        if not wanted:
            self.parts.open_requests.leave(self._room_callback)
            self.settle()
            return
        self._holds_room = self.parts.open_requests.try_acquire()
        if not self._holds_room:
            self._ask_for_room(first=True)
            return
        for branch in list(self._branches.values()):
            branch.resume()
        self.settle()

    def encoded(self, text: Sequence[Span]) -> Future[array[int]]:
        """Tokenises text that follows generated tokens. The future's result is the text's token ids."""
        try:
            return self.parts.encoder.submit(self.parts.builder.log("").encode_after, text, first=False)
        except RuntimeError as error:  # as in `encode`
            failed: Future[array[int]] = Future()
            failed.set_exception(error)
            return failed

    def matcher(self, grammar: Future[CompiledGrammar]) -> Future[Matcher]:
        """Makes a matcher of a grammar that may still be compiling. Runs on a tokenisation thread, as it may take
        long."""
        made: Future[Matcher] = Future()

        def make() -> None:
            try:
                made.set_result(grammar.result().matcher())
            except SglError as error:
                made.set_exception(error)
            except Exception as error:  # raised by a library; must not end the loop
                made.set_exception(ConstraintError(f"no mask can be made: {error!r}"))

        def compiled(_: object) -> None:
            try:
                self.parts.encoder.submit(make)
            except RuntimeError:  # as in `encode`
                made.set_exception(EngineClosedError("the engine is closed."))

        grammar.add_done_callback(compiled)
        return made

    def encode(self, job: Callable[[], Callable[[], None]]) -> None:
        """Runs a job on a tokenisation thread, and the function that it returns on the loop's thread."""
        try:
            self.parts.encoder.submit(self._encode, job)
        except RuntimeError:  # the engine is closed
            self.fail(EngineClosedError("the engine is closed."))

    def _encode(self, job: Callable[[], Callable[[], None]]) -> None:
        try:
            done = job()
        except Exception as error:  # raised by a library; must be reported, as nobody reads the future
            failure = ProgramError(f"a node of the program can't be prepared: {type(error).__name__}: {error}")
            failure.__cause__ = error
            done = partial(self.fail, failure)
        try:
            self.parts.loop.inbox.post(done)
        except EngineClosedError as error:  # the loop has ended: report it from this thread
            self.fail(error)

    def count_dequeued(self, count: int) -> None:
        """Counts `count` nodes as no longer queued; a negative number as newly queued."""
        self._queued -= count

    def count_busy(self, change: int) -> None:
        self._busy += change

    def settle(self) -> None:
        """Ends the program if it is closed and fully played, and releases its place among the open requests if it is
        idle."""
        if self._busy or self.ended or self._waits_for_room:
            return
        if self._closed:
            for branch in self._branches.values():
                if branch.joining:
                    branch.fail(ProgramError("a join waits for nodes that were never added."))
                    return
            for branch in list(self._branches.values()):
                if branch.unforked:
                    self._lose_unforked(branch)
            main = self.branch(())
            self._end(main.error or self._unforked or ProgramResult(main.text))
        elif self._holds_room:
            self._holds_room = False
            self.parts.open_requests.release()

    def fail(self, error: SglError) -> None:
        """Ends the program with an error, and aborts all its running work."""
        if not self.ended:
            branches = list(self._branches.values())
            self._end(error)
            for branch in branches:
                branch.drop()

    def _end(self, outcome: ProgramResult | SglError) -> None:
        self.ended = True
        if self._waits_for_room:
            self._waits_for_room = False
            self.parts.open_requests.leave(self._room_callback)
        if self._holds_room:
            self._holds_room = False
            self.parts.open_requests.release()
        for branch in self._branches.values():
            branch.end()
        sink, self._sink = self._sink, _ignore_event
        # Breaks reference cycles, so that no garbage collection is needed.
        self._branches, self._room_callback = {}, _nothing
        sink(outcome)

    def _extend(self, path: Path, entries: Sequence[QueuedNode]) -> None:
        if self.ended:
            return
        branch = self.branch(path)
        back = max((i for i, entry in enumerate(entries, 1) if isinstance(entry.node, Rollback)), default=0)
        if back:  # these nodes don't count towards the limit: the rollback removes what was queued
            self._queued += back
            branch.queue_nodes(entries[:back])
        rest = entries[back:]
        if self._queued + len(rest) > MOST_QUEUED:
            branch.refuse(rest, too_many_error())
        else:
            self._queued += len(rest)
            branch.queue_nodes(rest)
        if branch.unforked and self._can_not_be_forked(path):
            self._lose_unforked(branch)
        branch.resume()
        self.settle()

    def _can_not_be_forked(self, path: Path) -> bool:
        """Returns True if another node than a fork of so many branches has the place at which the branch would be
        forked."""
        parent = None if len(path) % 2 else self._branches.get(path[:-2])
        return len(path) % 2 == 1 or (parent is not None and parent.begun and parent.count > path[-2])

    def _lose_unforked(self, branch: Branch) -> None:
        self._unforked = ProgramError(
            "nodes were added to a branch that is never forked.",
            hint="A path names a fork by its index among the branch's nodes.",
        )
        branch.lose(self._unforked)

    def _drop(self, path: Path) -> None:
        if not self.ended:
            self.branch(path).drop()
            self.settle()

    def _close(self) -> None:
        self._closed = True
        self.settle()


def _nothing() -> None:
    """Does nothing, when room is available for a program that has ended."""


def _ignore_event(event: Played | ProgramResult | SglError) -> None:
    """Ignores an event that comes after the end of the program."""


def _check(entries: Sequence[QueuedNode]) -> None:
    for entry in entries:
        if isinstance(entry.params, ParameterError):
            raise entry.params
        for branch in entry.branches:
            _check(branch)
