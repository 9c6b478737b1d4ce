"""Work for a client ends with it, or with who called."""

import asyncio
import contextlib

import pytest

from sglang_lite.protocol import RequestTimeoutError
from sglang_lite.server.async_engine import begun
from sglang_lite.server.http.sse import EventStream, until_disconnected


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
        task = asyncio.ensure_future(until_disconnected(work.run(), work.receive))
        await work.begun.wait()
        getattr(work, event).set()
        await task
        return work.how

    assert asyncio.run(run()) == how


def test_a_caller_that_is_cancelled_ends_the_work_first():
    async def run() -> str:
        work = _Work()
        task = asyncio.ensure_future(until_disconnected(work.run(), work.receive))
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
        await until_disconnected(fail(), _Work().receive)

    with pytest.raises(ValueError, match="of the work"):
        asyncio.run(run())


def test_an_error_of_the_connection_ends_the_work_and_is_the_callers():
    work = _Work()

    async def receive() -> dict[str, str]:
        await work.begun.wait()
        raise OSError("of the connection")

    with pytest.raises(OSError, match="of the connection"):
        asyncio.run(until_disconnected(work.run(), receive))
    assert work.how == "cancelled"


class _Source:
    """What a stream is made of, and whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    async def numbers(self):
        try:
            for number in range(100):
                yield number
        finally:
            self.closed = True


async def parts(numbers):
    async for number in numbers:
        yield b"data: %d\n\n" % number


async def receive():
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("sends", [0, 1, 2])
@pytest.mark.parametrize("error", [OSError("the connection is gone"), asyncio.CancelledError()])
def test_a_reader_who_leaves_ends_what_a_stream_is_made_of(sends, error):
    async def main() -> None:
        source, left = _Source(), sends
        numbers = await begun(source.numbers())
        made = parts(numbers)

        async def send(message) -> None:
            nonlocal left
            if not left:
                raise error
            left -= 1

        with contextlib.suppress(asyncio.CancelledError):
            await EventStream(made, numbers)({"type": "http"}, receive, send)
        assert source.closed  # by name: all are still referred to
        assert await anext(made, None) is None

    asyncio.run(main())


def test_an_error_of_the_parts_is_none_of_the_connection():
    async def send(message) -> None:
        pass

    async def failing():
        yield b"data: 1\n\n"
        raise RequestTimeoutError("a bug")  # which is an OSError

    with pytest.raises(RequestTimeoutError):
        asyncio.run(EventStream(failing())({"type": "http"}, receive, send))
