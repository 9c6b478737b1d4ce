"""Route for a compiled program and its rows: each row is played as a program and reported when it has ended, as
server-sent events, or in frames for clients of this package.

The window limits the number of rows that are running, or have ended and not been read.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response

from sglang_lite import wire
from sglang_lite.program.compiled import CompiledProgram, Filler
from sglang_lite.program.nodes import Program
from sglang_lite.protocol import ParameterError, SglError
from sglang_lite.runtime.core.submission import ProgramRequest, check_priority
from sglang_lite.server.fields import GATEWAY_NEUTRAL, Fields
from sglang_lite.server.http.sse import DONE, EventStream
from sglang_lite.server.programs.program import ProgramBudget, ProgramLimits, check_version, limits_of, record_of
from sglang_lite.server.reader import Reader
from sglang_lite.server.routes import HttpRequest, Route, read
from sglang_lite.server.service import Service
from sglang_lite.wire.rows import END_FRAME, ROWS_MEDIA_TYPE, Row, RowEvent, encode_frame

MOST_WINDOW: Final = 256  # most rows of a request in the window


class RowsRequest(msgspec.Struct, kw_only=True):
    """Request to play a compiled program for rows of arguments."""

    version: int
    program: dict[str, Any]
    rows: list[dict[str, Any]]
    seeds: list[int | None] | None = None
    window: int = 64
    form: Literal["events", "frames"] = "events"
    limits: ProgramLimits | None = None
    cache_salt: str | None = None
    priority: int | None = None
    model: str | None = None


ROWS: Fields[RowsRequest] = Fields(RowsRequest, GATEWAY_NEUTRAL, {})


def _row_requests(
    body: RowsRequest, filler: Filler, budget: ProgramBudget
) -> Iterator[tuple[int, ProgramRequest | SglError]]:
    """Yields the number of each row, with its request to the engine or the error of this row.

    Args:
        budget: budget of each row.
    """
    compiled = filler.compiled
    differ = bool(compiled.holes) or compiled.decision is not None  # rows with different programs have different costs
    refused = None if differ else _refusal(budget, Program(compiled.nodes))
    for number, given in enumerate(body.rows):
        error = refused
        try:
            row = filler.checked(given, f"/rows/{number}")
            program = filler(row, None if body.seeds is None else body.seeds[number])
            if differ:
                error = _refusal(budget, program)
        except SglError as why:
            error = why
        yield number, error or ProgramRequest("", program, False, body.cache_salt or "", body.priority or 0)


def _refusal(budget: ProgramBudget, program: Program) -> SglError | None:
    """Error of a program that exceeds the budget of a row, or None."""
    try:
        budget.minus_program(program, "/program")
    except SglError as error:
        return error
    return None


async def _frames(ended: AsyncGenerator[Sequence[Row], None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(ended):
        async for each in ended:
            yield encode_frame(each)
    yield END_FRAME


async def _sse_events(ended: AsyncGenerator[Sequence[Row], None]) -> AsyncGenerator[bytes, None]:
    """Yields one server-sent event for each row."""
    async with contextlib.aclosing(ended):
        async for each in ended:
            yield b"".join([_event(*row) for row in each])
    yield DONE


def _event(number: int, events: Sequence[RowEvent]) -> bytes:
    messages = b",".join([wire.encode(event, form="json") for event in events])
    return b'data: {"row":%d,"events":[%b]}\n\n' % (number, messages)


def _read(_: Reader, call: HttpRequest) -> tuple[RowsRequest, CompiledProgram, bytes]:
    """Request without program and rows, its program, and its rows in msgpack: as objects, megabytes of them would take
    long to pass from another process."""
    given = call.object()
    check_version(given, "")
    body = ROWS.read(given, call.unused if call.reports else None)
    compiled = record_of("CompiledProgram", body.program, "/program", call)
    assert isinstance(compiled, CompiledProgram)
    rows = msgspec.msgpack.encode(body.rows)
    body.program, body.rows = {}, []
    return body, compiled, rows


async def play_rows(service: Service, call: HttpRequest) -> Response:
    """Plays a compiled program for rows."""
    body, compiled, rows = await read(service, call, _read)
    body.rows = msgspec.msgpack.decode(rows)
    service.check_model(body.model)
    if compiled.held is not None:
        message = f"Python on the caller's side decides at the nodes {list(compiled.held)}, so rows can't be run here."
        raise ParameterError("/program/held", message, hint="Open a program instead: POST /program.")
    if body.seeds is not None and len(body.seeds) != len(body.rows):
        raise ParameterError("/seeds", f"has {len(body.seeds)} seeds for {len(body.rows)} rows. Give one for each row.")
    check_priority(body.priority or 0, service.engine.config.policy)
    if body.window < 1:
        raise ParameterError("/window", f"{body.window} is not greater than 0.")
    budget, seconds = limits_of(service.reader, body.limits, "")
    window = min(body.window, MOST_WINDOW, max(len(body.rows), 1))
    ended = service.async_engine.play_rows(_row_requests(body, Filler(compiled), budget), window, seconds)
    if body.form == "frames":
        return EventStream(_frames(ended), ended, {"content-type": ROWS_MEDIA_TYPE})
    return EventStream(_sse_events(ended), ended)


ROUTES = (
    Route(
        "/program/rows", play_rows, "Play a compiled program for rows", fields=ROWS, streams=True, counts_as_open=True
    ),
)
