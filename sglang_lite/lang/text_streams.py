"""Streams a state's text, and the partial values of typed variables. Works for threads and for
event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from sglang_lite.lang.concurrency.variables import TextLog, Variable
from sglang_lite.lang.execution.reading import (
    afind_first_declaration,
    afind_variable,
    check_may_block,
    check_value_type,
    find_first_declaration,
    find_variable,
    read_nothing,
    transcript_text,
)
from sglang_lite.lang.execution.run import current_run
from sglang_lite.lang.results import meta_info, text_from_record
from sglang_lite.lang.tracebacks import trim, user_location
from sglang_lite.notebook.markup import Markup, element
from sglang_lite.notebook.output import Output
from sglang_lite.protocol import Generation, ProgramError, SglError
from sglang_lite.protocol.anything import UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.execution.branch import Branch
    from sglang_lite.lang.expressions import VariableName
    from sglang_lite.lang.state import ProgramState
    from sglang_lite.lang.tool_events import ToolEvent


@dataclass(frozen=True)
class SoFar:
    """Text and variables of a run at one moment.

    Attributes:
        text: text of the state. In a run with stream=True, it includes what running generations
            have streamed so far.
        variables: variables that have a value, by name.
        ended: True if the body has ended and nothing is left to execute.
    """

    text: str
    variables: Mapping[str, Any]
    ended: bool


def iter_pieces(state: ProgramState, name: VariableName | None) -> Iterator[str]:
    """Yields the chunks of a state's text, or of a variable's text. Implements `text_iter`.

    Raises:
        ProgramError: the program's own body would wait for the end of its text.
    """
    branch = state.branch
    _check_may_block_on_text(branch)
    if name is None:
        _refuse_waiting_for_self(branch)
        log = _text_log_to_read(branch)
    else:
        variable = _find_streamed_variable(state, name)
        log = variable.log
    if log is None:  # not streamed, set by hand, or joined
        yield state.text() if name is None else _wait_for_text(branch, variable)
        return
    branch.player.failure_reported = True
    for text, _ in log:
        if text:
            yield text
    if name is None and state.streamed_body is not None:
        state.streamed_body.wait_for_end("text_async_iter")


def iter_events(state: ProgramState) -> Iterator[ToolEvent]:
    """Yields the events of a state's run. Implements `events`."""
    run = state.branch.run
    if state.streamed_body is None:
        yield from run.events_so_far()
        return
    check_may_block(run, "async_events", user_location())
    yield from run.follow_events()
    state.streamed_body.wait_for_end("async_events")


async def aiter_events(state: ProgramState) -> AsyncIterator[ToolEvent]:
    """Yields the same as `iter_events`, asynchronously."""
    run = state.branch.run
    if state.streamed_body is None:
        for event in run.events_so_far():
            yield event
        return
    async for event in run.afollow_events():
        yield event
    await state.streamed_body.await_end()


def _pieces_of_variable(branch: Branch, variable: Variable) -> Iterator[str]:
    """Yields the chunks of a variable's text. If the variable has no stream, yields its whole text."""
    if variable.log is None:
        yield _wait_for_text(branch, variable)
        return
    branch.player.failure_reported = True
    for text, _ in variable.log:
        if text:
            yield text


def _check_may_block_on_text(branch: Branch) -> None:
    """Raises ProgramError if following a text that is still growing would block an event loop."""
    log = branch.player.log
    if log is not None and not log.closed:
        check_may_block(branch.run, "text_async_iter", user_location())


def _refuse_waiting_for_self(branch: Branch) -> None:
    """Raises ProgramError if the body of a program waits for the end of the program's own text."""
    if branch.player.log is not None and branch.run.body_open and current_run.get() is branch.run:
        raise ProgramError(
            "the text ends when the program does, so the program can't wait for it.",
            hint="Name a variable, or use text().",
            where=user_location(),
        )


def _wait_for_text(branch: Branch, variable: Variable) -> str:
    """Returns the text of a variable that has no stream, after waiting for its value."""
    try:
        value = variable.wait()
    except SglError as error:
        branch.player.failure_reported = True
        trim(error)
        raise
    return str(text_from_record(variable.record, value))


def _find_streamed_variable(state: ProgramState, name: VariableName) -> Variable:
    """Returns the variable whose text is streamed under a name. This is the first variable of that
    name for the caller of a streamed run who has not yet waited for the end of the body. For all
    others it is the current one.
    """
    find = find_first_declaration if state.has_unawaited_body else find_variable
    return find(state.branch.player, name, user_location())


