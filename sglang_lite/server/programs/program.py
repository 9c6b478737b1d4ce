"""Routes for programs. A complete program is a single request; an open one is extended by further
requests until it ends. Programs are data: the server runs no code of the client.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.responses import Response

from sglang_lite import wire
from sglang_lite.engine.core import OpenProgram
from sglang_lite.process.random_ids import random_id
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    ImagePart,
    Mark,
    Node,
    Path,
    Program,
    Select,
    Verdict,
)
from sglang_lite.protocol import (
    CapabilityError,
    Generation,
    MediaKind,
    ParameterError,
    Played,
    Prompt,
    Selection,
    SglError,
    Usage,
    WireError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import OpenRequest, ProgramRequest
from sglang_lite.runtime.media.placeholders import NAMES
from sglang_lite.runtime.requests.resolved_params import resolve_params
from sglang_lite.server.async_engine import ProgramEvent, wait_for_first_event
from sglang_lite.server.endpoint import HttpRequest, Route, json_response, read_body
from sglang_lite.server.errors import (
    NotFoundError,
    encode_error_content,
    error_headers,
    find_error_status,
)
from sglang_lite.server.fields import GATEWAY_NEUTRAL, Fields
from sglang_lite.server.http.sse import DONE, EventStream
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service

PROGRAM_ID = "x-program-id"  # header with the id of a streamed program


class ProgramLimits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Limits that a client sets for a program; the lower of these and the server's apply."""

    tokens: int | None = None
    nodes: int | None = None
    branches: int | None = None
    seconds: float | None = None


class PlayRequest(msgspec.Struct, kw_only=True):
    """Request to run a program."""

    version: int
    program: dict[str, Any]
    prompt: str | dict[str, Any] = ""
    stream: bool | None = None
    open: bool | None = None
    close: bool | None = None
    limits: ProgramLimits | None = None
    cache_salt: str | None = None
    priority: int | None = None
    model: str | None = None


class ProgramAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Change to an open program: adds nodes to a branch, gives a verdict on one of its nodes,
    announces a pause, ends the branch, or winds down the whole program.
    """

    path: list[int]
    nodes: list[dict[str, Any]] | None = None
    place: int | None = None
    verdict: dict[str, Any] | None = None
    drop: bool = False
    pause: float | None = None
    wind_down: bool = False


class ProgramAnswers(msgspec.Struct, kw_only=True):
    """Changes to branches of an open program."""

    version: int
    answers: list[ProgramAnswer] = []
    close: bool = False


PLAY: Fields[PlayRequest] = Fields(PlayRequest, GATEWAY_NEUTRAL, {})
ANSWERS: Fields[ProgramAnswers] = Fields(ProgramAnswers, GATEWAY_NEUTRAL, {})


# ----------------------------------------------------------------------------------------- requests


@dataclass(slots=True)
class ProgramBudget:
    """Budget of a program, checked before any of the program runs.

    Attributes:
        tokens: number of tokens that generations may still produce.
        nodes: number of nodes that may still be added.
        branches: number of branches that may still be forked.
        vocab_size: vocabulary size of the model, for checks of sampling parameters.
        open: whether the program is open: a generation with an invalid parameter then fails its
            branch when it is played, and costs no tokens.
        media_kinds: kinds of media that the model takes.
    """

    tokens: int
    nodes: int
    branches: int
    vocab_size: int
    open: bool = False
    media_kinds: frozenset[MediaKind] = frozenset()

    def remaining_after(self, nodes: Sequence[Node], pointer: str) -> ProgramBudget:
        """Returns a copy of the budget, reduced by the cost of some nodes.

        Args:
            nodes: nodes to subtract, including the nodes of their branches.
            pointer: JSON Pointer to the list of nodes.

        Raises:
            ParameterError: a node exceeds the budget, or has an invalid parameter; the error has
                its JSON Pointer.
            CapabilityError: a node is an image, and the model reads none.
        """
        remaining = replace(self)
        for place, node in _walk_nodes(nodes, pointer):
            remaining.subtract(node, place, self)
        return remaining

    def subtract(self, node: Node, pointer: str, most: ProgramBudget) -> None:
        """Subtracts a node from the budget.

        Args:
            pointer: JSON Pointer to the node.
            most: budget before the whole list of nodes, for messages.

        Raises:
            ParameterError, CapabilityError: see `remaining_after`.
        """
        self.nodes -= 1
        if self.nodes < 0:
            raise ParameterError(
                pointer,
                f"the program has too many nodes: {most.nodes:,} more are allowed. Split it.",
            )
        if isinstance(node, Gen):
            try:
                params = resolve_params(node.params, self.vocab_size)
            except ParameterError as error:
                if self.open:
                    return
                problem = error.message.removeprefix(f"{error.parameter}: ")
                raise ParameterError(
                    f"{pointer}/params/{error.parameter}", problem, hint=error.hint
                ) from None
            self.tokens -= params.max_tokens * params.n
            if self.tokens < 0:
                raise ParameterError(
                    f"{pointer}/params/max_tokens",
                    f"the program may generate {most.tokens:,} more tokens at most.",
                    hint="Lower max_tokens.",
                )
        elif isinstance(node, Select):
            if not node.choices:
                raise ParameterError(f"{pointer}/choices", "is empty. Give at least one choice.")
        elif isinstance(node, Fork):
            self.branches -= len(node.branches)
            if self.branches < 0:
                raise ParameterError(
                    f"{pointer}/branches",
                    f"the program has too many branches: {most.branches:,} more are allowed. Fork less.",
                )
        elif isinstance(node, ImagePart) and node.image.kind not in self.media_kinds:
            raise CapabilityError(
                f"the model reads no {NAMES[node.image.kind]}s.", parameter=pointer
            )


def _walk_nodes(nodes: Sequence[Node], pointer: str) -> Iterator[tuple[str, Node]]:
    """Yields nodes and the nodes of their branches, with a JSON Pointer to each."""
    for i, node in enumerate(nodes):
        yield f"{pointer}/{i}", node
        if isinstance(node, Fork):
            for j, branch in enumerate(node.branches):
                yield from _walk_nodes(branch, f"{pointer}/{i}/branches/{j}")


def check_version(body: Mapping[str, Json], pointer: str) -> None:
    """Raises ParameterError if the version of a body isn't supported."""
    version = body.get("version")
    if version != wire.VERSION or isinstance(version, bool):
        hint = f"This server has version {wire.VERSION}."
        if version is None:
            raise ParameterError(f"{pointer}/version".lstrip("/"), "is missing.", hint=hint)
        raise ParameterError(
            f"{pointer}/version", f"{version!r:.60} is not {wire.VERSION}.", hint=hint
        )


# the record of that name
def decode_named_record(name: str, data: object, pointer: str, call: HttpRequest) -> Any:
    """Decodes data to a record of the type with the given name. Raises WireError if the data is
    invalid, with a JSON Pointer to the fault in the body.
    """
    message = msgspec.json.encode({"version": wire.VERSION, "type": name, "data": data})
    try:
        return wire.decode(message, limits=call.limits)
    except WireError as error:
        problem = error.message.rpartition(" (at ")[0].removeprefix("wire: ")
        place = pointer + error.pointer.removeprefix("/data")
        raise WireError(problem, pointer=place, hint=error.hint) from None


def _program(data: dict[str, Any], pointer: str, call: HttpRequest) -> Program:
    found = decode_named_record("Program", data, pointer, call)
    assert isinstance(found, Program)
    return found


@dataclass(frozen=True, slots=True)
class ParsedProgram:
    """Checked request to run a program. `models` are the model names in the request."""

    models: tuple[str | None, ...]
    id: str
    prompt: Prompt | str
    program: Program
    remaining: ProgramBudget
    seconds: float
    stream: bool
    open: bool
    close: bool
    namespace: str
    priority: int


