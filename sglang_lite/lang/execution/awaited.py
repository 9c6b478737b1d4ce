"""Operations that a branch has to wait for: on the executor loop, or on a thread of a backend with blocking hooks."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.concurrency.pool import in_pool
from sglang_lite.lang.execution import generation, selection
from sglang_lite.lang.execution.operations import AnswerOp, GenOp, HookOp, JoinOp, MarkOp, Op, SelectOp
from sglang_lite.protocol import SglError

if TYPE_CHECKING:
    from sglang_lite.lang.execution.player import Player


async def play_awaited(player: Player, op: Op) -> None:
    """Plays an operation that has to wait. Runs on the executor loop."""
    match op:
        case JoinOp():
            added = [piece for variable in op.added for piece in await variable.get()]
            if player.is_current(op):
                player.transcript.append_joined(added)
        case MarkOp():
            for variable in op.ended:
                with contextlib.suppress(SglError):
                    await variable.get()
            if op.mark.position is not None and player.is_current(op):
                player.transcript.go_back(op.mark.position)
        case HookOp():
            await in_pool(player.backend.pool, partial(call_hook, player.backend, op))
        case GenOp():
            await generation.agenerate(player, op)
        case _:
            assert isinstance(op, SelectOp)
            await selection.aselect(player, op)


def play_blocking(player: Player, op: Op) -> None:
    """Plays an operation that waits for nothing but a blocking hook. Runs on a thread of the backend's pool."""
    if isinstance(op, HookOp):
        call_hook(player.backend, op)
    elif isinstance(op, GenOp):
        generation.generate(player, op)
    else:
        assert isinstance(op, SelectOp)
        selection.select(player, op)


def needs_loop(player: Player, op: Op) -> bool:
    """Returns True if an operation of a backend with blocking hooks has to be played on the executor loop: if it waits
    for other branches (a waiting thread could be the one that they need), has attempts or a time limit, or asks another
    backend."""
    if isinstance(op, AnswerOp):
        return not player.run.plain or (isinstance(op, GenOp) and op.expression.options is not None)
    return isinstance(op, JoinOp | MarkOp)


def has_to_wait(op: Op) -> bool:
    """Returns True if an operation that is not played yet has to wait."""
    if isinstance(op, AnswerOp):
        return not op.variable.done
    if isinstance(op, JoinOp | MarkOp):
        return not all(variable.done for variable in (op.added if isinstance(op, JoinOp) else op.ended))
    return isinstance(op, HookOp)


def call_hook(backend: BaseBackend, op: HookOp) -> None:
    getattr(backend, op.hook)(*op.args)
