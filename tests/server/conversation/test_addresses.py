"""Images at addresses are fetched for a few requests at a time, and no client holds up those of
others.
"""

import asyncio
import threading

import pytest

from sglang_lite.protocol import Media, ParameterError, Prompt, Span
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import key_in_use
from sglang_lite.server.conversation.addresses import ImageFetcher
from sglang_lite.server.settings import ServerSettings
from tests.web import sends, web

HOSTS = {"a.example": "93.184.215.14"}


def asking(path: str) -> Prompt:
    return Prompt((Span("<image>", special=True),), images=(Media(url=f"http://a.example{path}"),))


class Slow:
    """Page that does not answer until the other side cuts the connection."""

    def __init__(self) -> None:
        self.cut = threading.Semaphore(0)

    def __call__(self, handler) -> None:
        handler.connection.recv(1)
        self.cut.release()


async def fetched(images: ImageFetcher, key: str, path: str) -> bytes:
    key_in_use.set(key)
    return (await images.fetch_prompt_images(asking(path))).images[0].data


@pytest.fixture
def images():
    found = ImageFetcher(
        ServerSettings(allowed_media_domains=("*",), api_key=("one", "two")), lambda _: None
    )
    yield found
    found.close()


def test_slow_addresses_of_one_key_do_not_hold_up_another(images):
    async def run() -> bytes:
        waiting = [asyncio.create_task(fetched(images, "one", "/slow")) for _ in range(40)]
        async with asyncio.timeout(20):
            found = await asyncio.create_task(fetched(images, "two", "/file"))
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return found

    with web(HOSTS, {"/slow": Slow(), "/file": sends(b"content")}) as asked:
        assert asyncio.run(run()) == b"content"
    assert asked.count("/slow") <= 4


def test_a_client_that_leaves_ends_its_fetch(images):
    slow = Slow()

    async def run(asked: list[str]) -> bytes:
        waiting = [asyncio.create_task(fetched(images, "one", "/slow")) for _ in range(40)]
        async with asyncio.timeout(20):
            while len(asked) < 4:
                await asyncio.sleep(0)
            for each in waiting:
                each.cancel()
            return await asyncio.create_task(fetched(images, "one", "/file"))

    with web(HOSTS, {"/slow": slow, "/file": sends(b"content")}) as asked:
        assert asyncio.run(run(asked)) == b"content"
        for _ in range(4):
            assert slow.cut.acquire(timeout=20)
    assert asked == ["/slow"] * 4 + ["/file"]


def test_a_request_that_will_be_refused_fetches_nothing(images):
    many = [asking(f"/{i}") for i in range(65)]
    with (
        web(HOSTS, {}) as asked,
        pytest.raises(ParameterError, match="65 images are at addresses, and 64 is the limit"),
    ):
        asyncio.run(images.fetch_requests([GenerateRequest(each) for each in many]))
    assert asked == []