def parse_program_request(
    reader: RequestReader, call: HttpRequest, given: Mapping[str, Json], pointer: str
) -> ParsedProgram:
    """Reads and checks the body of a request.

    Args:
        pointer: JSON Pointer to `given` in the body.

    Raises:
        ParameterError, WireError, CapabilityError: the body is invalid, or the program exceeds a
            limit.
    """
    check_version(given, pointer)
    body = PLAY.parse_record(given, call.unused if call.reports else None)
    prompt: Prompt | str = ""
    if isinstance(body.prompt, str):
        prompt = body.prompt
    else:
        prompt = decode_named_record("Prompt", body.prompt, f"{pointer}/prompt", call)
    if body.open and prompt != "":
        raise ParameterError(
            f"{pointer}/prompt",
            'is "" where a program is open.',
            hint="Give the text as Text nodes.",
        )
    program = _program(body.program, f"{pointer}/program", call)
    if body.close and not body.open:
        raise ParameterError(
            f"{pointer}/close", "is of programs that are open.", hint="Leave it out."
        )
    budget, seconds = parse_program_limits(reader, body.limits, pointer)
    budget.open = bool(body.open)
    remaining = budget.remaining_after(program.nodes, f"{pointer}/program/nodes")
    return ParsedProgram(
        (body.model,), f"prog-{random_id()}", prompt, program, remaining, seconds, bool(body.stream), bool(body.open),
        bool(body.close), body.cache_salt or "", body.priority or 0,
    )  # fmt: skip


def parse_program_limits(
    reader: RequestReader, given: ProgramLimits | None, pointer: str
) -> tuple[ProgramBudget, float]:
    """Returns the budget and time limit (seconds) of a program: the lower of the client's and the
    server's limits.
    """
    settings = reader.settings
    own = given or ProgramLimits()
    budget = ProgramBudget(
        int(_lower_limit("tokens", own.tokens, settings.program_max_tokens, pointer)),
        int(_lower_limit("nodes", own.nodes, settings.program_max_nodes, pointer)),
        int(_lower_limit("branches", own.branches, settings.program_max_branches, pointer)),
        reader.vocab_size,
        media_kinds=reader.media_kinds,
    )
    return budget, _lower_limit("seconds", own.seconds, settings.program_max_s, pointer)


def _lower_limit(name: str, given: float | None, most: float, pointer: str) -> float:
    if given is None:
        return most
    if not (given > 0 and math.isfinite(given)):
        raise ParameterError(f"{pointer}/limits/{name}", f"{given} is not greater than 0.")
    return min(given, most)


# ------------------------------------------------------------------------------------------ answers


async def play(service: Service, call: HttpRequest) -> Response:
    """Runs a program."""
    return await execute_parsed_program(
        service, call, await read_body(service, call, _read_program_request)
    )


def _read_program_request(reader: RequestReader, call: HttpRequest) -> ParsedProgram:
    return parse_program_request(reader, call, call.parse_body(), "")


async def execute_parsed_program(
    service: Service, call: HttpRequest, request: ParsedProgram
) -> Response:
    """Runs a program, and returns the response."""
    for name in request.models:
        service.check_model(name)
    request = await _fetch_images(service, request)
    if request.open:
        events = _stream_open_program(service, call, request)
    else:
        whole = ProgramRequest(
            request.prompt, request.program, request.stream, request.namespace, request.priority
        )
        events = service.async_engine.play(whole, request.seconds)
    if request.open or request.stream:
        events = await wait_for_first_event(events)
        return EventStream(events, _stream_program, "native", {PROGRAM_ID: request.id})
    found: list[ProgramEvent] = []
    async with contextlib.aclosing(events):
        async for batch in events:
            found += batch
    return _build_program_response(request.id, found, call)


async def _fetch_images(service: Service, request: ParsedProgram) -> ParsedProgram:
    """Fetches the images that a request names by address. Returns the request with the images'
    bytes.
    """
    prompt = request.prompt
    if isinstance(prompt, Prompt):
        prompt = await service.images.fetch_prompt_images(prompt)
    (nodes,) = await service.images.fetch_branch_images([request.program.nodes])
    return replace(request, prompt=prompt, program=Program(tuple(nodes)))


def _build_program_response(id: str, events: Sequence[ProgramEvent], call: HttpRequest) -> Response:
    """Creates the response with all events of a program."""
    ended = events[-1]
    usages = _Usages()
    for event in events:
        usages.count_usage(event)
    content = {
        "version": wire.VERSION,
        "id": id,
        "played": [_encode_event(event) for event in events[:-1]],
        "result": None if isinstance(ended, SglError) else _encode_event(ended),
        "usage": {**msgspec.to_builtins(usages.total), "segments": usages.segments},
    }
    if not isinstance(ended, SglError):
        return json_response(content)
    status = find_error_status(ended).status
    failed = {
        **encode_error_content(ended, "native", call.request_id),
        "failure": _encode_event(ended),
        **content,
    }
    return json_response(failed, status, error_headers(ended))


