"""Streams of a state's texts and of partial typed values, for threads and for event loops."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from sglang_lite.lang.concurrency.variables import TextLog, Variable
from sglang_lite.lang.execution.reading import afind_variable, find_variable, may_block, nothing, whole_text
from sglang_lite.lang.execution.run import current_run
from sglang_lite.lang.results import meta_info
from sglang_lite.lang.tracebacks import trim, user_location
from sglang_lite.protocol import Generation, ProgramError, SglError
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.execution.branch import Branch
    from sglang_lite.lang.expressions import VariableName
    from sglang_lite.lang.state import ProgramState


def pieces(state: ProgramState, name: VariableName | None) -> Iterator[str]:
    """Yields the chunks of a state's text, or of a variable's text. Implements `text_iter`.

    Raises:
        ProgramError: the body of the program itself waits for the end of its text.
    """
    branch = state.branch
    log = branch.player.log
    if log is not None:
        if not log.closed:
            may_block(branch.run, "text_async_iter", user_location())
        if name is None and branch.run.body_open and current_run.get() is branch.run:
            raise ProgramError(
                "the text ends when the program does, so the program can't wait for it.",
                hint="Name a variable, or use text().",
                where=user_location(),
            )  # fmt: skip
    log = _log_so_far(branch) if name is None else find_variable(branch.player, name, user_location()).log
    if log is None:  # not streamed, set by hand, or joined
        yield state.text() if name is None else str(state.raw(name))
        return
    branch.player.failure_reported = True
    for text, _ in log:
        if text:
            yield text


def _log_so_far(branch: Branch) -> TextLog | None:
    """Log of the text: to its end if the run is streamed, else of what was added until now. None if nothing is
    streamed."""
    player = branch.player
    return player.log if player.later is None else player.later.until(branch.read(nothing, user_location()))


def follow(state: ProgramState) -> None:
    """Waits for the end of the text of a run with stream=True."""
    branch = state.branch
    assert branch.player.log is not None
    if not branch.player.log.closed:
        may_block(branch.run, "text_async_iter", user_location())
    with contextlib.suppress(SglError):
        for _ in branch.player.log:
            pass


async def read(branch: Branch, variable: Variable) -> UserValue:
    """Awaits the value of a variable for a reader of the state. An error of the variable counts as reported."""
    try:
        return await variable.get()
    except SglError as error:
        branch.player.failure_reported = True
        trim(error)
        raise


async def apieces(state: ProgramState, name: VariableName | None, *, with_meta: bool) -> AsyncIterator[UserValue]:
    """Async version of `pieces`; with a name and `with_meta`, yields pairs of text and metadata. Implements
    `text_async_iter`."""
    branch = state.branch
    with_meta = with_meta and name is not None
    log = _log_so_far(branch) if name is None else None
    if name is not None:
        variable = await afind_variable(branch.player, name, user_location())
        log = variable.log
        if log is None:
            value = await read(branch, variable)
            text = variable.record.text if isinstance(variable.record, Generation) else str(value)
            yield (text, meta_info(variable.record) or {}) if with_meta else text
            return
    if log is None:
        yield await read(branch, branch.read(whole_text, user_location()))
        return
    branch.player.failure_reported = True
    async for text, meta in log:
        if with_meta:
            yield text, meta or {}
        elif text:
            yield text


def values(state: ProgramState, name: VariableName) -> Iterator[UserValue]:
    """Yields the partial values of a typed variable and finally the whole one. Implements `partial_iter`."""
    partial = _PartialValue(state, name)
    for piece in state.text_iter(name):
        if partial.append(piece):
            yield partial.value
    if (value := state[name]) != partial.value:
        yield value


async def avalues(state: ProgramState, name: VariableName) -> AsyncIterator[UserValue]:
    """Async version of `values`. Implements `partial_async_iter`."""
    await afind_variable(state.branch.player, name, user_location())
    partial = _PartialValue(state, name)
    async for piece in state.text_async_iter(name):
        if partial.append(piece):
            yield partial.value
    if (value := await state.get(name)) != partial.value:
        yield value


class _PartialValue:
    """Text of a typed variable so far, and its partial value.

    Attributes:
        value: latest partial value, or None if the text gives none yet.
    """

    def __init__(self, state: ProgramState, name: VariableName) -> None:
        from sglang_lite.constraints.python_types.partial import partial_reader

        kind = find_variable(state.branch.player, name, user_location()).kind
        if kind is None:
            raise ProgramError(
                f"{name!r} has no type, and only gen(type=…) has values to stream.", where=user_location()
            )
        self._read, self._text, self.value = partial_reader(kind), "", None

    def append(self, piece: str) -> bool:
        """Appends a chunk of text. Returns True if the partial value has changed."""
        self._text += piece
        value, before = self._read(self._text), self.value
        self.value = before if value is None else value
        return value is not None and value != before
