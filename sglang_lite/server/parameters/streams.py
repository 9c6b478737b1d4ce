"""Options of streams, which several protocols share."""

from __future__ import annotations

from typing import Protocol

from sglang_lite.protocol import ParameterError


class Streamed(Protocol):
    """Request whose answer may be a stream."""

    @property
    def stream(self) -> bool | None: ...

    @property
    def stream_options(self) -> object: ...


def check_options(body: Streamed) -> None:
    """Raises ParameterError if a request has options of a stream, but its answer is none."""
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options", "needs stream: true.", hint="Leave it out, or set stream.")
