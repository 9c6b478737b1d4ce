"""Streams of a state's texts and of partial typed values, for threads and for event loops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from sglang_lite.kernel import Output
from sglang_lite.lang.concurrency.variables import TextLog, Variable
from sglang_lite.lang.execution.reading import (
    afind_first,
    afind_variable,
    check_may_block,
    checked,
    find_first,
    find_variable,
    nothing,
    whole_text,
)
from sglang_lite.lang.execution.run import current_run
from sglang_lite.lang.results import meta_info, text_of
from sglang_lite.lang.tracebacks import trim, user_location
from sglang_lite.markup import Markup, element
from sglang_lite.protocol import Generation, ProgramError, SglError
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.execution.branch import Branch
    from sglang_lite.lang.expressions import VariableName
    from sglang_lite.lang.state import ProgramState


@dataclass(frozen=True)
class SoFar:
    """Text and variables of a run at a moment.

    Attributes:
        text: text of the state; of a run with stream=True with what a running generation has
            brought.
        variables: variables that have a value, by name.
        ended: True if the body has ended and nothing is left to be executed.
    """

    text: str
    variables: Mapping[str, Any]
    ended: bool


def pieces(state: ProgramState, name: VariableName | None) -> Iterator[str]:
    """Yields the chunks of a state's text, or of a variable's text. Implements `text_iter`.

    Raises:
        ProgramError: the body of the program itself waits for the end of its text.
    """
    branch = state.branch
    _check_may_follow(branch)
    if name is not None:
        yield from _pieces_of_variable(branch, _find_streamed(state, name))
        return
    _refuse_own_end(branch)
    log = _log_so_far(branch)
    if log is None:  # the run isn't streamed
        yield state.text()
        return
    branch.player.failure_reported = True
    yield from _texts(log)
    if state.streamed_body is not None:
        state.streamed_body.wait("text_async_iter")


def _pieces_of_variable(branch: Branch, variable: Variable) -> Iterator[str]:
    if variable.log is None:  # not streamed, set by hand, or joined
        yield _text_in(branch, variable)
        return
    branch.player.failure_reported = True
    yield from _texts(variable.log)


def _texts(log: TextLog) -> Iterator[str]:
    return (text for text, _ in log if text)


def _check_may_follow(branch: Branch) -> None:
    """Raises ProgramError if an event loop would block until a streamed text has grown."""
    log = branch.player.log
    if log is not None and not log.closed:
        check_may_block(branch.run, "text_async_iter", user_location())


def _refuse_own_end(branch: Branch) -> None:
    """Raises ProgramError if the body of a program would wait for the end of its own text."""
    if branch.player.log is not None and branch.run.body_open and current_run.get() is branch.run:
        raise ProgramError(
            "the text ends when the program does, so the program can't wait for it.",
            hint="Name a variable, or use text().",
            where=user_location(),
        )


def _text_in(branch: Branch, variable: Variable) -> str:
    """Text of a variable that has no stream; waits for it."""
    try:
        value = variable.wait()
    except SglError as error:
        branch.player.failure_reported = True
        trim(error)
        raise
    return str(text_of(variable.record, value))


def _find_streamed(state: ProgramState, name: VariableName) -> Variable:
    """Variable of a name whose text is streamed: the first, for the caller of a streamed run who
    has not waited for the end of its body; else the one that the name has now.
    """
    find = find_first if state.follows_body else find_variable
    return find(state.branch.player, name, user_location())


async def _afind_streamed(state: ProgramState, name: VariableName) -> Variable:
    """Finds the variable that `_find_streamed` does, as a coroutine."""
    find = afind_first if state.follows_body else afind_variable
    return await find(state.branch.player, name, user_location())


def _log_so_far(branch: Branch) -> TextLog | None:
    """Log of the text: to its end if the run is streamed, else of what was added until now. None if
    nothing is streamed.
    """
    player = branch.player
    return (
        player.log
        if player.later is None
        else player.later.until(branch.read(nothing, user_location()))
    )


def show(state: ProgramState, page: Callable[[], str]) -> None:
    """Shows the text of a streamed run in a notebook as it comes, and then the HTML that `page`
    makes.
    """
    output = Output()
    with contextlib.suppress(SglError):  # it is in the page
        for text in accumulate(state.text_iter()):
            output.show_if_due(partial(element, "pre", text))
    output.show(Markup(page()))


def so_far(branch: Branch) -> SoFar:
    """Implements `ProgramState.so_far`."""
    player = branch.player
    pieces = None if player.log is None else player.log.so_far()
    text = player.transcript.text() if pieces is None else pieces
    values = [(name, variable.so_far()) for name, variable in list(branch.names.variables.items())]
    found = {name: value for name, had in values for value in had}
    return SoFar(
        text, found, not branch.run.body_open and all(each.at_rest for each in player.tree())
    )


async def read(branch: Branch, variable: Variable) -> UserValue:
    """Awaits the value of a variable for a reader of the state. An error of the variable counts as
    reported.
    """
    try:
        return await variable.get()
    except SglError as error:
        branch.player.failure_reported = True
        trim(error)
        raise


async def apieces(
    state: ProgramState, name: VariableName | None, *, with_meta: bool
) -> AsyncIterator[UserValue]:
    """Async version of `pieces`; with a name and `with_meta`, yields pairs of text and metadata.
    Implements `text_async_iter`.
    """
    branch = state.branch
    # another task of the body may outlive it
    if name is None and branch.run.body in (None, asyncio.current_task()):
        _refuse_own_end(branch)
    with_meta = with_meta and name is not None
    if name is not None:
        variable = await _afind_streamed(state, name)
        async for text, meta in _apieces_of_variable(branch, variable):
            if with_meta:
                yield text, meta
            elif text:
                yield text
        return
    log = _log_so_far(branch)
    if log is None:
        yield await read(branch, branch.read(whole_text, user_location()))
        return
    branch.player.failure_reported = True
    async for text, _ in log:
        if text:
            yield text
    if state.streamed_body is not None:
        await state.streamed_body.get()


async def _apieces_of_variable(
    branch: Branch, variable: Variable
) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
    """Yields the chunks of a variable's text, each with its metadata."""
    if variable.log is None:
        value = await read(branch, variable)
        text = variable.record.text if isinstance(variable.record, Generation) else str(value)
        yield text, meta_info(variable.record) or {}
        return
    branch.player.failure_reported = True
    async for text, meta in variable.log:
        yield text, meta or {}


