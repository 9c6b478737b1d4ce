"""Operations that a branch has to wait for, on the executor loop."""

from __future__ import annotations

from sglang_lite.lang.concurrency.pool import in_pool
from sglang_lite.lang.execution import generation, selection
from sglang_lite.lang.execution.base_player import BasePlayer
from sglang_lite.lang.execution.operations import AnswerOp, EventOp, GenOp, JoinOp, Op, SelectOp


async def play_awaited(player: BasePlayer, op: Op) -> None:
    """Plays an operation that has to wait. Runs on the executor loop."""
    match op:
        case JoinOp():
            added = [piece for variable in op.added for piece in await variable.get()]
            if player.is_current(op):
                player.transcript.append_joined(added)
        case EventOp():
            await in_pool(op.pool, op.call)
        case GenOp():
            await generation.agenerate(player, op)
        case _:
            assert isinstance(op, SelectOp)
            await selection.aselect(player, op)


def has_to_wait(op: Op) -> bool:
    """Returns True if an operation that is not played yet has to wait."""
    if isinstance(op, AnswerOp):
        return not op.variable.done
    if isinstance(op, JoinOp):
        return not all(variable.done for variable in op.added)
    return isinstance(op, EventOp)
