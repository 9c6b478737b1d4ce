"""Tools of Model Context Protocol servers (modelcontextprotocol.io), using the official package
`mcp`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Final, Self, overload

from sglang_lite.lang.checks import check_positive
from sglang_lite.lang.failure_text import redact
from sglang_lite.lang.tools import ReportedFailure, SchemaTool
from sglang_lite.protocol import ParameterError, ToolError
from sglang_lite.protocol.anything import Foreign, Json

MAX_RESULT: Final = 1 << 20  # characters of a result, far more than fits in a prompt
_MAX_PAGES: Final = 100  # of a server's list of tools
_LAST_S: Final = 1.0  # seconds in which cancelled calls have to end
_MAX_TOLD: Final = 300  # characters shown of an error from the SDK


def mcp(
    server: str | Sequence[str] | Foreign,
    *,
    tools: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> McpTools:
    """Connects to an MCP server, and returns its tools, for `gen(tools=…)` and `use_tools`.

    Args:
        server: URL of a server, or the command that starts one, as a string or a list of words.
            Anything else that `mcp.Client` connects to is accepted too, such as an `MCPServer` of
            this process.
        tools: names of the tools to use, in this order; None for all.
        env: environment variables to set for the command, which otherwise inherits only PATH, HOME
            and a few others.
        timeout: maximum seconds for connecting, and for each call.

    Returns:
        A sequence of tools. Without `tools`, those whose schema can't be used are left out, with a
        warning. The connection stays open until the sequence is closed, is left as a context
        manager, or is no longer used.

    Raises:
        ParameterError: the package `mcp` is not installed, there is no such command or tool, or the
            schema of a tool in `tools` can't be used.
        ToolError: the server can't be reached, does not answer in time, or fails.
    """
    try:
        from mcp import StdioServerParameters
    except ModuleNotFoundError as error:
        raise ParameterError(
            "server", "MCP needs the mcp package.", hint="pip install 'sglang-lite[mcp]'"
        ) from error
    check_positive("timeout", timeout)
    name = server if isinstance(server, str) else type(server).__name__
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        server = shlex.split(server)
    if isinstance(server, Sequence) and not isinstance(server, str):
        if not server or not all(isinstance(word, str) for word in server):
            raise ParameterError(
                "server", f"{server!r:.80} is no command.", hint='Give "uvx mcp-server-time", say.'
            )
        name = shlex.join(server)
        server = StdioServerParameters(
            command=server[0], args=[*server[1:]], env=dict(env) if env else None
        )
    elif env is not None:
        raise ParameterError("env", "only a command has environment variables.")
    connection = _Connection(server, name, timeout)
    try:
        return McpTools(connection, tools)
    except BaseException:
        connection.close()
        raise


class McpTools(Sequence[SchemaTool]):
    """Tools of an MCP server, in a fixed order; created by `sgl.mcp`."""

    def __init__(self, connection: _Connection, names: Sequence[str] | None) -> None:
        self._lease = lease = _Lease(connection)
        self._tools = []
        left_out = dict(connection.left_out)
        for each in _select_listed_tools(connection, names):
            try:
                tool = SchemaTool(
                    each.name,
                    each.description or "",
                    each.input_schema,
                    partial(lease.call_leased_tool, each.name),
                    partial(lease.start_leased_call, each.name),
                )
                self._tools.append(tool)
            except ParameterError as error:
                if names is not None:
                    raise
                left_out[each.name] = error.message.partition(f"{each.name}: ")[2]
        for name, why in left_out.items() if names is None else ():
            warnings.warn(f"{connection.server}: the tool {name} is left out: {why}", stacklevel=3)
        for name, count in Counter(each.name for each in connection.listed).items():
            if count > 1 and (names is None or name in names):
                times = "twice" if count == 2 else f"{count} times"
                message = (
                    f"{connection.server}: it lists the tool {name} {times}; the first one is used."
                )
                warnings.warn(message, stacklevel=3)
        if connection.has_more and names is None:
            problem = (
                f"it lists its tools on more than {_MAX_PAGES} pages; those after are not read."
            )
            warnings.warn(
                f"{connection.server}: {problem} Name the tools that you need: tools=[…].",
                stacklevel=3,
            )

    @overload
    def __getitem__(self, index: int) -> SchemaTool: ...
    @overload
    def __getitem__(self, index: slice) -> list[SchemaTool]: ...
    def __getitem__(self, index: int | slice) -> SchemaTool | list[SchemaTool]:
        return self._tools[index]

    def __len__(self) -> int:
        return len(self._tools)

    def __repr__(self) -> str:
        names = ", ".join(tool.__name__ for tool in self._tools)
        return f"McpTools({self._lease.connection.server!r:.80}: {names:.200})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects, which also ends a server started by a command. Later calls of tools fail."""
        self._lease.end()


