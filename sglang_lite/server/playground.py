"""Page at `/` for trying out the served model. A user adds turns with texts, generations and
choices, but no code. Only for this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Literal

import msgspec
from starlette.responses import HTMLResponse, Response

from sglang_lite.page.constraint_report import ConstraintText, parse_constraint, report_constraint
from sglang_lite.page.data import run_data
from sglang_lite.page.render import render_page
from sglang_lite.program.nodes import Gen, Node, Program, Select, Text, TurnBegin, TurnEnd
from sglang_lite.protocol import (
    Generation,
    ParameterError,
    Played,
    SamplingParams,
    Selection,
    SglError,
    TraceHead,
    TraceNode,
)
from sglang_lite.runtime.core.submission import ProgramRequest
from sglang_lite.server.async_engine import ProgramEvent
from sglang_lite.server.endpoint import HttpRequest, Route, json_response
from sglang_lite.server.fields import Fields
from sglang_lite.server.programs.program import parse_program_limits
from sglang_lite.server.service import Service

_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",  # the address has the token
}


class PlaygroundTurn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Turn to run. With the role "", its text belongs to no turn. For a "select", `text` has the
    choices, one per line. If `answer` is given, it replaces the model's answer.
    """

    role: Literal["", "system", "user", "assistant"]
    kind: Literal["text", "gen", "select"] = "text"
    text: str = ""
    name: str | None = None
    max_tokens: int = 64
    temperature: float = 0.0
    constraint: ConstraintText | None = None
    answer: str | None = None


class PlaygroundRun(msgspec.Struct, kw_only=True):
    """Turns to run, and the seed for sampling."""

    turns: list[PlaygroundTurn]
    seed: int | None = None


_RUN: Fields[PlaygroundRun] = Fields(PlaygroundRun, {}, {})
_CHECK: Fields[ConstraintText] = Fields(ConstraintText, {}, {})


async def _show_page(service: Service, _: HttpRequest) -> Response:
    return HTMLResponse(
        render_page(f"Playground of {service.model_name}", [], "turns"), headers=_HEADERS
    )


async def _check_constraint(_: Service, call: HttpRequest) -> Response:
    return json_response(await asyncio.to_thread(report_constraint, call.read_fields(_CHECK)))


async def _run(service: Service, call: HttpRequest) -> Response:
    asked = call.read_fields(_RUN)
    pairs = [pair for i in range(len(asked.turns)) for pair in _build_turn_nodes(service, asked, i)]
    nodes = tuple(node for node, _ in pairs)
    budget, limit_s = parse_program_limits(service.reader, None, "")
    budget.remaining_after(nodes, "/turns")
    began = time.perf_counter()
    events: list[ProgramEvent] = []
    request = ProgramRequest("", Program(nodes), False, "", 0)
    async with contextlib.aclosing(service.async_engine.play(request, limit_s)) as playing:
        async for batch in playing:
            events += batch
    shown = _build_trace([node for _, node in pairs], events)
    head = TraceHead(
        len(shown), max((node.end for node in shown), default=0.0), "server", service.model_name
    )
    failed = events[-1] if isinstance(events[-1], SglError) else None
    return json_response(
        {
            "seconds": time.perf_counter() - began,
            "data": run_data(head, shown) | {"title": "turns"},
            "error": None if failed is None else {"text": str(failed)},
        }
    )


def _build_turn_nodes(
    service: Service, asked: PlaygroundRun, place: int
) -> list[tuple[Node, TraceNode]]:
    """Returns the program's nodes for a turn, each paired with its entry in the trace."""
    turn = asked.turns[place]
    where = ("turn", place + 1, turn.role or "no role")
    found = [_build_content_node(turn, asked.seed, where, f"/turns/{place}")]
    if not turn.role:
        return found
    template = service.engine.chat_template()
    if template is None:
        raise ParameterError(
            f"/turns/{place}/role", "the model has no chat template.", hint="Choose no role."
        )
    before = [
        {"role": each.role, "content": each.answer or each.text}
        for each in asked.turns[:place]
        if each.role
    ]
    prefix, suffix = template.get_prefix_and_suffix(turn.role, before)
    return [
        _text(prefix, where),
        (TurnBegin(turn.role), TraceNode("turn_begin", name=turn.role, where=where)),
        *found,
        (TurnEnd(turn.role), TraceNode("turn_end", name=turn.role, where=where)),
        _text(suffix, where),
    ]


def _text(
    text: str, where: tuple[str, int, str], *, special: bool = True
) -> tuple[Node, TraceNode]:
    return Text(text, special=special), TraceNode("text", text=text, where=where)


def _build_content_node(
    turn: PlaygroundTurn, seed: int | None, where: tuple[str, int, str], pointer: str
) -> tuple[Node, TraceNode]:
    if turn.kind == "text":
        return _text(turn.text, where, special=not turn.role)
    entry = TraceNode(turn.kind, name=turn.name, where=where)
    if turn.answer is not None:
        given = msgspec.structs.replace(entry, text=turn.answer, results=(Generation(turn.answer),))
        return Text(turn.answer, special=False), given
    if turn.kind == "select":
        return Select(turn.name, tuple(filter(None, turn.text.split("\n")))), entry
    settings: dict[str, Any] = {} if seed is None else {"seed": seed}
    try:
        params = SamplingParams(
            max_tokens=turn.max_tokens,
            temperature=turn.temperature,
            return_logprob=True,
            top_logprobs_num=5,
            return_text_in_logprobs=True,
            **settings,
        )
    except ParameterError as error:
        raise ParameterError(
            f"{pointer}/{error.parameter}", error.message, hint=error.hint
        ) from None
    return Gen(
        turn.name, params, None if turn.constraint is None else parse_constraint(turn.constraint)
    ), entry


def _build_trace(entries: list[TraceNode], events: list[ProgramEvent]) -> list[TraceNode]:
    """Returns the trace of a program that has run. It has the entries up to the last one that was
    executed, with their results.
    """
    happened = {each.path[-1]: each.event for each in events if isinstance(each, Played)}
    found = list[TraceNode]()
    now = 0.0
    for place, entry in enumerate(entries):
        result = happened.get(place)
        changes = dict[str, Any]()
        if isinstance(result, SglError):
            changes["error"] = str(result)
        elif entry.kind in ("gen", "select") and not entry.results:
            if not isinstance(result, Generation | Selection):
                break
            text = result.text if isinstance(result, Generation) else result.picked or ""
            changes |= {"text": text, "results": (result,), "end": now + result.usage.total_s}
        found.append(
            msgspec.structs.replace(entry, **{"place": place, "start": now, "end": now, **changes})
        )
        now = found[-1].end
    return found


ROUTES = (
    Route(
        "/",
        _show_page,
        "A page that plays turns",
        ("GET",),
        query=("token",),
        media_type="text/html",
        access="page",
    ),
    Route(
        "/playground/run",
        _run,
        "What the page plays",
        fields=_RUN,
        access="page",
        counts_as_open=True,
    ),
    Route(
        "/playground/check",
        _check_constraint,
        "A report on a constraint",
        fields=_CHECK,
        access="page",
    ),
)
