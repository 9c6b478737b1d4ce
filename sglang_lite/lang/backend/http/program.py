"""Runs whole programs on a server of this package, through `POST /program` (docs/server.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from sglang_lite import wire
from sglang_lite.lang.backend.http.client import (
    RETRYABLE_ERRORS,
    Retries,
    ServerClient,
    trace_headers,
)
from sglang_lite.lang.concurrency.loop import current_deadline, executor
from sglang_lite.program.nodes import Fork, Gen, Node, Path, Program, Rollback, Select, Verdict
from sglang_lite.protocol import (
    BackendError,
    Delta,
    Generation,
    Played,
    ProgramEvent,
    ProgramResult,
    ProgramSink,
    Prompt,
    Selection,
    SglError,
    Unset,
    Usage,
)

_MOMENT_S = 0.001
_MAX_MOMENTS = 5
_Attempt: TypeAlias = tuple[Path, int]


class RemoteProgram:
    """Program that is open at a server. Its first request contains the nodes that were added by
    then, and later nodes follow in further requests. If the connection breaks, the whole program is
    sent again, unless a branch was dropped or rolled back; then the program fails. The same seeds
    give the same results, and no event is delivered twice.

    Args:
        server: server that plays the program.
        sink: callback for the program's events, called on the executor loop.
        stream: whether to deliver deltas.
        priority: priority of the program.
    """

    def __init__(
        self, server: ServerClient, sink: ProgramSink, *, stream: bool, priority: int = 0
    ) -> None:
        self._server = server
        self._sink = sink
        self._stream = stream
        self._priority = priority
        # All items so far, with nodes as records, in case the program has to be sent again.
        self._items: list[dict[str, Any]] = []
        self._unsent: list[dict[str, Any]] = []  # as plain data
        self._closed = False
        # Number of items before the first drop or rollback. Later items depend on timing and can't
        # be sent again.
        self._before_going_back = sys.maxsize
        self._delivered = _DeliveredEvents()
        self._id: str | None = None
        self._sending = False
        self._over = False
        self._retries = Retries(server)
        # of this thread's span; the tasks that send them have their own context
        self._headers = trace_headers()
        self._task: asyncio.Task[None] | None = None
        self._connection: asyncio.Task[None] | None = None
        self._lost: BackendError | None = None  # why the current connection was given up

    # ----------------------------------------------------------------------------------- any thread

    def extend(self, path: Path, nodes: Sequence[Node]) -> None:
        """Adds nodes to a branch. Raises WireError if a node can't be sent."""
        seeded = tuple(map(_fill_missing_seeds, nodes))
        executor().post(
            self._queue_item, {"path": list(path), "nodes": _nodes_to_data(seeded)}, seeded
        )

    def judge(self, path: Path, place: int, verdict: Verdict) -> None:
        """Sends the verdict on a node of a branch. Raises WireError if it can't be sent."""
        again = None if verdict.again is None else _fill_missing_seeds(verdict.again)
        assert again is None or isinstance(again, Gen | Select)
        verdict = msgspec.structs.replace(verdict, again=again)
        data = json.loads(wire.encode(verdict))["data"]
        executor().post(self._queue_item, {"path": list(path), "place": place, "verdict": data})

    def drop_branch(self, path: Path) -> None:
        """Asks the server to end a branch: at the node that is being answered, or else at the next
        one that needs an answer.
        """
        executor().post(self._queue_item, {"path": list(path), "drop": True})

    def expect_pause(self, path: Path, seconds: float) -> None:
        """Announces for how long nothing will be added to a branch."""
        executor().post(self._queue_item, {"path": list(path), "pause": seconds})

    def wind_down(self) -> None:
        """Ends all generations early, including later ones. For example, text ends at the next
        token, and JSON where closing brackets complete it.
        """
        executor().post(self._queue_item, {"path": [], "wind_down": True})

    def close(self) -> None:
        """Announces that no more nodes will be added."""
        executor().post(self._close)

    # ---------------------------------------------------------------------------- the executor loop

    def _close(self) -> None:
        self._closed = True
        self._schedule_send()

    def _queue_item(self, item: dict[str, Any], nodes: Sequence[Node] = ()) -> None:
        if "drop" in item or any(isinstance(node, Rollback) for node in nodes):
            self._before_going_back = min(self._before_going_back, len(self._items))
        self._items.append({**item, "nodes": nodes} if nodes else item)
        self._unsent.append(item)
        if self._task is None and not self._over:
            self._task = self._server.run_in_background(self._send_and_deliver())
        self._schedule_send()

    def _end_with_event(self, event: ProgramResult | SglError) -> None:
        if not self._over:
            self._over = True
            self._id = None
            self._sink(event)

    async def _send_and_deliver(self) -> None:
        """Sends the program and delivers its events until it has ended."""
        # else the deadline of the node that opened the program would apply
        current_deadline.set(None)
        try:
            await self._wait_for_more_nodes()
            while True:
                self._connection = asyncio.ensure_future(self._connect())
                try:
                    await self._connection
                    return
                except asyncio.CancelledError:
                    if self._lost is None:
                        raise
                    error = self._lost
                except RETRYABLE_ERRORS as lost:
                    error = lost
                self._id = self._lost = None
                if self._before_going_back < sys.maxsize:
                    raise error
                await self._retries.pause_before_retry(error)
        except SglError as error:
            self._end_with_event(error)
        except asyncio.CancelledError:
            self._end_with_event(BackendError("the connections to the server were closed."))
            raise
        except Exception as error:  # in any case, readers must not wait forever
            self._end_with_event(BackendError(f"the program can't be played: {error!r}"))

    async def _wait_for_more_nodes(self) -> None:
        """Waits a moment while other threads add nodes. These nodes can then be sent with the first
        request.
        """
        for _ in range(0 if self._closed else _MAX_MOMENTS):
            before = len(self._items)
            await asyncio.sleep(_MOMENT_S)
            if len(self._items) == before:
                return

    async def _connect(self) -> None:
        if self._retries.connections_closed:
            raise BackendError(
                "the connections to the server were closed.",
                hint="Call shutdown() after all results are read.",
            )
        branches = self._take_first_nodes()
        self._delivered.reset_for_replay()
        grows = bool(self._unsent) or not self._closed
        body: dict[str, Any] = {
            "version": wire.VERSION,
            "program": {"nodes": _nodes_to_data(_collect_nodes(branches))},
            "stream": self._stream,
            "open": True,
        }
        if not grows:
            body["close"] = True
        if self._priority:
            body["priority"] = self._priority
        datas = self._server.stream_events(
            "/program", body, self._note_program_id if grows else None, self._headers
        )
        async with contextlib.aclosing(
            self._delivered.new_events(self._server, datas, self._retries)
        ) as events:
            async for event in events:
                if isinstance(event, Played):
                    self._sink(event)
                else:
                    self._end_with_event(event)

    def _take_first_nodes(self) -> dict[Path, list[Node]]:
        """Returns the nodes to send with the first request, by branch. If a branch was dropped or
        rolled back, only the nodes added before that are returned, because a drop affects only
        nodes that were already sent. Everything else is kept for further requests.
        """
        branches: dict[Path, list[Node]] = {}
        following = len(self._items[self._before_going_back :])
        unsent = self._unsent
        self._unsent = []
        rest = unsent[len(unsent) - following :]
        for item in self._items[: self._before_going_back]:
            if "nodes" in item:
                branches.setdefault(tuple(item["path"]), []).extend(item["nodes"])
            elif "pause" not in item or item in unsent:  # a pause that was already sent is over
                self._unsent.append(item)
        self._unsent += rest
        return branches

    # ----------------------------------------------------------------------------- further requests

    def _note_program_id(self, headers: Mapping[str, str]) -> None:
        self._id = headers.get("x-program-id")
        if self._id is None:
            raise BackendError(
                "the server's answer does not name the program that it opened.",
                hint="Check what listens at base_url.",
            )
        self._schedule_send()

    @property
    def _may_send(self) -> bool:
        return not self._over and not self._retries.connections_closed

    def _schedule_send(self) -> None:
        if self._id is None or self._sending or not self._may_send:
            return
        if not self._unsent and not self._closed:
            return
        self._sending = True
        self._server.run_in_background(self._send_unsent_answers(self._id))

    async def _send_unsent_answers(self, program: str) -> None:
        try:
            while self._id == program and self._may_send and (self._unsent or self._closed):
                answers = self._unsent
                self._unsent = []
                closes = self._closed
                body = {"version": wire.VERSION, "answers": answers, "close": closes}
                # must not be applied twice
                await self._server.post(f"/program/{program}/answer", body, once=True)
                if closes:
                    self._id = None  # nothing is left to send
        except SglError as error:
            if self._id == program and self._connection is not None:
                if isinstance(error, RETRYABLE_ERRORS):
                    self._lost = error
                else:
                    self._end_with_event(error)
                self._connection.cancel()
        except RuntimeError as error:
            # At the interpreter's exit, and when the backend is closed: both disconnect, which ends
            # the program.
            if "shutdown" not in str(error) and "closed" not in str(error):
                raise
        finally:
            self._sending = False
        self._schedule_send()


