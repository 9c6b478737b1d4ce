"""Runs a program in the engine. The program may grow while it runs.

Contains the program's admission as an open request, the pauses that it reports to the scheduler,
and its driver. The rules of execution are in program/play.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np

from sglang_lite.program.nodes import (
    Gen,
    GrammarBegin,
    GrammarEnd,
    Node,
    Path,
    Rollback,
    Select,
    Verdict,
)
from sglang_lite.program.play.branch import Ask, Cancel, Ended, Failed, Forked, Idle
from sglang_lite.program.play.player import ProgramPlayer
from sglang_lite.protocol import (
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
from sglang_lite.runtime.core.engine_context import EngineContext
from sglang_lite.runtime.core.generation_job import GenerationJob
from sglang_lite.runtime.core.open_requests import OpenRequests
from sglang_lite.runtime.core.prepared_node import (
    EngineAsk,
    EngineBranch,
    PreparedNode,
    check_params,
    prepare_node,
)
from sglang_lite.runtime.core.selection_job import SelectionJob
from sglang_lite.runtime.core.submission import (
    MAX_QUEUED,
    check_nodes,
    check_verdict,
    count_nodes,
    too_many_nodes_error,
)
from sglang_lite.runtime.core.token_text import OpenGrammar, TokenText
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch, ScheduledProgram
from sglang_lite.runtime.scheduler.pauses import Pauses
from sglang_lite.runtime.tokens.token_log import TokenLog


class ProgramPauses:
    """Pauses of one program's branches. A pause is the time between two requests of a branch,
    during which its cached prefix may be evicted. Used on the loop's thread.

    Args:
        pauses: pauses of all programs.
        priority: priority of the program.
        namespace: its namespace in the radix tree.
    """

    def __init__(self, pauses: Pauses, priority: int, namespace: str) -> None:
        self._pauses = pauses
        self._space = PrefixSpace.in_namespace(namespace)
        self._program = ScheduledProgram(priority)
        self._branches: dict[Path, ScheduledBranch] = {}

    def prepare_branch_for_node(self, ask: EngineAsk) -> ScheduledBranch:
        """Returns the branch of a node that is about to start. Also ends the pauses of idle
        branches that were forked from this branch, because most forks are not continued once their
        parent goes on.
        """
        node = ask.node
        branch = self._scheduled_branch(ask.branch)
        assert isinstance(node, Gen | Select)
        branch.name = node.name
        branch.kind = branch.kind or node.name
        path = ask.branch.path
        if ask.branch.forks:
            for other, below in self._branches.items():
                if len(other) > len(path) and other[: len(path)] == path and not below.will_return:
                    self._pauses.end_pause(below)
        return branch

    def pause_forked_branch(self, branch: EngineBranch) -> None:
        """Begins the pause of a newly forked branch."""
        if branch.will_return and branch.text is not None:
            ids = np.array(branch.text.log.fixed, dtype=np.int32)
            self._pauses.pause_at_next_step(self._scheduled_branch(branch), ids, self._space)

    def expect_branch_pause(self, path: Path, seconds: float) -> None:
        """Sets the expected duration of a branch's current pause, or of the next if none has begun."""
        if path in self._branches:  # otherwise, the branch has had no request, and keeps no pages
            self._pauses.set_expected_pause(self._branches[path], seconds)

    def end_unless_returning(self, branch: EngineBranch) -> None:
        """Ends a branch's pause unless the branch may continue."""
        found = self._branches.get(branch.path)
        if found is not None and not found.may_return:
            self._pauses.end_pause(found)

    def close(self) -> None:
        """Ends the pauses of idle branches, because no more nodes will be added."""
        self._program.open = False
        for branch in self._branches.values():
            if not branch.may_return:
                self._pauses.end_pause(branch)

    def forget_all_branches(self) -> None:
        """Ends all pauses permanently."""
        self._program.open = False
        for branch in self._branches.values():
            self._pauses.end_branch(branch)
        self._branches = {}  # breaks a reference cycle, so that no garbage collection is needed

    def _scheduled_branch(self, branch: EngineBranch) -> ScheduledBranch:
        found = self._branches.get(branch.path)
        if found is None:
            found = self._branches[branch.path] = ScheduledBranch(self._program, branch)
        return found


