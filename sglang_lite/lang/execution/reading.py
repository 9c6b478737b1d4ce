"""Reading of a branch while it is played: its variables by name, and its text and messages at a place in its queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import Variable, when_all_done
from sglang_lite.lang.confidence import confidence_in
from sglang_lite.lang.execution.budget import max_selection_usage
from sglang_lite.lang.execution.player import Player, unknown
from sglang_lite.lang.execution.push_down import PushedProgram
from sglang_lite.lang.execution.run import Run, current_run
from sglang_lite.lang.execution.transcript import Piece
from sglang_lite.lang.results import as_dicts
from sglang_lite.protocol import Generation, Location, ParameterError, ProgramError, Prompt, Selection, SglError
from sglang_lite.protocol.anything import UserValue


def check_name(name: object, where: Location | None) -> None:
    """Raises ParameterError if `name` is not a string, as names of variables must be."""
    if not isinstance(name, str):
        raise ParameterError("name", f"{name!r:.60} is not a string.", where=where)


def find_variable(player: Player, name: str, where: Location | None = None) -> Variable:
    """Returns the variable of a name. If the body is still running and the caller is outside it, waits for the name to
    be declared."""
    check_name(name, where)
    variable = player.names.variables.get(name)
    while variable is None:
        promise = _promise(player, name, where)
        may_block(player.run, f"await s.get({name!r})", where)
        promise.wait()
        variable = player.names.variables.get(name)
    return variable


async def afind_variable(player: Player, name: str, where: Location | None = None) -> Variable:
    """Coroutine form of `find_variable`."""
    check_name(name, where)
    variable = player.names.variables.get(name)
    while variable is None:
        await _promise(player, name, where).get()
        variable = player.names.variables.get(name)
    return variable


def _promise(player: Player, name: str, where: Location | None) -> Variable:
    return player.names.promise(name, Variable(where, player.run.made), partial(_never, player, name, where))


def _never(player: Player, name: str, where: Location | None) -> SglError | None:
    """Error of a name that will never be declared, or None if the running body may still declare it."""
    if player.run.body_open and current_run.get() is not player.run:
        return None
    if name in player.names.scopes:
        return ProgramError(f"the variable scope {name!r} is still open.", where=where)
    return unknown(player, name, where)


def may_block(run: Run, instead: str, where: Location | None) -> None:
    """Checks that the caller may block, before it does.

    Args:
        instead: expression to be suggested in the error.

    Raises:
        ProgramError: the body is a coroutine that needs the event loop of this thread.
    """
    if not (run.is_async and run.body_open):
        return
    with contextlib.suppress(RuntimeError):  # no event loop is running in this thread
        if asyncio.get_running_loop() is run.loop or current_run.get() is run:
            raise ProgramError(
                "reading here would block the event loop of an async program.", hint=f"Use {instead}.", where=where
            )


def confidence_of(run: Run, variable: Variable, name: str, sample: int, where: Location | None) -> Variable:
    """Variable of the confidence in a sample of a variable that is set.

    Raises:
        ParameterError: there is no such sample.
        ProgramError: the variable has no confidence, or the caller may not block.
    """
    may_block(run, "the state, when its run has ended", where)
    answers, question = variable.record, variable.question
    answers = answers if isinstance(answers, list) else [answers]
    if question is None or not all(isinstance(each, Generation) for each in answers):
        raise ProgramError(
            f"{name!r}: there is nothing from which to tell how sure the model was.",
            hint="Use gen(confidence=True), and read its confidence before the state is saved and loaded.",
            where=where,
        )
    if not isinstance(sample, int) or not 0 <= sample < len(answers):
        raise ParameterError("sample", f"{sample!r:.60} is no index of {len(answers)} samples.", where=where)
    try:
        reading = confidence_in(question, answers[sample], partial(_scored, run))
    except ProgramError as error:
        raise ProgramError(f"{name!r}: {error.message}", hint=error.hint, where=where) from None
    found = Variable(where)

    async def settle() -> None:
        try:
            found.set(await reading)
        except BaseException as error:  # told to the reader, who waits
            found.fail(error)

    asyncio.run_coroutine_threadsafe(settle(), executor().loop)
    return found


async def _scored(run: Run, backend: Backend, prompt: Prompt, texts: Sequence[str]) -> Selection:
    """Scores of texts, within the budgets of a run and counted in its usage."""
    with run.within_budget(backend, partial(max_selection_usage, backend, prompt, texts)) as account:
        selection = await backend.aselect(prompt, texts, unconditional=False)
        if account is not None:
            account.used.append(selection.usage)
    run.account.scored(selection.usage)
    return selection


# Functions for `Player.read`.


def nothing(player: Player) -> None:
    """Reads nothing, for callers that only wait."""


def whole_text(player: Player) -> str:
    return player.transcript.text()


def all_messages(player: Player) -> list[dict[str, UserValue]]:
    return as_dicts(player.transcript.messages)


def added(player: Player) -> list[Piece]:
    """Pieces of the transcript that were added since the branch was forked."""
    return player.transcript.added


def error_of(player: Player) -> SglError | None:
    """Waits until everything queued has been played, and returns the branch's failure, or None."""
    with contextlib.suppress(SglError):
        player.read(nothing).wait()
    player.failure_reported = True
    return player.failure


def when_finished(player: Player, callback: Callable[[], object]) -> None:
    """Calls `callback` when everything queued so far, in this branch and the branches forked from it, has been played
    or has failed."""
    if not player.children:
        player.read(nothing).when_done(callback)
        return
    when_all_done([branch.read(nothing) for branch in player.tree()], callback)


def close_when_finished(player: Player, program: PushedProgram) -> None:
    """Closes the program of a branch once nothing of it is left to play."""
    count = program.count

    def close() -> None:
        if not program.close(count):
            close_when_finished(player, program)

    when_finished(player, close)


def finished(player: Player) -> Variable:
    """Variable that is set when everything queued so far, in this branch and the branches forked from it, has been
    played or has failed."""
    variable = Variable()
    when_finished(player, lambda: variable.set(None))
    return variable
