"""Closing what belongs to an event loop when that loop ends, when nobody has it any more, or when the process ends."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary

from sglang_lite.lang.concurrency.loop import executor_loop

Handle: TypeAlias = AsyncGenerator[None, None]
_LAST_S = 1.0  # what closing may take when the process ends

_open: WeakKeyDictionary[Handle, asyncio.AbstractEventLoop] = WeakKeyDictionary()
_parents: list[Handle] = []  # of the process that this one is a forked copy of: what they hold is not this one's


def closed_with_loop(close: Callable[[], Awaitable[object]]) -> Handle:
    """A handle on something that the loop which runs here uses. `close` is awaited there: by `aclose` of the handle,
    when the handle is dropped, or when the loop ends, as loops close the generators that they have begun."""
    handle = _until_closed(close)
    with contextlib.suppress(StopIteration):
        handle.__anext__().send(None)
    _open[handle] = asyncio.get_running_loop()
    return handle


async def _until_closed(close: Callable[[], Awaitable[object]]) -> Handle:
    try:
        yield
    finally:
        await close()


def _close_all() -> None:
    """Closes what the executor loop has, whose thread ends with the process."""
    loop = executor_loop()
    handles = [handle for handle, its in list(_open.items()) if its is loop]
    if loop is not None and handles:
        with contextlib.suppress(Exception):  # nobody is there to hear of it
            asyncio.run_coroutine_threadsafe(_closed(handles), loop).result(_LAST_S)


async def _closed(handles: list[Handle]) -> None:
    await asyncio.gather(*(handle.aclose() for handle in handles), return_exceptions=True)


def _leave_to_the_parent() -> None:
    """Keeps what the process had before it was forked: its connections are the parent's, and are not closed here."""
    _parents.extend(_open)
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_to_the_parent)