class ProgramRoom:
    """Admission of a program: counts the program as an open request, and queues its nodes until
    there is room for one. Used on the loop's thread.

    Args:
        open_requests: counter of open requests.
        acquired: whether the program is already counted.
        came: callback that tries again when there may be room; can be called on any thread.
    """

    def __init__(
        self, open_requests: OpenRequests, came: Callable[[], None], *, acquired: bool
    ) -> None:
        self._open_requests = open_requests
        self._came = came
        self._acquired = acquired
        self._waits = False
        self._asks: list[EngineAsk] = []  # nodes that wait for room

    def acquire_or_queue(self, ask: EngineAsk) -> bool:
        """Counts the program as an open request if there is room, and queues the node if there is
        not. Returns whether the program is counted.
        """
        if not self._acquired and not self._waits:
            self._acquired = self._open_requests.try_acquire()
            self._waits = not self._acquired
            if self._waits:
                self._open_requests.wait_for_room(self._came, 1, first=False)
        if not self._acquired:
            self._asks.append(ask)
        return self._acquired

    def retry_acquire(self) -> Sequence[EngineAsk]:
        """Tries again to count the program as an open request, after a notice that there is room.
        Returns the nodes that can start now. If no node is waiting any more, gives up the room, so
        that the next caller is notified.
        """
        self._waits = False
        self._asks = [ask for ask in self._asks if ask.is_current]
        if not self._asks:
            self._open_requests.give_up_place(self._came)
            return ()
        self._acquired = self._open_requests.try_acquire()
        if not self._acquired:
            self._waits = True
            self._open_requests.wait_for_room(self._came, 1, first=True)
            return ()
        asks = self._asks
        self._asks = []
        return asks

    def stop_counting_program(self) -> None:
        """Stops counting the program as an open request."""
        if self._acquired:
            self._acquired = False
            self._open_requests.release()

    def give_up_room(self) -> None:
        """Stops counting the program and waiting for room, permanently."""
        if self._waits:
            self._waits = False
            self._open_requests.give_up_place(self._came)
        self.stop_counting_program()
        # breaks reference cycles, so that no garbage collection is needed
        self._came = _ignore_admission
        self._asks = []


def _ignore_admission() -> None:
    """Does nothing when room is available for a program that has ended."""


