"""Work for a client ends with it, or with who called."""

import asyncio

import pytest

from sglang_lite.server.http.disconnect import run_until_disconnect


class _Work:
    """Work that ends when it is told to, and the client's end of the line."""

    def __init__(self) -> None:
        self.begun, self.told, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.how = ""

    async def run(self) -> None:
        self.begun.set()
        try:
            await self.told.wait()
            self.how = "done"
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as what is cancelled may have to be told to others
            self.how = "cancelled"
            raise

    async def receive(self) -> dict[str, str]:
        await self.left.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize(("event", "how"), [("told", "done"), ("left", "cancelled")])
def test_it_returns_when_the_work_has_ended(event, how):
    async def run() -> str:
        work = _Work()
        task = asyncio.ensure_future(run_until_disconnect(work.run(), work.receive))
        await work.begun.wait()
        getattr(work, event).set()
        await task
        return work.how

    assert asyncio.run(run()) == how


def test_a_caller_that_is_cancelled_ends_the_work_first():
    async def run() -> str:
        work = _Work()
        task = asyncio.ensure_future(run_until_disconnect(work.run(), work.receive))
        await work.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return work.how

    assert asyncio.run(run()) == "cancelled"


def test_an_error_of_the_work_is_the_callers():
    async def fail() -> None:
        raise ValueError("of the work")

    async def run() -> None:
        await run_until_disconnect(fail(), _Work().receive)

    with pytest.raises(ValueError, match="of the work"):
        asyncio.run(run())


def test_an_error_of_the_connection_ends_the_work_and_is_the_callers():
    work = _Work()

    async def receive() -> dict[str, str]:
        await work.begun.wait()
        raise OSError("of the connection")

    with pytest.raises(OSError, match="of the connection"):
        asyncio.run(run_until_disconnect(work.run(), receive))
    assert work.how == "cancelled"
