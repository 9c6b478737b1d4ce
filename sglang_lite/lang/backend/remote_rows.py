"""Rows of a compiled program on a server of this package, by `POST /program/rows` (docs/server.md)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence

from sglang_lite import wire
from sglang_lite.lang.backend.http_client import RETRYABLE_ERRORS, Retries, ServerClient
from sglang_lite.program.compiled import CompiledProgram
from sglang_lite.protocol import BackendError, WireError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.wire.rows import FrameReader, RowEvent


async def play_remote_rows(
    server: ServerClient,
    compiled: CompiledProgram,
    rows: Mapping[int, Mapping[str, UserValue]],
    seeds: Mapping[int, int | None],
    window: int,
    timeout: float | None,
    priority: int = 0,
) -> AsyncGenerator[tuple[int, Sequence[RowEvent]], None]:
    """Yields the results of rows, as `BaseBackend.play_rows` does. If the connection breaks, the rows that have not
    ended are requested again; a row with a seed gives the same result.

    Raises:
        SglError: the request was refused, or its connection was lost too often.
    """
    program = json.loads(wire.encode(compiled, form="json"))["data"]
    remaining, retries = dict(rows), Retries(server)
    while remaining:
        numbers = list(remaining)
        body = {
            "version": wire.VERSION, "program": program, "rows": [remaining[number] for number in numbers],
            "seeds": [seeds[number] for number in numbers], "window": window, "form": "frames",
            "limits": None if timeout is None else {"seconds": timeout},
            **({"priority": priority} if priority else {}),
        }  # fmt: skip
        try:
            async with contextlib.aclosing(_answered(server, body)) as results:
                async for index, events in results:
                    if not 0 <= index < len(numbers) or numbers[index] not in remaining:
                        raise BackendError(f"row {index} was not requested.", hint="Check what listens at base_url.")
                    retries.progressed()
                    del remaining[numbers[index]]
                    yield numbers[index], events
            if remaining:
                raise BackendError("the stream ended before all rows arrived.", hint="Check what listens at base_url.")
        except RETRYABLE_ERRORS as error:
            if remaining:
                await retries.pause(error)


async def _answered(server: ServerClient, body: object) -> AsyncGenerator[tuple[int, Sequence[RowEvent]], None]:
    """Yields the rows of one response."""
    reader = FrameReader()
    async with contextlib.aclosing(server.stream_bytes("/program/rows", body)) as pieces:
        async for piece in pieces:
            try:
                rows = reader.feed(piece)
            except WireError as error:
                raise BackendError(f"{error.message}.", hint="Check what listens at base_url.") from error
            for row in rows:
                yield row
            if reader.ended:
                return
    raise server.broken_off()