class EngineProgram:
    """Program that an engine executes. `extend` adds nodes to a branch, which are executed as soon
    as the nodes before them have ended.

    An open program with nothing to execute does not count as an open request. It holds no slot, and
    no page unless the caller's decision on a generation is pending.

    Args:
        context: context of the engine that executes it.
        log: token log of the prompt that the program continues.
        sink: callback for the events, on the loop's thread: those of each node and, at the end, a
            ProgramResult once the program is closed and fully executed, or the SglError of the main
            branch or of the whole program.
        stream: whether to send deltas.
        namespace: namespace in the radix tree.
        priority: priority of all its requests.
        has_room: whether the caller has already counted it as an open request.

    Attributes:
        context, stream, namespace: the arguments of these names.
        winds_down: whether generations should end early; see `wind_down`.
    """

    def __init__(
        self,
        context: EngineContext,
        log: TokenLog,
        sink: ProgramSink,
        *,
        stream: bool = False,
        namespace: str = "",
        priority: int = 0,
        has_room: bool = False,
    ) -> None:
        self.context = context
        self.stream = stream
        self.namespace = namespace
        self._sink = sink
        self.winds_down = False
        # The attributes below are used on the loop's thread only.
        self._player = ProgramPlayer[TokenText, PreparedNode](TokenText(log))
        self._performing = False
        self._jobs: dict[EngineAsk, GenerationJob | SelectionJob] = {}
        self._pauses = ProgramPauses(context.loop.scheduler.pauses, priority, namespace)
        came = partial(context.loop.inbox.post_if_open, self._start_nodes_if_admitted)
        self._room = ProgramRoom(context.open_requests, came, acquired=has_room)

    # ----------------------------------------------------------------------------------- any thread

    def extend(
        self,
        path: Path,
        nodes: Sequence[Node],
        refused: Mapping[int, ParameterError] = MappingProxyType({}),
    ) -> None:
        """Adds nodes to a branch, after the fork that creates it.

        If too many nodes are queued, the first of the new ones fails with OverloadedError, and the
        following nodes of its branch are dropped, up to a rollback.

        Args:
            path: path of the branch.
            nodes: nodes to add.
            refused: errors of generations among the nodes, by index; each is raised when the
                generation would run.

        Raises:
            ParameterError: an item is not a node.
            EngineClosedError: the engine is closed.
        """
        check_nodes(nodes, path)
        entries = [prepare_node(node, self.context) for node in nodes]
        for i, error in refused.items():
            entries[i].params = error
        self.context.open_requests.count("programs_extended")
        self.context.loop.inbox.post(partial(self._add_nodes_to_branch, path, entries))

    def play(self, nodes: Sequence[Node]) -> None:
        """Adds the nodes of a whole program and closes it. Raises ParameterError if a parameter of
        a generation is invalid.
        """
        entries = [prepare_node(node, self.context) for node in nodes]
        check_params(entries)
        self._player.judges = False
        self.context.open_requests.count("programs_extended")
        self.context.loop.inbox.post(partial(self._add_nodes_to_branch, (), entries))
        self.close()

    def drop_branch(self, path: Path) -> None:
        """Ends a branch that the caller has abandoned, at its next node that needs an answer. The
        branch sends no more events. Earlier nodes still run, because the caller may already have
        executed them itself. A rollback can revive the branch.
        """
        self.context.loop.inbox.post_if_open(
            partial(self._apply_input, partial(self._player.end_branch_quietly, path))
        )

    def judge(self, path: Path, place: int, verdict: Verdict) -> None:
        """Gives a verdict on a node, possibly before the branch reaches the node. Does nothing if
        the node was rolled back or its branch has failed.

        Args:
            path: path of the branch.
            place: index of the node in the branch.

        Raises:
            ParameterError: an argument has the wrong type.
            EngineClosedError: the engine is closed.
        """
        check_verdict(path, place, verdict)
        again = None if verdict.again is None else prepare_node(verdict.again, self.context)
        call = partial(self._player.judge, path, place, verdict.text, again)
        self.context.loop.inbox.post(partial(self._apply_input, call))

    def expect_pause(self, path: Path, seconds: float) -> None:
        """Sets for how many seconds the caller is expected to add nothing to a branch. The seconds
        count from the branch's last answer, or from now if that answer has already been given.
        """
        self.context.loop.inbox.post_if_open(
            partial(self._pauses.expect_branch_pause, path, seconds)
        )

    def wind_down(self) -> None:
        """Ends each generation early, including later ones: text at its next token, and JSON as
        soon as closing brackets can complete it. Output that can't be completed runs to its normal
        end.
        """

        def wind_down_jobs() -> None:
            self.winds_down = True
            for job in self._jobs.values():
                if isinstance(job, GenerationJob):
                    job.wind_down()

        self.context.loop.inbox.post_if_open(wind_down_jobs)

    def close(self) -> None:
        """Closes the program: no more nodes will be added."""
        self.context.loop.inbox.post_if_open(self._pauses.close)
        self.context.loop.inbox.post_if_open(partial(self._apply_input, self._player.close))

    def abort(self) -> None:
        """Ends the program with RequestAbortedError, unless it has ended. Each running generation
        and selection also ends with this error, which reports its usage.
        """

        def abort_jobs() -> None:
            for ask, job in self._jobs.items():
                for used in job.unfinished_results():
                    error = RequestAbortedError("the program was aborted.")
                    error.partial = used
                    self.send_event(ask, error)
            self._player.fail_program(RequestAbortedError("the program was aborted."))

        self.context.loop.inbox.post_if_open(partial(self._apply_input, abort_jobs))

    # ----------------------------------------------------- what its jobs call, on the loop's thread

    def send_event(self, ask: EngineAsk, event: Delta | Generation | Selection | SglError) -> None:
        """Sends an event of a node to the caller."""
        self._sink(
            Played(
                (*ask.branch.path, ask.place), getattr(ask.node, "name", None), event, ask.attempt
            )
        )

    def finish_node(
        self, ask: EngineAsk, spans: Sequence[Span] | None = (), *, in_slot: bool = False
    ) -> Request | None:
        """Continues the branch after a node.

        Args:
            spans: text that the node adds; None if the answer is judged.
            in_slot: whether the next request of the branch can continue in the slot of the one that
                has just ended.

        Returns:
            The next request if it continues in the slot, otherwise None.
        """
        self._jobs.pop(ask, None)
        log = ask.branch.text.log if in_slot and ask.branch.text is not None else None
        self._player.accept_answer(ask, spans)
        return self._perform_effects(log)

    def fail_node(self, ask: EngineAsk, error: SglError) -> None:
        """Ends a node with an error, and aborts its requests."""
        self._player.accept_failure(ask, error)
        self._abort_job(ask)
        self._perform_effects()

    def post(self, call: Callable[[], object]) -> None:
        """Runs a call on the loop's thread. Can be called on any thread."""
        try:
            self.context.loop.inbox.post(call)
        except EngineClosedError as error:  # the loop has ended: report it from this thread
            self._apply_input(partial(self._player.fail_program, error))

    def run_off_loop(self, job: Callable[[], Callable[[], object]]) -> None:
        """Runs a job on a tokenisation thread. The job returns a function, which is then run on the
        loop's thread.
        """

        def run() -> None:
            try:
                done = job()
            # raised by a library; must be reported, because nobody reads the future
            except Exception as error:
                failure = ProgramError(
                    f"a node of the program can't be prepared: {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                done = partial(self._apply_input, partial(self._player.fail_program, failure))
            self.post(done)

        try:
            self.context.encoder.submit(run)
        except RuntimeError:  # the engine is closed
            self._apply_input(
                partial(self._player.fail_program, EngineClosedError("the engine is closed."))
            )

    # ------------------------------------------------------------------------- inputs of the player

    def _add_nodes_to_branch(self, path: Path, entries: Sequence[PreparedNode]) -> None:
        player = self._player
        # Nodes that a rollback removes do not count towards the limit.
        back = max(
            (i for i, entry in enumerate(entries, 1) if isinstance(entry.node, Rollback)), default=0
        )
        if back:
            player.add_branch_nodes(path, entries[:back])
        rest = entries[back:]
        count = player.totals.queued + count_nodes(entry.node for entry in rest)
        refusal = too_many_nodes_error() if count > MAX_QUEUED else None
        branch = player.add_branch_nodes(path, rest, refusal)
        if branch is not None and branch.ask in self._jobs:
            self._jobs[branch.ask].prepare_next_generation()
        self._perform_effects()

    def _apply_input(self, call: Callable[[], object]) -> None:
        call()
        self._perform_effects()

    # ------------------------------------------------------------------------ effects of the player

    def _perform_effects(self, log: TokenLog | None = None) -> Request | None:
        """Carries out the player's effects: starts nodes, aborts jobs, reports failures and updates
        pauses. Returns the request that continues in a slot, if any.

        Args:
            log: text of the request that has just ended in the slot; None if no request can
                continue.
        """
        if self._performing:  # called by an effect: the loop below performs the effects that follow
            return None
        following: Request | None = None
        self._performing = True
        try:
            while effects := self._player.pop_effects():
                for effect in effects:
                    match effect:
                        case Ask() if effect.is_current:
                            following = self._start_node(effect, log) or following
                        case Cancel(ask):
                            self._abort_job(ask)
                        case Failed(path, name, error, attempt):
                            self._sink(Played(path, name, error, attempt))
                        case Forked(branch):
                            self._pauses.pause_forked_branch(branch)
                        case Idle(branch):
                            self._pauses.end_unless_returning(branch)
                        case Ended(error):
                            self._end_program(error)
        finally:  # a sink may raise; the error that ends the engine must still reach this program
            self._performing = False
        if not self._player.totals.asked:
            self._room.stop_counting_program()
        return following

    def _start_node(self, ask: EngineAsk, log: TokenLog | None = None) -> Request | None:
        """Starts a node. Returns the request that continues in a slot, like `_perform_effects`."""
        node = ask.node
        text = ask.branch.text
        assert text is not None
        if isinstance(node, GrammarBegin):
            _begin_grammar(self, ask)
            return None
        if isinstance(node, GrammarEnd):
            _end_grammar(self, ask)
            return None
        if not self._room.acquire_or_queue(ask):
            return None
        if text.grammar is not None:
            text.grammar.asked = True
        branch = self._pauses.prepare_branch_for_node(ask)
        request = None
        begun = ask.entry.begun
        ask.entry.begun = None
        job: GenerationJob | SelectionJob
        if begun is not None and begun.adopt_ask(ask):
            job = self._jobs[ask] = begun
        else:
            job = self._jobs[ask] = (
                GenerationJob(self, ask.branch, ask.entry, branch, ask)
                if isinstance(node, Gen)
                else SelectionJob(self, ask, branch)
            )
            request = job.start(in_slot=text.log is log)
        job.prepare_next_generation()
        return request

    def _abort_job(self, ask: EngineAsk) -> None:
        job = self._jobs.pop(ask, None)
        if job is not None:
            job.abort()

    def _start_nodes_if_admitted(self) -> None:
        """Starts the nodes that wait for room, if the program can now be counted as an open
        request.
        """
        for ask in self._room.retry_acquire():
            self._start_node(ask)
        self._perform_effects()

    def _end_program(self, error: SglError | None) -> None:
        text = self._player.main.text
        assert text is not None
        self._room.give_up_room()
        self.context.open_requests.count("programs_ended")
        sink = self._sink
        self._sink = _ignore_event
        self._pauses.forget_all_branches()
        sink(error or ProgramResult("".join(span.text for span in text.added)))


def _ignore_event(event: object) -> None:
    """Ignores an event that comes after the end of the program."""


def _begin_grammar(program: EngineProgram, ask: EngineAsk) -> None:
    """Opens a grammar in the branch of a node, once it is compiled."""
    grammar = ask.entry.grammar
    node = ask.node
    text = ask.branch.text
    assert grammar is not None
    assert isinstance(node, GrammarBegin)
    if not grammar.done():
        grammar.add_done_callback(lambda _: program.post(partial(_begin_grammar, program, ask)))
    elif ask.is_current and text is not None:
        try:
            if text.grammar is not None:
                raise ProgramError("a grammar is open already.")
            text.grammar = OpenGrammar(grammar.result(), node.constraint, node.text)
        except SglError as error:
            program.fail_node(ask, error)
        else:
            program.finish_node(ask)


def _end_grammar(program: EngineProgram, ask: EngineAsk) -> None:
    """Closes the open grammar. If a model has written text in the grammar, checks on another thread
    that the text is complete.
    """
    text = ask.branch.text
    assert text is not None
    grammar = text.grammar
    text.grammar = None

    def finish_or_fail(error: SglError | None) -> None:
        if error is None:
            program.finish_node(ask)
        else:
            program.fail_node(ask, error)

    if grammar is not None and grammar.asked:
        program.run_off_loop(partial(grammar.check_grammar_complete, finish_or_fail))
    else:
        program.finish_node(ask)