class _Data(msgspec.Struct):
    """Wire message whose `data` is not decoded."""

    data: msgspec.Raw


_decode_data = msgspec.json.Decoder(_Data).decode


def _encode_event(event: ProgramEvent) -> msgspec.Raw:
    """Encodes an event for the wire, without the envelope."""
    return _decode_data(wire.encode(event)).data


async def _stream_program(
    events: AsyncGenerator[list[ProgramEvent], None],
) -> AsyncGenerator[bytes, None]:
    usages = _Usages()
    async for batch in events:
        parts = []
        for event in batch:
            usages.count_usage(event)
            if not isinstance(event, Played):
                parts.append(_encode_sse_message(usages.total))
            parts.append(_encode_sse_message(event))
        yield b"".join(parts)
    yield DONE


def _encode_sse_message(message: wire.Message) -> bytes:
    return b"data: %b\n\n" % wire.encode(message)


class _Usages:
    """Token usage of a program's nodes, for each node and in total."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._of: list[tuple[Path, str | None, Usage]] = []
        self._prompts = self._cached = 0

    def count_usage(self, event: ProgramEvent) -> None:
        """Adds the usage in an event, if it has any."""
        if not isinstance(event, Played) or not isinstance(event.event, Generation | Selection):
            return
        usage = event.event.usage
        self._of.append((event.path, event.name, usage))
        # samples share their prompt
        if isinstance(event.event, Selection) or not event.event.index:
            self._prompts += usage.prompt_tokens
            self._cached += usage.cached_tokens

    @property
    def segments(self) -> list[dict[str, Any]]:
        return [
            {"path": path, "name": name, **msgspec.to_builtins(usage)}
            for path, name, usage in self._of
        ]

    @property
    def total(self) -> Usage:
        return Usage(
            self._prompts,
            self._cached,
            sum(usage.completion_tokens for *_, usage in self._of),
            sum(usage.forced_tokens for *_, usage in self._of),
            total_s=time.perf_counter() - self._started,
        )


# ------------------------------------------------------------------------------------ open programs


@dataclass(slots=True)
class _OpenProgramEntry:
    """Open program, and what is left of its budget.

    Attributes:
        key: API key of the request that opened the program.
        remaining: budget for further nodes.
    """

    program: OpenProgram
    key: str
    remaining: ProgramBudget
    closed: bool = field(default=False)


async def _stream_open_program(
    service: Service, call: HttpRequest, request: ParsedProgram
) -> AsyncGenerator[list[ProgramEvent], None]:
    def begin(program: OpenProgram) -> None:
        service.programs[request.id] = _OpenProgramEntry(
            program, call.key, request.remaining, request.close
        )
        if request.program.nodes:
            program.extend((), request.program.nodes)
        if request.close:
            program.close()

    opened = OpenRequest(request.stream, request.namespace, request.priority)
    events = service.async_engine.open_program(opened, begin, request.seconds)
    try:
        async with contextlib.aclosing(events):
            async for batch in events:
                yield batch
    finally:
        service.programs.pop(request.id, None)


async def update_program(service: Service, call: HttpRequest) -> Response:
    """Changes an open program: adds nodes, gives verdicts, announces pauses, drops branches, or
    winds the program down.
    """
    changes, close = await read_body(service, call, _read_program_changes)
    branches = await service.images.fetch_branch_images([change.nodes for change in changes])
    changes = [
        replace(change, nodes=nodes) for change, nodes in zip(changes, branches, strict=True)
    ]
    id = call.path["id"]
    entry = service.programs.get(id)
    if not isinstance(entry, _OpenProgramEntry) or entry.key != call.key:
        raise NotFoundError(f"no open program has the id {id[:60]!r}.", hint="It may have ended.")
    if entry.closed and any(change.verdict is None for change in changes):
        raise ParameterError("answers", "the program was closed: it takes verdicts alone.")
    entry.remaining = _budget_after(entry.remaining, changes)
    entry.closed = entry.closed or close
    for change in changes:
        if change.verdict is not None:
            entry.program.judge(change.path, change.place, change.verdict)
        elif change.nodes:
            entry.program.extend(change.path, change.nodes)
        elif change.pause_s is not None:
            entry.program.expect_pause(change.path, change.pause_s)
        elif change.winds_down:
            entry.program.wind_down()
        else:
            entry.program.drop_branch(change.path)
    if close:
        entry.program.close()
    return json_response({"id": id})


@dataclass(frozen=True, slots=True)
class _Change:
    """Change to an open program: adds nodes to a branch, gives a verdict on the node at `place`,
    announces a pause, or winds down the whole program. Without any of these, the branch is dropped.
    """

    path: Path
    nodes: Sequence[Node] = ()
    place: int = 0
    verdict: Verdict | None = None
    pause_s: float | None = None
    winds_down: bool = False


def _read_program_changes(
    reader: RequestReader, call: HttpRequest
) -> tuple[Sequence[_Change], bool]:
    """Returns the changes to an open program, and whether it is closed after them."""
    given = call.parse_body()
    check_version(given, "")
    body = ANSWERS.parse_record(given, call.unused if call.reports else None)
    changes = [_parse_change(each, f"/answers/{i}", call) for i, each in enumerate(body.answers)]
    _budget_after(
        replace(parse_program_limits(reader, None, "")[0], open=True), changes
    )  # no program may have more
    return changes, body.close


def _parse_change(given: ProgramAnswer, pointer: str, call: HttpRequest) -> _Change:
    path = tuple(given.path)
    place = given.place
    if len(path) % 2 or any(index < 0 for index in path):
        raise ParameterError(
            f"{pointer}/path", f"{given.path!r:.60} is no branch's: pairs of a fork and an index."
        )
    others = given.drop + given.wind_down + (given.pause is not None)
    if bool(given.nodes) + (given.verdict is not None) + others != 1:
        problem = "has to have nodes, a verdict, a pause, drop: true or wind_down: true. Give one of them."
        raise ParameterError(pointer, problem)
    if given.wind_down and path:
        raise ParameterError(f"{pointer}/path", "is to be []: the whole program winds down.")
    if (given.verdict is None) != (place is None) or (place is not None and place < 0):
        raise ParameterError(
            f"{pointer}/place", "is the index of the node that a verdict is given on."
        )
    if given.nodes:
        return _Change(path, _program({"nodes": given.nodes}, pointer, call).nodes)
    if given.pause is not None and not 0 <= given.pause < math.inf:
        raise ParameterError(f"{pointer}/pause", f"{given.pause!r} is no number of seconds.")
    if given.verdict is None or place is None:
        return _Change(path, pause_s=given.pause, winds_down=given.wind_down)
    verdict = decode_named_record("Verdict", given.verdict, f"{pointer}/verdict", call)
    assert isinstance(verdict, Verdict)
    return _Change(path, place=place, verdict=verdict)


def _budget_after(remaining: ProgramBudget, changes: Sequence[_Change]) -> ProgramBudget:
    """Returns the budget that is left after changes to a program. Raises ParameterError if they
    exceed it.
    """
    for i, change in enumerate(changes):
        pointer = f"/answers/{i}"
        if change.nodes:
            remaining = remaining.remaining_after(change.nodes, f"{pointer}/nodes")
        elif change.verdict is not None and change.verdict.again is not None:
            remaining = replace(remaining, open=False).remaining_after(
                (change.verdict.again,), f"{pointer}/verdict/again"
            )
        else:  # any other change costs as much as a node
            remaining = remaining.remaining_after((Mark(),), pointer)
    return replace(remaining, open=True)


async def reject_compiled_rows(service: Service, call: HttpRequest) -> Response:
    """Rejects a request to run compiled programs, which only clients of earlier versions send."""
    raise ParameterError(
        "rows",
        "this server plays no rows of compiled programs.",
        hint="Use sglang-lite of the server's version: run_batch sends each row's program to POST /program.",
    )


ROUTES = (
    Route(
        "/program/rows",
        reject_compiled_rows,
        "Refused: rows of compiled programs, which earlier versions sent",
    ),
    Route("/program", play, "Play a program", fields=PLAY, streams=True, counts_as_open=True),
    Route(
        "/program/{id}/answer", update_program, "Give an open program more nodes", fields=ANSWERS
    ),
)