async def _afind_streamed(state: ProgramState, name: VariableName) -> Variable:
    """Returns the same variable as `_find_streamed_variable`, asynchronously."""
    find = afind_first_declaration if state.has_unawaited_body else afind_variable
    return await find(state.branch.player, name, user_location())


def _text_log_to_read(branch: Branch) -> TextLog | None:
    """Returns the log from which to stream a branch's text, or None if the branch has no log. If
    the branch was extended after its body ended, returns a copy of the log of these additions,
    which ends once everything added so far has been executed.
    """
    player = branch.player
    return (
        player.log
        if player.later is None
        else player.later.copy_until(branch.read_when_played(read_nothing, user_location()))
    )


def show_stream(state: ProgramState, page: Callable[[], str]) -> None:
    """Shows the text of a streamed run in a notebook as it arrives, then replaces it with the HTML
    from `page`.
    """
    output = Output()
    with contextlib.suppress(SglError):  # the page shows it
        for text in accumulate(state.text_iter()):
            output.show_if_due(partial(element, "pre", text))
    output.show_html(Markup(page()))


def so_far(branch: Branch) -> SoFar:
    """Implements `ProgramState.so_far`."""
    player = branch.player
    pieces = None if player.log is None else player.log.text_so_far()
    text = player.transcript.text_so_far() if pieces is None else pieces
    values = [
        (name, variable.value_so_far()) for name, variable in list(branch.names.variables.items())
    ]
    found = {name: value for name, had in values for value in had}
    return SoFar(
        text, found, not branch.run.body_open and all(each.is_idle for each in player.tree())
    )


async def read_variable(branch: Branch, variable: Variable) -> UserValue:
    """Awaits the value of a variable for a reader of the state. If the variable has failed, the
    error counts as reported.
    """
    try:
        return await variable.wait_async()
    except SglError as error:
        branch.player.failure_reported = True
        trim(error)
        raise


async def aiter_pieces(
    state: ProgramState, name: VariableName | None, *, with_meta: bool
) -> AsyncIterator[UserValue]:
    """Yields what `iter_pieces` does, asynchronously. With a name and `with_meta`, yields pairs of
    text and metadata. Implements `text_async_iter`.
    """
    branch = state.branch
    # another task of the body may outlive the body
    if name is None and branch.run.body in (None, asyncio.current_task()):
        _refuse_waiting_for_self(branch)
    with_meta = with_meta and name is not None
    if name is not None:
        variable = await _afind_streamed(state, name)
        async for text, meta in _apieces_of_variable(branch, variable):
            if with_meta:
                yield text, meta
            elif text:
                yield text
        return
    log = _text_log_to_read(branch)
    if log is None:
        yield await read_variable(branch, branch.read_when_played(transcript_text, user_location()))
        return
    branch.player.failure_reported = True
    async for text, _ in log:
        if text:
            yield text
    if state.streamed_body is not None:
        await state.streamed_body.await_end()


async def _apieces_of_variable(
    branch: Branch, variable: Variable
) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
    """Yields the chunks of a variable's text, each with its metadata."""
    if variable.log is None:
        value = await read_variable(branch, variable)
        text = variable.record.text if isinstance(variable.record, Generation) else str(value)
        yield text, meta_info(variable.record) or {}
        return
    branch.player.failure_reported = True
    async for text, meta in variable.log:
        yield text, meta or {}


def iter_partial_values(state: ProgramState, name: VariableName) -> Iterator[UserValue]:
    """Yields the partial values of a typed variable as it is generated, and finally the complete
    value. Implements `partial_iter`.
    """
    _check_may_block_on_text(state.branch)
    variable = _find_streamed_variable(state, name)
    partial = _PartialValue(variable, name)
    for piece in _pieces_of_variable(state.branch, variable):
        if partial.append(piece):
            yield partial.value
    if (value := check_value_type(variable.wait(), name)) != partial.value:
        yield value


async def aiter_partial_values(state: ProgramState, name: VariableName) -> AsyncIterator[UserValue]:
    """Yields what `iter_partial_values` does, asynchronously. Implements `partial_async_iter`."""
    variable = await _afind_streamed(state, name)
    partial = _PartialValue(variable, name)
    async for piece, _ in _apieces_of_variable(state.branch, variable):
        if partial.append(piece):
            yield partial.value
    if (
        value := check_value_type(await read_variable(state.branch, variable), name)
    ) != partial.value:
        yield value


class _PartialValue:
    """Text that a typed variable has so far, and the partial value parsed from it.

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
        """Appends a chunk of text. Returns whether the partial value has changed."""
        self._text += piece
        value = self._read(self._text)
        before = self.value
        self.value = before if value is None else value
        return value is not None and value != before
