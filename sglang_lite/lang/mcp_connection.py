"""Connections to Model Context Protocol servers. The official package `mcp` speaks the protocol: it
finds out whether a server is stateless (2026-07-28) or wants a handshake (older versions).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, Final, Literal

from sglang_lite.lang.failure_text import redact
from sglang_lite.lang.mcp_content import convert_tool_result
from sglang_lite.lang.mcp_stream import SESSION_HAS_ENDED, InspectedStream
from sglang_lite.protocol import JsonSchema, ParameterError, ToolError
from sglang_lite.protocol.anything import Foreign, Json

MAX_PAGES: Final = 100  # pages of a list
_READ_S: Final = 300.0  # seconds between two parts of a response over HTTP, as in the SDK
_LAST_S: Final = 1.0  # seconds in which cancelled calls have to end
_RECONNECT: Final = "Connect again with sgl.mcp."
_MAX_TOLD: Final = 300  # characters shown of an error from the SDK


class McpConnection:
    """Connection to a server, running on its own event loop in its own thread.

    Args:
        server: argument for the SDK's client: a URL, command parameters, or a server object.
        name: address or command, for messages.
        timeout: maximum seconds for connecting, and for a request.

    Attributes:
        server: the name of the server.
        listed: the server's tools, as the SDK describes them.
        left_out: why the SDK rejects a tool, by the tool's name.

    Raises:
        ParameterError: the command can't be started.
        ToolError: the server can't be used.
    """

    def __init__(self, server: Foreign, name: str, timeout: float) -> None:
        self.server = name
        self.left_out: dict[str, str] = {}
        self._target = server
        self._client: Foreign = None
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False  # changed with the lock held
        self._process = os.getpid()
        connected: Future[list[Foreign]] = Future()
        self._serving = self._loop.create_task(self._serve(connected))
        self._thread = threading.Thread(
            target=self._run_event_loop, args=(connected,), name="sglang_lite-mcp", daemon=True
        )
        self._thread.start()
        try:
            self.listed = connected.result(timeout)
            self.server = self._own_name() or name
        except FutureTimeoutError:
            self.close()  # ends the command, which would outlive this program
            raise ToolError(f"the MCP server {name} did not answer within {timeout:g} s.") from None
        except KeyboardInterrupt:
            self.close()
            raise
        except OSError as error:  # no such command
            raise ParameterError(
                "server", f"{name} can't be started: {error.strerror or error}."
            ) from error
        except Exception as error:
            raise ToolError(
                f"the MCP server {name} can't be used: {_error_summary(error)}."
            ) from error

    @property
    def protocol_version(self) -> str:
        """Version of the protocol that the server speaks."""
        return str(self._client.protocol_version)

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

    async def _serve(self, connected: Future[list[Foreign]]) -> None:
        try:
            await self._list_tools_and_stay_connected("auto", connected)
        except Exception as error:
            if connected.done() or not self._ended_instead_of_answering(error):
                raise
            await self._list_tools_and_stay_connected("legacy", connected)

    def _ended_instead_of_answering(self, error: Exception) -> bool:
        """Returns True if the command exited on the version probe, as some older servers do."""
        from mcp import MCPError, StdioServerParameters
        from mcp_types import CONNECTION_CLOSED

        found = _first_error_in_groups(error)
        return (
            isinstance(self._target, StdioServerParameters)
            and isinstance(found, MCPError)
            and found.code == CONNECTION_CLOSED
        )

    async def _list_tools_and_stay_connected(
        self, mode: Literal["auto", "legacy"], connected: Future[list[Foreign]]
    ) -> None:
        from mcp import Client

        self._client = Client(self._open_transport(), mode=mode, cache=None)
        async with self._client:
            # `convert_tool_result` checks results: Python's `re` could block the process for hours
            self._client.session.validate_tool_result = _skip_validation
            connected.set_result(await self._list_pages("tools"))
            await asyncio.Event().wait()  # until it is cancelled

    def _open_transport(self) -> Foreign:
        from mcp import StdioServerParameters, stdio_client

        if isinstance(self._target, str):
            return self._filter_transport(self._open_http(self._target))
        if isinstance(self._target, StdioServerParameters):
            return self._filter_transport(stdio_client(self._target))
        return self._target

    @contextlib.asynccontextmanager
    async def _open_http(self, url: str) -> AsyncIterator[Foreign]:
        from mcp.client.streamable_http import streamable_http_client

        from sglang_lite.lang.mcp_http import McpHttpClient

        async with (
            McpHttpClient(max(_READ_S, self._timeout)) as client,
            streamable_http_client(url, http_client=client) as streams,
        ):
            yield streams

    async def _list_pages(self, kind: Literal["tools", "resources", "prompts"]) -> list[Foreign]:
        """Lists all tools, resources or prompts of the server. Returns an empty list if the server
        does not offer such a list.

        Raises:
            ToolError: the list does not end.
        """
        from mcp import MCPError
        from mcp_types import METHOD_NOT_FOUND

        listed: list[Foreign] = []
        cursors: list[str | None] = [None]
        while len(cursors) <= MAX_PAGES:
            try:
                page = await getattr(self._client, f"list_{kind}")(cursor=cursors[-1])
            except MCPError as error:
                declared = getattr(self._client.server_capabilities, kind)
                if error.code == METHOD_NOT_FOUND and declared is None:
                    return []
                raise
            listed += getattr(page, kind)
            if page.next_cursor is None:
                return listed
            if page.next_cursor in cursors:
                raise ToolError(
                    f"its list of {kind} does not end: it repeats the cursor {page.next_cursor!r:.60}"
                )
            cursors.append(page.next_cursor)
        raise ToolError(f"its list of {kind} has more than {MAX_PAGES} pages")

    @contextlib.asynccontextmanager
    async def _filter_transport(
        self, transport: Foreign
    ) -> AsyncIterator[tuple[InspectedStream, Foreign]]:
        async with transport as (reading, writing):
            yield InspectedStream(reading, self._drop_rejected_tools), writing

    def _drop_rejected_tools(self, message: Foreign) -> None:
        """Drops the tools that the SDK rejects from a tool list. Otherwise, a single one would make
        the SDK reject the whole list.
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
            parse_server_result("tools/list", self.protocol_version, {**result, "tools": [tool]})
        except ValidationError as error:
            wrong = [each for each in error.errors() if "tools" in each["loc"]]
            if wrong:
                name = str(tool.get("name", "(no name)")) if isinstance(tool, dict) else "(no name)"
                place = ".".join(map(str, wrong[0]["loc"][2:]))
                self.left_out[name] = f"its schema can't be used: {place}: {wrong[0]['msg']}"
            return not wrong
        return True

    def start_call(
        self, tool: Foreign, arguments: dict[str, Json], name: str, result: JsonSchema | None
    ) -> Future[Json]:
        """Starts a call of a tool. The future's result is the structured content if there is any,
        otherwise the text. If the tool failed, the result is the reason as text, because the
        protocol wants the model to read it. Cancelling the future also cancels the call at the
        server.

        Args:
            tool: one of `listed`.
            arguments: arguments by name.
            name: name of the tool, for messages.
            result: schema of the structured content; None if there is none.

        Raises:
            ToolError: raised by the future: the server does not answer in time, the connection is
                lost, or the result is too long or breaks its schema.
        """

        async def call() -> Json:
            calling = self._client.call_tool(tool.name, arguments)
            answer = await self._limit(name, calling)
            return convert_tool_result(self.server, name, answer, result)

        return self._start(call)

    def list_all(self, kind: Literal["resources", "prompts"]) -> list[Foreign]:
        """Lists the server's resources or prompts. Blocks until the list has arrived. Raises
        ToolError if the server fails.
        """
        listing = partial(self._list_pages, kind)
        found: list[Foreign] = self._ask(lambda: self._limit(f"{kind}/list", listing()))
        return found

    def read_resource(self, uri: str) -> Foreign:
        """Reads a resource. Blocks until it has arrived. Raises ToolError if the server fails."""
        return self._ask(
            lambda: self._limit(f"resources/read {uri:.200}", self._client.read_resource(uri))
        )

    def get_prompt(
        self, name: str, arguments: dict[str, str], check: Callable[[list[Foreign]], None]
    ) -> Foreign:
        """Gets a prompt. Blocks until it has arrived. Raises ToolError if the server fails.

        Args:
            name: name of the prompt.
            arguments: arguments of the prompt.
            check: called with the server's list of prompts, to check the name and the arguments.
        """

        async def get() -> Foreign:
            async with asyncio.timeout(self._timeout):  # for both requests
                check(await self._limit("prompts/list", self._list_pages("prompts")))
                getting = self._client.get_prompt(name, arguments)
                return await self._limit(f"prompts/get {name}", getting)

        try:
            return self._ask(get)
        except TimeoutError as error:
            raise self._late_error(f"prompts/get {name}") from error

    def _start(self, work: Callable[[], Awaitable[Json]]) -> Future[Json]:
        """Starts a coroutine on the connection's event loop."""
        with self._lock:
            # a forked process does not have the connection's thread
            if not self._closed and os.getpid() == self._process:
                return asyncio.run_coroutine_threadsafe(_await(work), self._loop)
        failed = Future[Json]()
        failed.set_exception(self._disconnected_error())
        return failed

    def _ask(self, work: Callable[[], Awaitable[Foreign]]) -> Foreign:
        return self.wait_for(self._start(work))

    def wait_for(self, answering: Future[Json]) -> Json:
        """Blocks until a call of this connection has ended, and returns its result."""
        try:
            return answering.result()
        except CancelledError as error:  # the connection has ended
            raise self._disconnected_error() from error
        finally:
            answering.cancel()

    def _disconnected_error(self) -> ToolError:
        return ToolError(
            f"the MCP server {self.server} is disconnected.",
            shown="its server is disconnected.",
            hint=_RECONNECT,
        )

    async def _limit(self, request: str, answering: Awaitable[Foreign]) -> Foreign:
        """Awaits the answer to a request.

        Args:
            request: name of the request, for messages.

        Raises:
            ToolError: the server does not answer in time, or fails.
        """
        try:
            async with asyncio.timeout(self._timeout):
                return await answering
        except TimeoutError as error:
            raise self._late_error(request) from error
        except Exception as error:
            summary = _error_summary(error)
            raise ToolError(
                f"the MCP server {self.server} failed in {request}: {summary}.",
                shown=f"its server failed: {redact(summary)}.",
                hint=_RECONNECT if self._has_ended(error) else "",
            ) from error

    def _late_error(self, request: str) -> ToolError:
        return ToolError(
            f"the MCP server {self.server} did not answer {request} within {self._timeout:g} s.",
            shown=f"it did not answer within {self._timeout:g} s.",
        )

    def _own_name(self) -> str:
        """Returns the name of a server that has neither a URL nor a command, or "" for other
        servers.
        """
        from mcp import StdioServerParameters

        known = isinstance(self._target, str | StdioServerParameters)
        return "" if known else str(getattr(self._client.server_info, "name", ""))

    def _has_ended(self, error: Exception) -> bool:
        """Returns True if an error means that no later request will succeed."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if not isinstance(error, MCPError):
            return False
        if isinstance(self._target, str):  # over HTTP, only a session ends
            return error.message.endswith(SESSION_HAS_ENDED)
        return error.code == CONNECTION_CLOSED

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


async def _skip_validation(name: str, result: Foreign) -> None:
    pass


async def _await(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


async def _cancel_other_tasks() -> None:
    """Cancels the tasks of this event loop, such as calls that nothing will answer."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_LAST_S)


def _first_error_in_groups(error: BaseException) -> BaseException:
    """Returns the first leaf of nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _error_summary(error: Exception) -> str:
    inner = _first_error_in_groups(error)
    # an error about a result that breaks its schema prints the whole schema, over many lines
    text = " ".join(str(inner).split())[:_MAX_TOLD].rstrip(".")
    details = getattr(getattr(inner, "error", None), "data", None)
    if isinstance(details, dict) and "supported" in details:  # versions of the protocol
        text += f" (it speaks {details['supported']!s:.80})"
    return text or type(inner).__name__
