"""A stream is closed when its reader has left, and no reader can cut an event."""

import asyncio
import contextlib
import json

import httpx2
import pytest

from sglang_lite.protocol import RequestTimeoutError
from sglang_lite.server.async_engine import wait_for_first_event
from sglang_lite.server.http.sse import EventStream
from tests.server.conftest import serving
from tests.server.scripted import Scripted


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
        made = []

        def write(numbers):
            made.append(parts(numbers))
            return made[0]

        async def send(message) -> None:
            nonlocal left
            if not left:
                raise error
            left -= 1

        with contextlib.suppress(asyncio.CancelledError):
            await EventStream(await wait_for_first_event(source.numbers()), write, "native")(
                {"type": "http"}, receive, send
            )
        assert source.closed
        assert await anext(made[0], None) is None  # it is still referred to

    asyncio.run(main())


def test_an_error_of_the_events_is_none_of_the_connection():
    sent = []

    async def send(message) -> None:
        sent.append(message)

    async def failing():
        yield b"data: 1\n\n"
        raise RequestTimeoutError("late")  # which is an OSError

    asyncio.run(
        EventStream(failing(), lambda parts: parts, "native")({"type": "http"}, receive, send)
    )
    _, first, error, end = sent
    assert first["body"] == b"data: 1\n\n"
    assert b"late" in error["body"]
    assert not end["more_body"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_an_event_is_one_line_for_a_client_that_splits_lines_as_unicode_does(engine, path, body):
    said = "one\x85two\u2028three\u2029four"
    with serving(Scripted(engine, [said])) as url:
        response = httpx2.post(
            f"{url}{path}", json={"model": "", "stream": True, **body}, timeout=60
        )
    lines = [line for line in response.text.splitlines() if line and not line.startswith("event: ")]
    assert len(lines) > 2
    assert all(line.startswith("data: ") for line in lines)
    events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    assert said in repr(events).encode().decode("unicode_escape")
