"""Closes resources that belong to an event loop when the loop ends, when their handle is dropped,
or when the process exits.
"""

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
_LAST_S = 1.0  # maximum seconds for closing when the process exits

_open: WeakKeyDictionary[Handle, asyncio.AbstractEventLoop] = WeakKeyDictionary()
# handles inherited from the parent process by a fork; they must not be closed here
_parents: list[Handle] = []


def close_with_loop(close: Callable[[], Awaitable[object]]) -> Handle:
    """Creates a handle for a resource that the running event loop uses. `close` is awaited on that
    loop when the handle's `aclose` is called, when the handle is dropped, or when the loop ends.

    The handle is an asynchronous generator: event loops close those when they end.
    """
    handle = _close_at_end(close)
    with contextlib.suppress(StopIteration):
        handle.__anext__().send(None)
    _open[handle] = asyncio.get_running_loop()
    return handle


async def _close_at_end(close: Callable[[], Awaitable[object]]) -> Handle:
    try:
        yield
    finally:
        await close()


def _close_all() -> None:
    """Closes the executor loop's resources; its thread ends with the process."""
    loop = executor_loop()
    handles = [handle for handle, its in list(_open.items()) if its is loop]
    if loop is not None and handles:
        # the process is exiting, so no caller can handle an error
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_close_handles(handles), loop).result(_LAST_S)


async def _close_handles(handles: list[Handle]) -> None:
    await asyncio.gather(*(handle.aclose() for handle in handles), return_exceptions=True)


def _keep_open_for_parent() -> None:
    """Keeps the handles that were open before a fork, without ever closing them. Their connections
    belong to the parent process.
    """
    _parents.extend(_open)
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_keep_open_for_parent)