def values(state: ProgramState, name: VariableName) -> Iterator[UserValue]:
    """Yields the partial values of a typed variable and finally the whole one. Implements
    `partial_iter`.
    """
    _check_may_follow(state.branch)
    variable = _find_streamed(state, name)
    partial = _PartialValue(variable, name)
    for piece in _pieces_of_variable(state.branch, variable):
        if partial.append(piece):
            yield partial.value
    if (value := checked(variable.wait(), name)) != partial.value:
        yield value


async def avalues(state: ProgramState, name: VariableName) -> AsyncIterator[UserValue]:
    """Async version of `values`. Implements `partial_async_iter`."""
    variable = await _afind_streamed(state, name)
    partial = _PartialValue(variable, name)
    async for piece, _ in _apieces_of_variable(state.branch, variable):
        if partial.append(piece):
            yield partial.value
    if (value := checked(await read(state.branch, variable), name)) != partial.value:
        yield value


class _PartialValue:
    """Text of a typed variable so far, and its partial value.

    Attributes:
        value: latest partial value, or None if the text gives none yet.
    """

    def __init__(self, variable: Variable, name: VariableName) -> None:
        from sglang_lite.constraints.python_types.partial import partial_reader

        if variable.kind is None:
            raise ProgramError(
                f"{name!r} has no type, and only gen(type=…) has values to stream.",
                where=user_location(),
            )
        self._read = partial_reader(variable.kind)
        self._text = ""
        self.value = None

    def append(self, piece: str) -> bool:
        """Appends a chunk of text. Returns True if the partial value has changed."""
        self._text += piece
        value = self._read(self._text)
        before = self.value
        self.value = before if value is None else value
        return value is not None and value != before
