"""A stream is closed when its reader has left."""

import asyncio
import contextlib

import pytest

from sglang_lite.protocol import RequestTimeoutError
from sglang_lite.server.async_engine import with_first_event
from sglang_lite.server.http.sse import EventStream


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
        numbers = await with_first_event(source.numbers())
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