class _Lease:
    """Keeps a connection open as long as any tool uses it, then closes it."""

    def __init__(self, connection: _Connection) -> None:
        self.connection, self.end = connection, weakref.finalize(self, connection.close)

    def call_leased_tool(self, name: str, arguments: dict[str, Json]) -> Json:
        """Calls a tool over the leased connection. Raises the errors of `_Connection.start_call`."""
        answering = self.start_leased_call(name, arguments)
        try:
            return answering.result()
        except CancelledError as error:  # the connection has ended
            raise self.connection.disconnected_error() from error
        finally:
            answering.cancel()

    def start_leased_call(self, name: str, arguments: dict[str, Json]) -> Future[Json]:
        """Starts a call over the leased connection."""
        return self.connection.start_call(name, arguments)


class _Connection:
    """Connection to a server, running on its own event loop in its own thread.

    Args:
        server: argument for the SDK's client: a URL, command parameters, or a server object.
        name: address or command, for messages.
        timeout: maximum seconds for connecting, and for a call.

    Attributes:
        server: the name of the server.
        listed: the server's tools, as the SDK describes them.
        left_out: why the SDK rejects a tool, by the tool's name.
        has_more: whether the server's list of tools has more pages than were read.
    """

    def __init__(self, server: Foreign, name: str, timeout: float) -> None:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if isinstance(server, str):
            server = self._filter_transport(streamable_http_client(server))
        elif isinstance(server, StdioServerParameters):
            server = self._filter_transport(stdio_client(server))
        self.server = name
        self._client = Client(server)
        self._timeout = timeout
        self.left_out: dict[str, str] = {}
        self.has_more = False
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False  # changed with the lock held
        self._process = os.getpid()
        connected: Future[list[Foreign]] = Future()
        self._serving = self._loop.create_task(self._list_tools_and_stay_connected(connected))
        self._thread = threading.Thread(
            target=self._run_event_loop, args=(connected,), name="sglang_lite-mcp", daemon=True
        )
        self._thread.start()
        try:
            self.listed = connected.result(timeout)
        except FutureTimeoutError:
            self._disconnect()
            raise ToolError(f"the MCP server {name} did not answer within {timeout:g} s.") from None
        except OSError as error:  # no such command
            raise ParameterError(
                "server", f"{name} can't be started: {error.strerror or error}."
            ) from error
        except Exception as error:
            raise ToolError(
                f"the MCP server {name} can't be used: {_error_summary(error)}."
            ) from error

    def _run_event_loop(self, connected: Future[list[Foreign]]) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # reported by `connected`, or by the open calls
            if not connected.done():
                connected.set_exception(_first_error_in_groups(error))
        finally:
            with self._lock:  # no call starts from here on
                self._closed = True
            self._loop.run_until_complete(_cancel_other_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _list_tools_and_stay_connected(self, connected: Future[list[Foreign]]) -> None:
        async with self._client as client:
            listed: list[Foreign] = []
            cursor = None
            for _ in range(_MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                listed += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
            self.has_more = cursor is not None
            connected.set_result(listed)
            await asyncio.Event().wait()  # until it is cancelled

    @contextlib.asynccontextmanager
    async def _filter_transport(
        self, transport: Foreign
    ) -> AsyncIterator[tuple[_InspectedStream, Foreign]]:
        async with transport as (reading, writing):
            yield _InspectedStream(reading, self._drop_rejected_tools), writing

    def _drop_rejected_tools(self, message: Foreign) -> None:
        """Drops the tools that the SDK rejects from a tool list, since one would make it reject the
        whole list.
        """
        result = getattr(getattr(message, "message", None), "result", None)
        if isinstance(result, dict) and isinstance(result.get("tools"), list):
            result["tools"] = [
                tool for tool in result["tools"] if self._is_valid_tool(tool, result)
            ]

    def _is_valid_tool(self, tool: Json, result: dict[str, Json]) -> bool:
        from mcp_types.methods import parse_server_result
        from pydantic import ValidationError

        try:
            parse_server_result(
                "tools/list", self._client.protocol_version, {**result, "tools": [tool]}
            )
        except ValidationError as error:
            wrong = [each for each in error.errors() if "tools" in each["loc"]]
            if wrong:
                name = str(tool.get("name", "(no name)")) if isinstance(tool, dict) else "(no name)"
                place = ".".join(map(str, wrong[0]["loc"][2:]))
                self.left_out[name] = f"its schema can't be used: {place}: {wrong[0]['msg']}"
            return not wrong
        return True

    def start_call(self, name: str, arguments: dict[str, Json]) -> Future[Json]:
        """Starts a call of a tool. Its result is the structured content, or else the text. If the
        tool failed, it is the reason as text, since the protocol wants the model to read it.
        Cancelling the future tells the server.

        Raises:
            ToolError: (the future) the server does not answer in time, is gone, or its result is
                too long.
        """
        with self._lock:
            # a forked process does not have the connection's thread
            if not self._closed and os.getpid() == self._process:
                calling = self._call_server_tool(name, arguments)
                return asyncio.run_coroutine_threadsafe(calling, self._loop)
        failed = Future[Json]()
        failed.set_exception(self.disconnected_error())
        return failed

    def disconnected_error(self) -> ToolError:
        """Returns the error of a call without a connection."""
        return ToolError(
            f"the MCP server {self.server} is disconnected.",
            shown="its server is disconnected.",
        )

    async def _call_server_tool(self, name: str, arguments: dict[str, Json]) -> Json:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._client.call_tool(name, arguments)
        except TimeoutError as error:
            raise ToolError(
                f"the MCP server {self.server} did not answer {name} within {self._timeout:g} s.",
                shown=f"it did not answer within {self._timeout:g} s.",
            ) from error
        except Exception as error:
            summary = _error_summary(error)
            raise ToolError(
                f"the MCP server {self.server} failed in {name}: {summary}.",
                shown=f"its server failed: {redact(summary)}.",
            ) from error
        return _convert_tool_result(name, answer)

    def close(self) -> None:
        """Disconnects, and waits up to 10 s for the thread to end."""
        self._disconnect()
        if threading.current_thread() is not self._thread:
            self._thread.join(10)

    def _disconnect(self) -> None:
        with self._lock:
            self._closed = True
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._serving.cancel)


class _InspectedStream:
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


def _select_listed_tools(connection: _Connection, names: Sequence[str] | None) -> list[Foreign]:
    by_name: dict[str, Foreign] = {}
    for each in connection.listed:
        by_name.setdefault(each.name, each)
    if names is None:
        return [*by_name.values()]
    for name in names:
        if name in connection.left_out:
            raise ParameterError("tools", f"{name}: {connection.left_out[name]}")
        if name not in by_name:
            known = ", ".join(by_name) or "none"
            raise ParameterError(
                "tools", f"{connection.server} has no tool {name!r}; it has: {known}."
            )
    return [by_name[name] for name in names]


def _convert_tool_result(name: str, answer: Foreign) -> Json:
    texts = [
        part.text if part.type == "text" else f"({part.type}, not shown)" for part in answer.content
    ]
    text = "\n".join(texts)
    found = answer.structured_content
    length = max(len(text), 0 if found is None else len(json.dumps(found)))
    if length > MAX_RESULT:
        raise ToolError(f"{name} gave {length:,} characters; at most {MAX_RESULT:,} are taken.")
    if answer.is_error:
        return ReportedFailure(f"Error: {text or 'no reason was given'}")
    return text if found is None else found


async def _cancel_other_tasks() -> None:
    """Cancels the tasks of this event loop, such as calls that nothing will answer."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_LAST_S)


def _first_error_in_groups(error: BaseException) -> BaseException:
    """Returns the first error inside an exception group. The SDK's task groups raise such groups,
    which may be nested.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _error_summary(error: Exception) -> str:
    inner = _first_error_in_groups(error)
    # an error about a result that breaks its schema prints the whole schema, over many lines
    text = " ".join(str(inner).split())
    return text[:_MAX_TOLD].rstrip(".") or type(inner).__name__
