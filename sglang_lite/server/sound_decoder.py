"""Samples of the sounds that requests have written down, within bounds of time and memory for all of them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sglang_lite.media_files import MAX_SECONDS, samples
from sglang_lite.protocol import Media, OverloadedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_THREADS = 2  # an hour takes a while, and other requests need the threads that all share
_MAX_BYTES = 2 << 30  # bytes of the samples of all open requests: nine hours at 16 kHz


class SoundDecoder:
    """Decoder of sounds, on threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "sglang_lite-sounds")
        self._held = 0  # bytes of open requests

    async def samples(self, sound: Media, rate: int) -> NDArray[np.float32]:
        """Samples of a sound, which count until the request that is handled now has ended.

        Args:
            sound: the sound.
            rate: samples in a second.

        Raises:
            ParameterError: as `samples` in media_files.py.
            OverloadedError: those of all open requests would be too large.
        """
        handling = asyncio.current_task()
        assert handling is not None
        found = await asyncio.get_running_loop().run_in_executor(self._threads, samples, sound, rate, MAX_SECONDS)
        size = found.nbytes
        if self._held + size > _MAX_BYTES:
            problem = f"the sounds of open requests would take more than {_MAX_BYTES:,} bytes."
            raise OverloadedError(problem, hint="Try again later, or send shorter ones.")
        self._held += size
        handling.add_done_callback(lambda _: self._release(size))
        return found

    def _release(self, size: int) -> None:
        self._held -= size

    def close(self) -> None:
        """Ends the threads, when they have decoded what they have begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
