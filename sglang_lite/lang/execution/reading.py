"""Reading a branch while it is played: its variables by name, its text and messages as they are at a place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sglang_lite.lang.concurrency.variables import Variable, located, when_all_done
from sglang_lite.lang.execution.run import Run, current_run
from sglang_lite.lang.execution.transcript import Piece
from sglang_lite.lang.results import as_dicts
from sglang_lite.protocol import Location, ParameterError, ProgramError, SglError, UnknownVariableError
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.execution.player import Player


def check_name(name: object, where: Location | None) -> None:
    """Raises ParameterError: this is no name of a variable."""
    if not isinstance(name, str):
        raise ParameterError("name", f"{name!r:.60} is not a string.", where=where)


def find_variable(player: Player, name: str, where: Location | None = None) -> Variable:
    """The variable of a name. From outside a body that is still running, waits for the name to be declared."""
    check_name(name, where)
    variable = player.names.variables.get(name)
    while variable is None:
        promise = _promise(player, name, where)
        may_block(player.run, f"await s.get({name!r})", where)
        promise.wait()
        variable = player.names.variables.get(name)
    return variable


async def afind_variable(player: Player, name: str, where: Location | None = None) -> Variable:
    """`find_variable` for coroutines."""
    check_name(name, where)
    variable = player.names.variables.get(name)
    while variable is None:
        await _promise(player, name, where).get()
        variable = player.names.variables.get(name)
    return variable


def _promise(player: Player, name: str, where: Location | None) -> Variable:
    return player.names.promise(name, Variable(where, player.run.made), partial(_never, player, name, where))


def _never(player: Player, name: str, where: Location | None) -> SglError | None:
    """The error of a name that will not be declared; None for others."""
    if name in player.names.scopes:
        return ProgramError(f"the variable scope {name!r} is still open.", where=where)
    declaring = player.run.body_open and current_run.get() is not player.run
    return None if declaring else unknown(player, name, where)


def unknown(player: Player, name: str, where: Location | None = None) -> SglError:
    """The error for a name that there is not."""
    if player.failure is not None:  # it may have been about to be made
        player.see_failure()
        return located(player.failure, where)
    return UnknownVariableError(
        f"the program has no variable {name!r}; it has: {player.names.listed()}.", where=where
    )  # fmt: skip


def may_block(run: Run, instead: str, where: Location | None) -> None:
    """Checks that a caller may block; asked before it does.

    Raises:
        ProgramError: the coroutine body that is waited for needs the event loop of this thread.
    """
    if not (run.is_async and run.body_open):
        return
    with contextlib.suppress(RuntimeError):  # no event loop is running here
        if asyncio.get_running_loop() is run.loop or current_run.get() is run:
            raise ProgramError(
                "reading here would block the event loop of an async program.", hint=f"Use {instead}.", where=where
            )


# What `Player.read` may ask.


def nothing(player: Player) -> None:
    """Reads nothing, for who only waits."""


def whole_text(player: Player) -> str:
    return player.transcript.text()


def all_messages(player: Player) -> list[dict[str, UserValue]]:
    return as_dicts(player.transcript.messages)


def added(player: Player) -> list[Piece]:
    """Pieces that have come since the branch was forked."""
    return player.transcript.added


def error_of(player: Player) -> SglError | None:
    """The error that a branch failed with, once everything queued has been played."""
    with contextlib.suppress(SglError):
        player.read(nothing).wait()
    player.see_failure()
    return player.failure


def when_finished(player: Player, callback: Callable[[], object]) -> None:
    """Calls back when everything queued so far, in every branch, has been played or has failed."""
    if not player.children:
        player.read(nothing).when_done(callback)
        return
    when_all_done([branch.read(nothing) for branch in player.tree()], callback)


def finished(player: Player) -> Variable:
    """A variable that is set when everything queued so far, in every branch, has been played or has failed."""
    variable = Variable()
    when_finished(player, lambda: variable.set(None))
    return variable
