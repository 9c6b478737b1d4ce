"""Rows of a compiled program on a server of this package: `POST /program/rows`, which docs/server.md describes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from sglang_lite import wire
from sglang_lite.lang.backend.http_client import LOST, Retries, Server
from sglang_lite.program.compiled import CompiledProgram
from sglang_lite.protocol import BackendError, Played, ProgramResult, SglError

RowEvent: TypeAlias = Played | ProgramResult | SglError


class _Told(msgspec.Struct):
    """What a server tells of a row: all of its events, as messages."""

    row: int
    events: list[msgspec.Raw]


async def rows_played(
    server: Server,
    compiled: CompiledProgram,
    rows: Mapping[int, Mapping[str, Any]],
    seeds: Mapping[int, int],
    window: int,
    timeout: float | None,
    priority: int = 0,
) -> AsyncGenerator[tuple[int, Sequence[RowEvent]], None]:
    """What rows bring, as `BaseBackend.play_rows` says. Where the connection breaks, the rows that have not ended are
    asked for again; with the same seeds they come to the same.

    Raises:
        SglError: why the request was refused, or lost too often.
    """
    program = json.loads(wire.encode(compiled, form="json"))["data"]
    left, retries = dict(rows), Retries(server)
    while left:
        numbers = list(left)
        body = {
            "version": wire.VERSION, "program": program, "rows": [left[number] for number in numbers],
            "seeds": [seeds[number] for number in numbers], "window": window,
            "limits": None if timeout is None else {"seconds": timeout},
            **({"priority": priority} if priority else {}),
        }  # fmt: skip
        try:
            async with contextlib.aclosing(server.events("/program/rows", body)) as datas:
                async for data in datas:
                    index, events = _row(server, data)
                    if not 0 <= index < len(numbers) or numbers[index] not in left:
                        raise BackendError(f"{index} is no row that was asked for.", hint="Check base_url.")
                    retries.progressed()
                    del left[numbers[index]]
                    yield numbers[index], events
            if left:
                raise BackendError("a stream of rows has no end.", hint="Check what listens at base_url.")
        except LOST as error:
            if left:
                await retries.pause(error)


def _row(server: Server, data: str) -> tuple[int, list[RowEvent]]:
    if data.startswith('{"error"'):  # a gateway's
        server.event(data)
    try:
        told = msgspec.json.decode(data, type=_Told)
    except msgspec.MsgspecError as error:
        raise BackendError(f"{data[:80]!r} is no row: {error}.", hint="Check what listens at base_url.") from None
    events: list[RowEvent] = []
    for raw in told.events:
        event = wire.decode(bytes(raw), form="json")
        if not isinstance(event, Played | ProgramResult | SglError):
            raise BackendError(f"a {type(event).__name__} is no event of a row.")
        events.append(event)
    return told.row, events
