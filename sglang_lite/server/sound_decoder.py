"""Decoder of sounds to transcribe, within bounds of time and memory for all requests together."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from sglang_lite.media.files import MAX_SECONDS, decode_samples
from sglang_lite.protocol import Media, OverloadedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_THREADS = 2  # decoding an hour of sound takes a while, and other requests need the shared threads
_MAX_BYTES = 2 << 30  # bytes of the samples of all open requests: nine hours at 16 kHz


class SoundDecoder:
    """Decodes sounds on its own threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "sglang_lite-sounds")
        self._held = 0  # bytes of open requests

    async def decode_sound(self, sound: Media, rate: int) -> NDArray[np.float32]:
        """Decodes a sound to samples. The size of the samples counts towards the limit on memory
        until the current request has ended.

        Args:
            sound: the sound.
            rate: samples in a second.

        Raises:
            ParameterError: see `decode_samples` in media/files.py.
            OverloadedError: the samples of all open requests would be too large.
        """
        handling = asyncio.current_task()
        assert handling is not None
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, decode_samples, sound, rate, MAX_SECONDS
        )
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
        """Ends the threads once they have decoded their current sounds."""
        self._threads.shutdown(wait=False, cancel_futures=True)
