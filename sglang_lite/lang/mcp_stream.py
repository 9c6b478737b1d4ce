"""Message stream of the SDK's transports whose messages are inspected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

from sglang_lite.protocol.anything import Foreign

SESSION_HAS_ENDED: Final = "the session has ended"  # end of an error's message


class InspectedStream:
    """Message stream of the SDK that first passes each message to a function."""

    def __init__(self, stream: Foreign, look: Callable[[Foreign], None]) -> None:
        self._stream = stream
        self._look = look

    def __getattr__(self, name: str) -> Foreign:
        return getattr(self._stream, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Foreign:
        message = await self._stream.__anext__()
        self._look(message)
        return message

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Foreign) -> bool | None:
        return bool(await self._stream.__aexit__(*error))
