"""Operations that a rollback removes from a branch's queue, and those that it leaves as a join has claimed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_lite.lang.execution.operations import BranchMark, EventOp, MarkOp, Op


@dataclass(frozen=True, slots=True)
class Removal:
    """Change of a branch's queue by a rollback.

    Attributes:
        kept: operations that stay queued: those before the mark, claimed ones and hooks.
        removed: operations that it removes.
        claimed: True if claimed operations are played before the rollback.
    """

    kept: deque[Op]
    removed: Sequence[Op]
    claimed: bool


def removal(mark: BranchMark | None, ops: Sequence[Op | None], claims: Mapping[int, Op], depth: int) -> Removal:
    """Removal of what is queued behind a mark, or of everything if the mark is None.

    Args:
        ops: the operation that is being played, or None, and the queued ones.
        claims: last operation that each join has claimed, by the depth of the joining branch.
        depth: depth of the branch that rolls back; only claims of joins above it count.
    """
    queue: list[Op] = [op for op in ops[1:] if op is not None]
    before = 0
    if mark is not None and mark.position is None:  # the mark is queued
        found = (i for i, op in enumerate(queue, 1) if isinstance(op, MarkOp) and op.mark is mark)
        before = next(found, len(queue)) + 1
    last = {id(op) for level, op in claims.items() if level < depth}
    claimed = max((i for i, op in enumerate(ops, 1) if id(op) in last), default=0) if last else 0
    end = max(before, claimed, 1) - 1
    hooks = [op for op in queue[end:] if isinstance(op, EventOp)]
    removed = [op for op in queue[end:] if not isinstance(op, EventOp)]
    return Removal(deque((*queue[:end], *hooks)), removed, claimed > before)
