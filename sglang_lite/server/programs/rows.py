"""A compiled program and its rows in one request: each row is played as a program, and told when it has ended.

No more rows are under way, or played and not read, than a window.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Final

import msgspec
from starlette.responses import Response

from sglang_lite import wire
from sglang_lite.program.compiled import CompiledProgram, Filler
from sglang_lite.protocol import ParameterError, SglError
from sglang_lite.runtime.core.submission import check_priority
from sglang_lite.server.async_engine import ProgramEvent
from sglang_lite.server.fields import GATEWAY_NEUTRAL, Fields
from sglang_lite.server.http.sse import DONE, EventStream
from sglang_lite.server.programs.program import Budget, ProgramLimits, check_version, limits_of, record_of
from sglang_lite.server.routes import Call, Route
from sglang_lite.server.service import Service

MOST_WINDOW: Final = 256  # rows of a request that are under way


class RowsRequest(msgspec.Struct, kw_only=True):
    """A compiled program that is to be played for rows of arguments."""

    version: int
    program: dict[str, Any]
    rows: list[dict[str, Any]]
    seeds: list[int | None] | None = None
    window: int = 64
    limits: ProgramLimits | None = None
    cache_salt: str | None = None
    priority: int | None = None
    model: str | None = None


ROWS: Fields[RowsRequest] = Fields(RowsRequest, GATEWAY_NEUTRAL, {})


class _Rows:
    """Rows that are played.

    Args:
        budget: of each of them.
        seconds: that each may take.
    """

    def __init__(self, service: Service, body: RowsRequest, filler: Filler, budget: Budget, seconds: float) -> None:
        self._service, self._body, self._filler = service, body, filler
        self._budget, self._seconds = budget, seconds
        window = min(body.window, MOST_WINDOW, max(len(body.rows), 1))
        self._left: Iterator[int] = iter(range(len(body.rows)))
        self._told: asyncio.Queue[bytes] = asyncio.Queue(maxsize=window)
        self._window = window

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Events, one a row, as they end."""
        workers = [asyncio.ensure_future(self._work()) for _ in range(self._window)]
        try:
            for _ in self._body.rows:
                parts = [await self._told.get()]
                yield b"".join(parts)
            yield DONE
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self) -> None:
        for index in self._left:
            events = await self._played(index)
            messages = b",".join([wire.encode(event, form="json") for event in events])
            await self._told.put(b'data: {"row":%d,"events":[%b]}\n\n' % (index, messages))

    async def _played(self, index: int) -> list[ProgramEvent]:
        """Events of a row; what is wrong with it is its own."""
        seeds = self._body.seeds
        found: list[ProgramEvent] = []
        try:
            row = self._filler.checked(self._body.rows[index], f"/rows/{index}")
            program = self._filler(row, None if seeds is None else seeds[index])
            self._budget.take_program(program, "/program")
            events = self._service.running.play(
                "", program, namespace=self._body.cache_salt or "", priority=self._body.priority or 0,
                timeout_s=self._seconds, waits=True,
            )  # fmt: skip
            async with contextlib.aclosing(events):
                async for taken in events:
                    found += taken
        except SglError as error:
            found.append(error)
        return found


async def play_rows(service: Service, call: Call) -> Response:
    """Plays a compiled program for rows."""
    given = call.object()
    check_version(given, "")
    body = ROWS.read(given, call.unused if call.reports else None)
    service.check_model(body.model)
    compiled = record_of("CompiledProgram", body.program, "/program", call)
    assert isinstance(compiled, CompiledProgram)
    if compiled.held is not None:
        told = f"the caller's Python decides on node {list(compiled.held)}."
        raise ParameterError("/program/held", told, hint="Open a program instead: POST /program.")
    if body.seeds is not None and len(body.seeds) != len(body.rows):
        raise ParameterError("/seeds", f"{len(body.seeds)} for {len(body.rows)} rows.")
    check_priority(body.priority or 0, service.engine.config.policy)
    if body.window < 1:
        raise ParameterError("/window", f"{body.window} is not above 0.")
    budget, seconds = limits_of(service, body.limits, "")
    return EventStream(_Rows(service, body, Filler(compiled), budget, seconds).events())


ROUTES = (Route("/program/rows", play_rows, "Play a compiled program for rows", fields=ROWS, streams=True, works=True),)
