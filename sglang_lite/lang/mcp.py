"""Tools, resources and prompts of Model Context Protocol servers (modelcontextprotocol.io), using the
official package `mcp`.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final, Self, overload

from sglang_lite.lang.checks import check_positive, check_whole_number
from sglang_lite.lang.failure_text import hide_secrets_of_url
from sglang_lite.lang.mcp_connection import McpConnection
from sglang_lite.lang.mcp_content import (
    MAX_BYTES,
    McpPrompt,
    McpResource,
    convert_prompt,
    convert_resource,
)
from sglang_lite.lang.tools import SchemaTool, read_result_schema
from sglang_lite.lang.tracebacks import user_location
from sglang_lite.protocol import JsonSchema, ParameterError
from sglang_lite.protocol.anything import Foreign, Json, UserValue

if TYPE_CHECKING:
    from sglang_lite.program.nodes import Expression, Expressions

_URL: Final = re.compile("https?://", re.IGNORECASE)
_COMMAND: Final = 'Give a URL or a command, such as "uvx mcp-server-time".'
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.-]*")


def mcp(
    server: str | Sequence[str] | Foreign,
    *,
    tools: Iterable[str] | None = None,
    prefix: str = "",
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> McpTools:
    """Connects to an MCP server, and returns its tools, for `gen(tools=…)` and `use_tools`.

    Args:
        server: URL of a server, or the command that starts one, as a string or a list of words.
            Anything else that `mcp.Client` connects to is accepted too, such as an `MCPServer` of
            this process.
        tools: the server's names of the tools to use, in this order and without duplicates; None
            for all tools.
        prefix: text to put before the name of each tool, such as "files_", to distinguish tools
            that would otherwise have the same name.
        env: environment variables to set for the command, which otherwise inherits only PATH, HOME
            and a few others.
        timeout: maximum seconds for connecting, and for each request.

    Returns:
        A sequence of tools. Without `tools`, those whose schema can't be used are left out, with a
        warning. The connection stays open until the sequence is closed, is left as a context
        manager, or is no longer used.

    Raises:
        ParameterError: the package `mcp` is not installed, there is no such command or tool, a
            parameter has a wrong type, the prefix has characters that names of tools can't have, or
            the schema of a tool in `tools` can't be used.
        ToolError: the server can't be reached, does not answer in time, or fails; its list of tools
            has more than 100 pages, or repeats a cursor.
    """
    try:
        from mcp import StdioServerParameters
    except ModuleNotFoundError as error:
        raise ParameterError(
            "server", "MCP needs the mcp package.", hint="pip install 'sglang-lite[mcp]'"
        ) from error
    check_positive("timeout", timeout, "seconds")
    if timeout > threading.TIMEOUT_MAX:
        raise ParameterError("timeout", f"{timeout:g} s is too long.", hint="Give at most a year.")
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise ParameterError(
            "prefix",
            f"{prefix!r:.60} can't be part of a tool's name.",
            hint="Use letters, digits, underscores, hyphens and dots.",
        )
    names = None if tools is None else _read_names(tools)
    if isinstance(server, str) and _URL.match(server):
        name = hide_secrets_of_url(server)
    elif isinstance(server, Sequence | os.PathLike):
        words = _split_command(server)
        name = shlex.join(words)
        server = StdioServerParameters(command=words[0], args=words[1:], env=_read_environment(env))
    elif server is None or isinstance(server, int | float | Mapping):
        raise ParameterError("server", f"{server!r:.60} is no server.", hint=_COMMAND)
    else:
        name = type(server).__name__
    if env is not None and not isinstance(server, StdioServerParameters):
        raise ParameterError("env", "only a command has environment variables.")
    connection = McpConnection(server, name, timeout)
    try:
        return McpTools(connection, names, prefix)
    except BaseException:
        connection.close()
        raise


def _split_command(command: Foreign) -> list[str]:
    """Splits a command into its words. Raises ParameterError if the value is not a command."""
    words = command
    if isinstance(command, os.PathLike):
        words = [os.fspath(command)]
    elif isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError as error:
            problem = f"{command!r:.80} can't be split into words: {error}."
            raise ParameterError("server", problem, hint="Give a list of words.") from error
    if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise ParameterError("server", f"{words!r:.80} is no command.", hint=_COMMAND)
    return list(words)


def _read_environment(env: Foreign) -> dict[str, str] | None:
    if env is None:
        return None
    if not isinstance(env, Mapping):
        raise ParameterError("env", f"{env!r:.60} is no dict.", hint="Give a dict of texts.")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ParameterError(
                "env", f"{name!r:.60} or its value is no text.", hint="Give a dict of texts."
            )
    return dict(env)


def _check_uri(uri: UserValue) -> None:
    if not isinstance(uri, str):
        raise ParameterError("uri", f"{uri!r:.60} is no text.", hint="Write the address as a text.")


def _read_names(tools: Foreign) -> list[str]:
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise ParameterError(
            "tools", f"{tools!r:.60} is no list of names.", hint="Give a list of texts."
        )
    names = list(tools)
    for name in names:
        if not isinstance(name, str):
            raise ParameterError(
                "tools", f"{name!r:.60} is no name of a tool.", hint="Give a list of texts."
            )
        if names.count(name) > 1:
            raise ParameterError("tools", f"{name!r:.60} is listed twice.", hint="Remove one.")
    return names


class McpTools(Sequence[SchemaTool]):
    """Tools of an MCP server, in a fixed order, and its resources and prompts; created by `sgl.mcp`."""

    def __init__(
        self, connection: McpConnection, names: Sequence[str] | None, prefix: str = ""
    ) -> None:
        self._lease = lease = _Lease(connection)
        self._tools = []
        left_out = dict(connection.left_out)
        for each in _select_listed_tools(connection, names):
            try:
                self._tools.append(_build_tool(lease, each, f"{prefix}{each.name}"))
            except ParameterError as error:
                if names is not None:
                    raise
                usable = each.name and each.name.isprintable()
                shown = each.name if usable else repr(each.name)
                left_out[shown] = error.message.removeprefix(f"tools: {prefix}{each.name}: ")
        for name, why in left_out.items() if names is None else ():
            warnings.warn(f"{connection.server}: the tool {name} is left out: {why}", stacklevel=3)
        for name, count in Counter(each.name for each in connection.listed).items():
            if count > 1 and (names is None or name in names):
                times = "twice" if count == 2 else f"{count} times"
                message = (
                    f"{connection.server}: it lists the tool {name} {times}; the first one is used."
                )
                warnings.warn(message, stacklevel=3)

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

    @property
    def protocol_version(self) -> str:
        """Version of the protocol that the server speaks, such as "2026-07-28"."""
        return self._lease.connection.protocol_version

    def resources(self) -> list[McpResource]:
        """Lists the server's resources. Blocks until the server answers.

        Raises:
            ToolError: the server does not answer in time, or fails; the list has more than 100
                pages, or repeats a cursor.
        """
        return [McpResource.of(each) for each in self._lease.connection.list_all("resources")]

    def read_resource(self, uri: str, *, max_bytes: int = MAX_BYTES) -> Expression:
        """Reads a resource, to be added to a program: `s += sgl.user(tools.read_resource(uri))`.
        Blocks until the server answers.

        Args:
            uri: its address.
            max_bytes: its maximum size in bytes.

        Returns:
            Text in which control tokens are plain text, an image or a sound; several of them if the
            resource has several parts.

        Raises:
            ParameterError: `uri` is not a string, or `max_bytes` is not a positive whole number.
            ToolError: the server has no such resource, does not answer in time, or fails; the
                resource is larger than `max_bytes`, or is neither text nor an image or sound of a
                known format.
        """
        _check_uri(uri)
        check_whole_number("max_bytes", max_bytes, 1, user_location())
        answer = self._lease.connection.read_resource(uri)
        return convert_resource(uri, answer.contents, max_bytes)

    def prompts(self) -> list[McpPrompt]:
        """Lists the server's prompts. Blocks and raises errors like `resources`."""
        return [McpPrompt.of(each) for each in self._lease.connection.list_all("prompts")]

    def get_prompt(self, name: str, /, **arguments: str) -> Expressions:
        """Gets a prompt, to be added to a program: `s += tools.get_prompt("review", code=code)`.
        Blocks until the server answers.

        Args:
            name: name of the prompt.
            arguments: its arguments.

        Returns:
            A user or assistant turn for each message of the prompt.

        Raises:
            ParameterError: there is no such prompt, it does not take one of the arguments, or a
                required argument is missing.
            ToolError: the server does not answer in time, or fails; the prompt has more than
                10,000,000 bytes, or contains something other than text, images and sounds.
        """
        connection = self._lease.connection

        def check(listed: list[Foreign]) -> None:
            found = {each.name: McpPrompt.of(each) for each in listed}
            if name not in found:
                problem = f"{connection.server} has no prompt {name!r:.60}; it has: {', '.join(found) or 'none'}."
                raise ParameterError("get_prompt", problem)
            found[name].check_arguments(arguments)

        return convert_prompt(name, connection.get_prompt(name, arguments, check).messages)


