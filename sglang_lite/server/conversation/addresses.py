"""Fetcher of images, videos and sounds that requests give as web addresses. Their bytes replace the
addresses before an engine gets the request.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from sglang_lite.media.fetching import FetchBounds, FetchEnd, fetch_files
from sglang_lite.program.nodes import Fork, ImagePart, Node
from sglang_lite.protocol import Media, OverloadedError, ParameterError, Prompt
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.runtime.media.data_url import unsupported_url_error
from sglang_lite.server.async_engine import key_in_use
from sglang_lite.server.settings import ServerSettings

P = TypeVar("P")  # Prompt, or a prompt that has no images
_MAX_ADDRESSES = 64  # most addresses in a request
_AT_ONCE = 16  # most requests whose images are fetched at the same time
_AT_ONCE_PER_KEY = 4  # most of these that may have the same key, if there are several keys


class ImageFetcher:
    """Fetches the images of requests, on its own threads.

    Args:
        settings: settings of the server, with the domains.
        check: function that raises SglError for a prompt with images that the engine would refuse
            in any case.
    """

    def __init__(self, settings: ServerSettings, check: Callable[[Prompt], object]) -> None:
        self._check = check
        megabytes = settings.media_url_max_file_size_mb
        self._bounds = FetchBounds(settings.allowed_media_domains, int(megabytes * 2**20))
        # bytes of open requests
        self._most = int(settings.media_url_max_total_mb * 2**20)
        self._held = 0
        self._threads = ThreadPoolExecutor(_AT_ONCE, "sglang_lite-fetch")
        most = _AT_ONCE_PER_KEY if len(settings.api_key) > 1 else _AT_ONCE
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(
            partial(asyncio.Semaphore, most)
        )

    async def fetch_prompt_images(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the bytes of its images.

        Raises:
            CapabilityError: an image is at a domain that is not allowed.
            OverloadedError: the files of all open requests would be too large.
            ParameterError: an image can't be fetched, there are too many, or the model reads none.
        """
        return _fill_prompt_images(prompt, await self._fetch_urls([prompt]))

    async def fetch_requests(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """Returns requests with the bytes of their images. Raises like `fetch_prompt_images`."""
        found = await self._fetch_urls([each.prompt for each in requests])
        return [
            replace(each, prompt=_fill_prompt_images(each.prompt, found)) if found else each
            for each in requests
        ]

    async def fetch_branch_images(
        self, branches: Sequence[Sequence[Node]]
    ) -> Sequence[Sequence[Node]]:
        """Returns the nodes of a program's branches with the bytes of their images. Raises like
        `fetch_prompt_images`.
        """
        images = [
            Prompt((), images=(image,)) for nodes in branches for image in _walk_images(nodes)
        ]
        found = await self._fetch_urls(images)  # only the engine knows how many are in one prompt
        return [_fill_images(nodes, found) for nodes in branches] if found else branches

    async def _fetch_urls(self, prompts: Sequence[object]) -> Mapping[str, bytes]:
        asking = [each for each in prompts if isinstance(each, Prompt) and image_addresses(each)]
        urls = list(dict.fromkeys(url for each in asking for url in image_addresses(each)))
        if not urls:
            return {}
        for each in asking:
            self._check(each)
        if len(urls) > _MAX_ADDRESSES:
            raise ParameterError(
                "image",
                f"{len(urls):,} images are at addresses, and {_MAX_ADDRESSES} is the limit.",
                hint="Send the bytes as data URLs.",
            )
        if not self._bounds.domains:
            raise unsupported_url_error(urls[0], "image")
        end = FetchEnd(self._bounds.seconds)
        turn = self._turns[key_in_use.get()]
        await turn.acquire()
        fetching = asyncio.get_running_loop().run_in_executor(
            self._threads, fetch_files, urls, self._bounds, "image", end
        )
        fetching.add_done_callback(partial(_release_turn, turn))
        try:
            found = await asyncio.shield(fetching)
        except asyncio.CancelledError:  # the client has left
            end.stop()
            raise
        self._reserve_fetched_bytes(sum(map(len, found.values())))
        return found

    def _reserve_fetched_bytes(self, size: int) -> None:
        """Counts the size of fetched files towards the limit until the current request has ended.
        Raises OverloadedError if the total is too large.
        """
        if self._held + size > self._most:
            raise OverloadedError(
                f"the files of open requests would take more than {self._most:,} bytes.",
                hint="Try again later, or raise media_url_max_total_mb.",
            )
        handling = asyncio.current_task()
        assert handling is not None
        self._held += size
        handling.add_done_callback(lambda _: self._release(size))

    def _release(self, size: int) -> None:
        self._held -= size

    def close(self) -> None:
        """Ends the threads once they have finished their current fetches."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _release_turn(turn: asyncio.Semaphore, fetching: asyncio.Future[Any]) -> None:
    turn.release()
    if not fetching.cancelled():
        fetching.exception()  # marks the error as retrieved, since nobody may be waiting any more


def image_addresses(prompt: object) -> list[str]:
    """Returns the addresses of a prompt's images."""
    return (
        [each.address for each in prompt.images if each.address]
        if isinstance(prompt, Prompt)
        else []
    )


def _fill_prompt_images(prompt: P, found: Mapping[str, bytes]) -> P:
    if not found or not isinstance(prompt, Prompt):
        return prompt
    filled: Any = msgspec.structs.replace(
        prompt, images=tuple(_insert_fetched_bytes(each, found) for each in prompt.images)
    )
    return filled  # type: ignore[no-any-return] # a Prompt, as P is here


def _walk_images(nodes: Sequence[Node]) -> Iterator[Media]:
    for node in nodes:
        if isinstance(node, ImagePart):
            yield node.image
        elif isinstance(node, Fork):
            for branch in node.branches:
                yield from _walk_images(branch)


def _insert_fetched_bytes(image: Media, found: Mapping[str, bytes]) -> Media:
    if image.url not in found:
        return image
    filled: Media = msgspec.structs.replace(image, data=found[image.url], url="")
    return filled


def _fill_images(nodes: Sequence[Node], found: Mapping[str, bytes]) -> Sequence[Node]:
    filled: list[Node] = []
    for node in nodes:
        if isinstance(node, ImagePart):
            node = msgspec.structs.replace(node, image=_insert_fetched_bytes(node.image, found))
        elif isinstance(node, Fork):
            node = msgspec.structs.replace(
                node, branches=tuple(tuple(_fill_images(each, found)) for each in node.branches)
            )
        filled.append(node)
    return filled