async def play_single_node(
    server: ServerClient, prompt: Prompt, node: Node, *, stream: bool, model: str | None = None
) -> AsyncGenerator[Delta | Generation | Selection, None]:
    """Runs a program of one node on a server, and yields its events. If the connection breaks, the
    program is sent again. The same seed gives the same result, and no event is yielded twice.

    Args:
        stream: whether to yield deltas.
        model: name of the server's model, to send the program in a field of `/v1/completions`,
            which gateways forward; None to send it to `/program`.

    Raises:
        SglError: the node or the program failed.
    """
    program = {
        "version": wire.VERSION,
        "prompt": msgspec.to_builtins(msgspec.structs.replace(prompt, messages=())),
        "program": {"nodes": _nodes_to_data((_fill_missing_seeds(node),))},
        "stream": True,
    }
    path = "/program"
    body = program
    if model is not None:
        path = "/v1/completions"
        body = {"model": model, "prompt": prompt.text, "program": program, "stream": True}
    retries = Retries(server)
    delivered = _DeliveredEvents()
    while True:
        delivered.reset_for_replay()
        try:
            datas = server.stream_events(path, body)
            async with contextlib.aclosing(
                delivered.new_events(server, datas, retries, deltas=stream)
            ) as events:
                async for played in events:
                    if isinstance(played, ProgramResult):
                        return
                    event = played if isinstance(played, SglError) else played.event
                    if isinstance(event, SglError):
                        raise event
                    yield event
        except RETRYABLE_ERRORS as error:
            await retries.pause_before_retry(error)