class _Lease:
    """Keeps a connection open as long as any tool uses it, then closes it."""

    def __init__(self, connection: McpConnection) -> None:
        self.connection, self.end = connection, weakref.finalize(self, connection.close)

    def call_leased_tool(
        self, tool: Foreign, name: str, result: JsonSchema | None, arguments: dict[str, Json]
    ) -> Json:
        """Calls a tool over the leased connection. Raises the errors of `McpConnection.start_call`."""
        return self.connection.wait_for(self.start_leased_call(tool, name, result, arguments))

    def start_leased_call(
        self, tool: Foreign, name: str, result: JsonSchema | None, arguments: dict[str, Json]
    ) -> Future[Json]:
        """Starts a call over the leased connection."""
        return self.connection.start_call(tool, arguments, name, result)


def _build_tool(lease: _Lease, listed: Foreign, name: str) -> SchemaTool:
    """Builds a tool from the SDK's description of it. Raises ParameterError if one of the tool's
    schemas can't be used.
    """
    if not listed.name or not name.isprintable():
        raise ParameterError("tools", f"{name}: its name is empty or has control characters.")
    result = read_result_schema(name, listed.output_schema)
    return SchemaTool(
        name,
        listed.description or "",
        listed.input_schema,
        partial(lease.call_leased_tool, listed, name, result),
        partial(lease.start_leased_call, listed, name, result),
        result_schema=listed.output_schema,
        origin=f"the MCP server {lease.connection.server}",
    )


def _select_listed_tools(connection: McpConnection, names: Sequence[str] | None) -> list[Foreign]:
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
