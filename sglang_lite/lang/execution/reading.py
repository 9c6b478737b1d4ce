"""Reads a branch while it is being executed: its variables by name, and its text and messages at a
point in its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sglang_lite.constraints.python_types.value_type import has_type
from sglang_lite.lang.backend.base import Backend, set_selection_adapter
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.lang.concurrency.variables import Variable, when_all_done
from sglang_lite.lang.confidence import measure_confidence
from sglang_lite.lang.execution.budget import max_selection_usage
from sglang_lite.lang.execution.player import Player, unknown_variable_error
from sglang_lite.lang.execution.push_down import PushedProgram
from sglang_lite.lang.execution.run import Run, current_run
from sglang_lite.lang.execution.transcript import FinishedText, Piece
from sglang_lite.lang.execution.waits import Everything, Place
from sglang_lite.lang.expressions import SglGen, SglSelect, VariableName
from sglang_lite.lang.results import messages_to_dicts
from sglang_lite.lang.tools import ToolCall
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.program.nodes import Expression, Text
from sglang_lite.protocol import (
    Generation,
    Location,
    ParameterError,
    ProgramError,
    Prompt,
    Selection,
    SglError,
    Unset,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.parameter import Deferred


def check_name(name: object, where: Location | None) -> None:
    """Raises ParameterError if `name` is not a string, as names of variables must be."""
    if not isinstance(name, str):
        raise ParameterError("name", f"{name!r:.60} is not a string.", where=where)


def check_assignment(name: object, value: object, where: Location | None) -> None:
    """Raises ParameterError if a variable can't have the name, or if the value is an expression,
    which would never be executed. Symbols of a trace are accepted as values.
    """
    check_name(name, where)
    if isinstance(value, Expression) and not all(
        isinstance(part, Deferred | Text) for part in value.walk()
    ):
        raise ParameterError(
            f"{name}",
            f"{value!r:.60} can't be stored as a value: it would never be played.",
            hint="Add it: s += sgl.gen(…). Then s[name] is its value.",
            where=where,
        )


def variable_name_of(variable: VariableName, where: Location | None) -> str:
    """Returns the name of a variable. `variable` is the name itself, or the generation or selection
    that was added under this name.

    Raises:
        ParameterError: `variable` is neither, or has no name.
    """
    name = variable.name if isinstance(variable, SglGen | SglSelect) else variable
    check_name(name, where)
    assert isinstance(name, str)
    return name


def find_variable(
    player: Player, variable: VariableName, where: Location | None = None
) -> Variable:
    """Returns the variable declared under a name. If the body is still running and the caller is
    outside it, waits until the name is declared.
    """
    name = variable_name_of(variable, where)
    while (found := player.names.variables.get(name)) is None:
        promise = _promise_named_variable(player, name, where)
        check_may_block(player.run, f"await s.get({name!r})", where)
        promise.wait()
    return found


def find_first_declaration(
    player: Player, variable: VariableName, where: Location | None = None
) -> Variable:
    """Returns the first variable declared under a name, even if the name was declared again later.
    Waits like `find_variable`.
    """
    found = find_variable(player, variable, where)
    return player.names.first_variable(variable_name_of(variable, where)) or found


async def afind_first_declaration(
    player: Player, variable: VariableName, where: Location | None = None
) -> Variable:
    """Returns the same as `find_first_declaration`, as a coroutine."""
    found = await afind_variable(player, variable, where)
    return player.names.first_variable(variable_name_of(variable, where)) or found


async def afind_variable(
    player: Player, variable: VariableName, where: Location | None = None
) -> Variable:
    """Returns the same as `find_variable`, as a coroutine."""
    name = variable_name_of(variable, where)
    while (found := player.names.variables.get(name)) is None:
        await _promise_named_variable(player, name, where).wait_async()
    return found


def check_value_type(value: UserValue, variable: VariableName, kind: object = None) -> UserValue:
    """Returns the value of a variable after checking that it has the type that its reader expects.

    Args:
        variable: as for `variable_name_of`. It determines the type, unless `kind` is given.

    Raises:
        ProgramError: the value has another type, because another node set the variable, a join
            gathered it, or it has several samples.
    """
    if isinstance(value, Deferred) or (kind is None and isinstance(variable, str)):
        return value
    if kind is None and not isinstance(variable, str):
        kind = _expected_type(variable)
    if not has_type(value, kind):
        shown = getattr(kind, "__name__", None) if isinstance(kind, type) else repr(kind)
        raise ProgramError(
            f"{variable_name_of(variable, None)!r} is {value!r:.60}, which is no {shown}.",
            hint="Read it by its name, s[name]: it may have been set by another node, joined, or have several samples.",
            where=user_location(),
        )
    return value


def _expected_type(node: SglGen | SglSelect) -> object:
    """Returns the type of the values of a generation or selection."""
    kind: Any = str
    if isinstance(node, SglSelect):
        return list[kind] if node.multi else kind
    if node.tools is not None:
        kind = list[ToolCall] | str if node.tools.parallel else ToolCall | str
    elif node.value_type is not None and node.value_type.annotation is not None:
        kind = node.value_type.annotation
    samples = node.node.params.n
    return list[kind] if not isinstance(samples, Unset) and samples > 1 else kind


def _promise_named_variable(player: Player, name: str, where: Location | None) -> Variable:
    return player.names.promise(
        name, Variable(where, player.run.made), partial(_undeclared_name_error, player, name, where)
    )


def _undeclared_name_error(player: Player, name: str, where: Location | None) -> SglError | None:
    """Returns the error for a name that will never be declared. Returns None if the running body
    may still declare it.
    """
    if player.run.body_open and current_run.get() is not player.run and player.stopped is None:
        return None
    if name in player.names.scopes:
        return ProgramError(f"the variable scope {name!r} is still open.", where=where)
    return unknown_variable_error(player, name, where)


def check_may_block(run: Run, instead: str, where: Location | None) -> None:
    """Checks that the caller may block.

    Args:
        instead: expression to suggest in the error.

    Raises:
        ProgramError: the body is a coroutine that needs the event loop of this thread.
    """
    if not (run.is_async and run.body_open):
        return
    with contextlib.suppress(RuntimeError):  # no event loop is running in this thread
        if asyncio.get_running_loop() is run.loop or current_run.get() is run:
            raise ProgramError(
                "reading here would block the event loop of an async program.",
                hint=f"Use {instead}.",
                where=where,
            )


def read_confidence(
    run: Run, variable: Variable, name: VariableName, sample: int, where: Location | None
) -> Variable:
    """Returns a variable that receives the model's confidence in one sample of a generation.

    Raises:
        ParameterError: there is no such sample.
        ProgramError: the variable has no confidence, or the caller may not block.
    """
    check_may_block(run, "the state, when its run has ended", where)
    answers = variable.record
    question = variable.question
    answers = answers if isinstance(answers, list) else [answers]
    if question is None or not all(isinstance(each, Generation) for each in answers):
        raise ProgramError(
            f"{name!r}: there is no record from which to compute its confidence.",
            hint="Use gen(confidence=True), and read its confidence before the state is saved and loaded.",
            where=where,
        )
    if not isinstance(sample, int) or not 0 <= sample < len(answers):
        raise ParameterError(
            "sample", f"{sample!r:.60} is no index of {len(answers)} samples.", where=where
        )
    try:
        reading = measure_confidence(
            question, answers[sample], partial(_score_texts, run, question.adapter)
        )
    except ProgramError as error:
        raise ProgramError(f"{name!r}: {error.message}", hint=error.hint, where=where) from None
    found = Variable(where)

    async def settle() -> None:
        try:
            found.set(await reading)
        except BaseException as error:  # raised to the waiting reader
            found.set_error(error)

    asyncio.run_coroutine_threadsafe(settle(), executor().loop)
    return found


async def _score_texts(
    run: Run,
    adapter: tuple[str, ...] | Unset,
    backend: Backend,
    prompt: Prompt,
    texts: Sequence[str],
) -> Selection:
    """Computes the scores of texts with an adapter, within the run's budgets. Adds the usage to the
    run's.
    """
    set_selection_adapter(adapter)
    with run.reserve_in_budgets(
        backend, partial(max_selection_usage, backend, prompt, texts)
    ) as account:
        selection = await backend.aselect(prompt, texts, unconditional=False)
        if account is not None:
            account.used.append(selection.usage)
    run.account.record_scoring(selection.usage)
    return selection


# Functions for `Player.read_when_played`.


def read_nothing(player: Player) -> None:
    """Does nothing. Used as the read of callers that only want to wait."""


def transcript_text(player: Player) -> str:
    return player.transcript.collect_text()


def all_messages(player: Player) -> list[dict[str, UserValue]]:
    return messages_to_dicts(player.transcript.messages)


def pieces_since_fork(player: Player) -> list[Piece]:
    """Returns the pieces of the transcript added since the branch was forked."""
    return player.transcript.added


def read_finished_text(player: Player) -> FinishedText:
    """Returns a copy of the text between turns, without the suffixes of its turns."""
    transcript = player.transcript
    return FinishedText(
        tuple(transcript.pieces), tuple(transcript.messages), tuple(transcript.turn_ends), ()
    )


def wait_for_error(player: Player) -> SglError | None:
    """Waits until everything queued has been executed. Returns the branch's failure, or None if it
    has not failed.
    """
    with contextlib.suppress(SglError):
        player.read_when_played(read_nothing).wait()
    player.failure_reported = True
    return player.failure


def call_when_done(player: Player, callback: Callable[[], object]) -> None:
    """Calls `callback` once everything queued so far has been executed or has failed, in this
    branch and in those forked from it.
    """
    if not player.children:
        player.read_when_played(read_nothing).when_done(callback)
        return
    when_all_done([branch.read_when_played(read_nothing) for branch in player.tree()], callback)


def close_when_done(player: Player, program: PushedProgram) -> None:
    """Closes the pushed-down program of a branch once all operations of the branch have been
    executed.
    """
    count = program.count

    def close() -> None:
        if not program.close(count):
            close_when_done(player, program)

    call_when_done(player, close)


def record_wait_for_all(player: Player) -> None:
    """Records that the caller has waited for everything in this branch and the branches forked from
    it.
    """
    for each in player.tree():
        each.waits.note(each.waits.last)


def completion_variable(player: Player) -> Variable:
    """Returns a variable that is set once everything queued so far has been executed or has failed,
    in this branch and in those forked from it.
    """
    variable = Variable()
    variable.awaited = Everything([Place(each.waits, each.waits.last) for each in player.tree()])
    call_when_done(player, lambda: variable.set(None))
    return variable
