"""Cancels work when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Message, Receive


async def run_until_disconnect(work: Coroutine[object, object, None], receive: Receive) -> None:
    """Runs the work for a client, and cancels it when the client disconnects.

    Raises:
        Exception: the work failed; or `receive` failed, so the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    gone.add_done_callback(lambda _: task.cancel())
    try:
        await task
    except asyncio.CancelledError:
        if not gone.done():  # the caller itself was cancelled
            raise
        gone.result()
    finally:
        gone.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