class _DeliveredEvents:
    """Record of the events that were delivered. When a program is played again after a reconnect,
    it prevents events from being delivered twice.
    """

    def __init__(self) -> None:
        self._finished: Counter[_Attempt] = Counter()  # number of finished samples
        self._texts: dict[tuple[_Attempt, int], str] = {}
        self.reset_for_replay()

    def reset_for_replay(self) -> None:
        """Prepares for a program that is played again from its start."""
        self._finished_now: Counter[_Attempt] = Counter()
        self._texts_now: dict[tuple[_Attempt, int], str] = {}

    async def new_events(
        self,
        server: ServerClient,
        datas: AsyncGenerator[str, None],
        retries: Retries,
        *,
        deltas: bool = True,
    ) -> AsyncGenerator[Played | ProgramResult | SglError, None]:
        """Yields those events of a program's stream that were not delivered yet and, last, the end
        of the program.

        Raises:
            BackendError: the stream ended before the program did, or an error allows another try.
        """
        async with contextlib.aclosing(datas):
            async for data in datas:
                event = _decode_event(server, data)
                if isinstance(event, Played):
                    for news in self._undelivered_part(event, deltas=deltas):
                        retries.reset_retry_count()
                        yield news
                elif isinstance(event, RETRYABLE_ERRORS):
                    raise event
                elif isinstance(event, ProgramResult | SglError):
                    yield event
                    return
        raise BackendError(
            "the program's stream ended before the program did.",
            hint="Check what listens at base_url.",
        )

    def _undelivered_part(self, played: Played, *, deltas: bool) -> Iterable[Played]:
        """Yields an event, or the part of it that was not delivered yet. Yields nothing if all of
        it was delivered.
        """
        event = played.event
        attempt = (played.path, played.attempt)
        if not isinstance(event, Delta):
            self._finished_now[attempt] += 1
            if self._finished_now[attempt] > self._finished[attempt]:
                self._finished[attempt] += 1
                yield played
            return
        if not deltas:
            return
        key = attempt, event.index
        text = self._texts_now[key] = self._texts_now.get(key, "") + event.text
        delivered = self._texts.get(key, "")
        if len(text) > len(delivered):
            self._texts[key] = text
            # part of its text was already delivered
            again = len(event.text) > len(text) - len(delivered)
            news = Delta(text[len(delivered) :], index=event.index) if again else event
            yield msgspec.structs.replace(played, event=news)


def _decode_event(server: ServerClient, data: str) -> ProgramEvent | Usage:
    if data.startswith('{"error"'):  # error of a gateway
        server.parse_event(data)
    event = wire.decode(data.encode())
    if isinstance(event, ProgramEvent | Usage):
        return event
    raise BackendError(f"a {type(event).__name__} is not an event of a program.")


def _nodes_to_data(nodes: Sequence[Node]) -> Any:  # plain data
    return json.loads(wire.encode(Program(tuple(nodes))))["data"]["nodes"]


def _fill_missing_seeds(node: Node) -> Node:
    """Returns the node with a seed for each generation that has none. A second run of the node then
    gives the same result.
    """
    if isinstance(node, Gen) and isinstance(node.params.seed, Unset):
        return msgspec.structs.replace(
            node, params=msgspec.structs.replace(node.params, seed=secrets.randbits(63))
        )
    if isinstance(node, Fork):
        return msgspec.structs.replace(
            node, branches=tuple(tuple(map(_fill_missing_seeds, each)) for each in node.branches)
        )
    return node


def _collect_nodes(
    branches: Mapping[Path, Sequence[Node]], path: Path = (), own: Sequence[Node] = ()
) -> tuple[Node, ...]:
    """Returns all nodes of a branch: those listed in its fork (`own`), then those added later.
    Nodes of inner branches are placed inside their forks.
    """
    found: list[Node] = []
    for place, node in enumerate((*own, *branches.get(path, ()))):
        if isinstance(node, Fork):
            inner = tuple(
                _collect_nodes(branches, (*path, place, i), each)
                for i, each in enumerate(node.branches)
            )
            node = msgspec.structs.replace(node, branches=inner)
        found.append(node)
    return tuple(found)
