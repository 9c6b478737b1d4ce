"""Operations that a branch executes: nodes, with the variables and streams that receive their
results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from sglang_lite.errors import Origin, SglError
from sglang_lite.lang.concurrency.pool import ThreadPool
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.lang.expressions import SglGen, SglSelect
from sglang_lite.program import nodes
from sglang_lite.program.graph import Compact
from sglang_lite.program.nodes import GrammarBegin, GrammarEnd, ScopeBegin, ScopeEnd

if TYPE_CHECKING:
    from sglang_lite.lang.execution.base_player import BasePlayer
    from sglang_lite.lang.execution.push_down import PushedBranch
    from sglang_lite.lang.execution.transcript import FinishedText, Piece, TranscriptPosition
    from sglang_lite.protocol import Generation

REASONING_SUFFIX = "_reasoning_content"  # suffix of the variable with a generation's reasoning


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """Failed attempt at an answer: the rejected answers, if any, and the error."""

    answers: tuple[Generation, ...]
    error: Exception


class AnswerOp(msgspec.Struct, eq=False):  # a msgspec.Struct: its constructor runs no Python code
    """Node that a backend answers: a generation or a selection.

    Attributes:
        node: the node, with the parameters of the run, and the constraint of its whole text,
            reasoning included.
        expression: the user's expression.
    """

    node: nodes.Gen | nodes.Select
    expression: SglGen | SglSelect
    variable: Variable
    # Pushed-down branch that receives the answer, and the node's index there.
    pushed_node: tuple[PushedBranch, int] | None = None
    attempt: int = 0  # number of times the program was asked again
    # `time.perf_counter()` when it began to wait; 0.0 if it has not or was not measured
    began: float = 0.0
    ended: float = 0.0  # `time.perf_counter()` when it was answered or failed
    failed_attempts: tuple[FailedAttempt, ...] = ()
    in_body: bool = True  # False if it was added after the end of the program's body

    def record_failure(self, error: Exception, answers: Sequence[Generation] = ()) -> None:
        """Records a failed attempt."""
        if isinstance(error, SglError) and error.origin is None and answers:
            error.origin = Origin.of(answers[0].meta)
        self.failed_attempts = (*self.failed_attempts, FailedAttempt(tuple(answers), error))


class GenOp(AnswerOp, eq=False):
    node: nodes.Gen
    expression: SglGen
    thoughts: Variable | None = None  # receives the reasoning, if it is separated from the answer
    # whether its prompt shows its tools, which the branch's text does not
    shows_tools: bool = False

    @property
    def has_own_prompt(self) -> bool:
        """True if the prompt is not just the branch's text, because it shows tools or is for
        another backend. The pushed-down program then can't supply the answer.
        """
        return self.shows_tools or self.expression.options.backend is not None


class SelectOp(AnswerOp, eq=False):
    node: nodes.Select
    expression: SglSelect


@dataclass(slots=True)
class ScopeOp:
    node: ScopeBegin | ScopeEnd
    variable: Variable


@dataclass(slots=True)
class ForkOp:
    node: nodes.Fork
    children: Sequence[BasePlayer]


@dataclass(slots=True)
class JoinOp:
    """Operation that joins the children of a fork.

    Attributes:
        added: for each child, a variable with the pieces that it added to its text. Empty if no
            text is appended.
        number: its number among the operations that wait for something (`Waits`); 0 if no text is
            appended.
    """

    node: nodes.Join
    children: Sequence[BasePlayer]
    added: list[Variable]
    number: int = 0


@dataclass(slots=True)
class MarkOp:
    """Marks a point in the branch, or rolls back to it if `back` is True."""

    mark: BranchMark
    back: bool


@dataclass(slots=True)
class ReadOp:
    """Reads something about the branch once everything queued before it has been executed. It is
    not a node of the program.
    """

    variable: Variable
    what: Callable[[], Any]


@dataclass(slots=True)
class EventOp:
    """Notifies the backend's listener of an event. Runs on the listener's threads, since the call
    may block. It is not a node of the program.
    """

    event: str
    pool: ThreadPool
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Compaction:
    """Record of a compaction.

    Attributes:
        node: node of the compaction.
        whole: text before the compaction.
        turns: number of turns that were dropped.
        dropped: pieces of the dropped turns.
        summary: variable of the summary.
        name: name of that variable.
    """

    node: Compact
    whole: FinishedText
    turns: int
    dropped: Sequence[Piece]
    summary: Variable
    name: str


@dataclass(slots=True)
class ReplaceOp:
    """Replaces the text of the branch with a shorter one, which the backend treats as a new text.

    Attributes:
        text: the new text.
        compaction: the compaction that this operation ends. None if it begins a compaction, to ask
            for a summary of the text that will be dropped.
    """

    text: FinishedText
    compaction: Compaction | None = None


Op: TypeAlias = (
    nodes.Content
    | GrammarBegin
    | GrammarEnd
    | GenOp
    | SelectOp
    | ScopeOp
    | ForkOp
    | JoinOp
    | MarkOp
    | ReplaceOp
    | ReadOp
    | EventOp
)


@dataclass(slots=True, eq=False)
class BranchMark:
    """Point in a branch to roll back to.

    Attributes:
        position: position in the transcript; None until the mark is executed.
        pushed: pushed-down branch, and the index of the mark's node there; None if it is not pushed
            down.
        children: number of branches that were forked before the mark.
        waits: number of the last node before the mark that waits for something (see `Waits.last`).
        cancelled: True if the branch was cancelled before the mark.
    """

    position: TranscriptPosition | None = None
    pushed: tuple[PushedBranch, int] | None = None
    children: int = 0
    waits: int = 0
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    """Change to a branch's queue caused by a rollback or a cancellation.

    Attributes:
        kept: operations that stay queued: those before the mark, claimed ones, and events for
            listeners.
        removed: operations that are removed from the queue.
        claimed: True if some operations are still executed before the change, because a join
            claimed them or someone waited for them.
    """

    kept: deque[Op]
    removed: Sequence[Op]
    claimed: bool


def find_removed_range(
    mark: BranchMark | None,
    ops: Sequence[Op | None],
    claims: Mapping[int, Op],
    depth: int,
    waited: int = -1,
) -> Removal:
    """Computes which queued operations a rollback to a mark removes. If the mark is None, removes
    all operations except those claimed by joins or already waited for.

    Args:
        ops: the operation that is being played, or None, and the queued ones.
        claims: last operation that each join has claimed, by the depth of the joining branch.
        depth: depth of the branch that rolls back; only claims by joins above it count.
        waited: number of the last node that a cancellation keeps because it was waited for
            (`Waits`); -1 if it keeps nothing, not even the text that the branch began with.
    """
    queue: list[Op] = [op for op in ops[1:] if op is not None]
    before = 0
    if mark is not None and mark.position is None:  # the mark is queued
        found = (i for i, op in enumerate(queue, 1) if isinstance(op, MarkOp) and op.mark is mark)
        before = next(found, len(queue)) + 1
    last = {id(op) for level, op in claims.items() if level < depth}
    claimed = max((i for i, op in enumerate(ops, 1) if id(op) in last), default=0) if last else 0
    claimed = max(claimed, _count_kept_operations(ops, waited))
    end = max(before, claimed, 1) - 1
    hooks = [op for op in queue[end:] if isinstance(op, EventOp)]
    removed = [op for op in queue[end:] if not isinstance(op, EventOp)]
    return Removal(deque((*queue[:end], *hooks)), removed, claimed > before)


def _count_kept_operations(ops: Sequence[Op | None], kept: int) -> int:
    """Returns how many operations are still executed after a cancellation: those before the first
    one that waits for a discarded answer. Callers may already have received the answers to these
    operations.

    Args:
        ops: the operation that is being executed, or None, and the queued ones.
        kept: like `waited` in `find_removed_range`.
    """
    if kept < 0 or ops[0] is None:
        return 0
    for count, op in enumerate(ops):
        awaited = op.variable.awaited if isinstance(op, AnswerOp) else None
        number = op.number if isinstance(op, JoinOp) else getattr(awaited, "number", 0)
        if number > kept:
            return count
    return len(ops)


# Branch that is being played on this thread of its backend's pool.
on_pool: ContextVar[BasePlayer | None] = ContextVar("sglang_lite_on_pool", default=None)
# Branch and operation whose answer is requested in this context.
asked: ContextVar[tuple[BasePlayer, AnswerOp]] = ContextVar("sglang_lite_asked")


class NodeIdentity(NamedTuple):
    """Identity of a node in a run.

    Attributes:
        program: name of the program, or "" outside a program.
        place: path of the node in the program's tree; equal in all runs that reach the node the
            same way.
        name: name of the node's variable, or None.
    """

    program: str = ""
    place: str = ""
    name: str | None = None


def current_node() -> NodeIdentity:
    """Returns the identity of the node whose call runs in this context, or an empty NodeIdentity
    outside a call.
    """
    found = asked.get(None)
    if found is None:
        return NodeIdentity()
    player, op = found
    called = player.run.called
    return NodeIdentity(
        "" if called is None else called.program.name, op.variable.node, op.node.name
    )
