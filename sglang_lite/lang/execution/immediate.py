"""Executes operations. Those that need no answer are executed immediately, on the thread that adds
them. Those that wait for a backend are executed on the executor loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_lite.lang.concurrency.pool import run_in_pool
from sglang_lite.lang.execution import generation, selection
from sglang_lite.lang.execution.base_player import BasePlayer
from sglang_lite.lang.execution.operations import (
    EventOp,
    ForkOp,
    GenOp,
    JoinOp,
    MarkOp,
    Op,
    ReadOp,
    ReplaceOp,
    ScopeOp,
    SelectOp,
    on_pool,
)
from sglang_lite.lang.execution.transcript import Transcript
from sglang_lite.program.nodes import (
    GrammarBegin,
    GrammarEnd,
    ImagePart,
    ScopeBegin,
    TurnBegin,
    TurnEnd,
)


def _play_scope(player: BasePlayer, op: ScopeOp) -> bool:
    if isinstance(op.node, ScopeBegin):
        player.scope_starts[id(op.variable)] = len(player.transcript.pieces)
    else:
        op.variable.set(player.transcript.collect_text(player.scope_starts.pop(id(op.variable))))
    return True


def _play_fork(player: BasePlayer, op: ForkOp) -> bool:
    for child in op.children:
        child.transcript.fork_from(player.transcript)
        child.start_playing()
    return True


def _play_event(player: BasePlayer, op: EventOp) -> bool:
    if on_pool.get() is not player:
        return False
    op.call()
    return True


def play_join(player: BasePlayer, op: JoinOp) -> bool:
    if player.pushed is not None:
        player.pushed.record_pieces_at_start(op, player.transcript.pieces)
    if not all(variable.done for variable in op.added):
        return False
    for pieces in [variable.result() for variable in op.added]:  # nothing if a branch has failed
        player.transcript.append_from_join(pieces)
    return True


def _play_read(player: BasePlayer, op: ReadOp) -> bool:
    op.variable.set(op.what())
    return True


def _play_mark(player: BasePlayer, op: MarkOp) -> bool:
    if not op.back:
        op.mark.position = player.transcript.position()
    elif op.mark.position is not None:
        player.transcript.rewind_to(op.mark.position)
    return True


def _play_replace(player: BasePlayer, op: ReplaceOp) -> bool:
    done = op.compaction
    player.transcript.replace_text(op.text, None if done is None else done.whole)
    if done is not None:  # `fork_at` the summary continues after the compaction
        done.summary.end_position = player.transcript.end_position
    return True


def _transcript_change_handler(
    change: Callable[[Transcript, Any], None],
) -> Callable[[BasePlayer, Any], bool]:
    def immediate(player: BasePlayer, node: Any) -> bool:
        change(player.transcript, node)
        return True

    return immediate


# Functions that play an operation on the submitting thread. They return True if it is done, False
# if it has to wait for a backend.
IMMEDIATE: dict[type, Callable[[BasePlayer, Any], bool]] = {
    GenOp: generation.generate_immediately,
    SelectOp: selection.select_immediately,
    ImagePart: _transcript_change_handler(Transcript.append_image),
    TurnBegin: _transcript_change_handler(Transcript.begin_turn),
    TurnEnd: _transcript_change_handler(Transcript.end_turn),
    ScopeOp: _play_scope,
    GrammarBegin: _transcript_change_handler(Transcript.begin_grammar),
    GrammarEnd: _transcript_change_handler(Transcript.end_grammar),
    ForkOp: _play_fork,
    JoinOp: play_join,
    ReadOp: _play_read,
    MarkOp: _play_mark,
    ReplaceOp: _play_replace,
    EventOp: _play_event,
}


async def play_async(player: BasePlayer, op: Op) -> None:
    """Executes an operation that has to wait. Runs on the executor loop."""
    match op:
        case EventOp():
            await run_in_pool(op.pool, op.call)
        case GenOp():
            await generation.play_generation(player, op)
        case _:
            assert isinstance(op, SelectOp)
            await selection.play_selection(player, op)
