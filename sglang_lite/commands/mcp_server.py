"""`sglang-lite mcp`: serves the programs of a file as tools over the Model Context Protocol."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from sglang_lite.commands.parser import add_file_argument, add_model_flag, split_file_and_function

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from sglang_lite.lang.backend.default import BackendLike
    from sglang_lite.lang.function import SglFunction

    Lifespan = Callable[[MCPServer], contextlib.AbstractAsyncContextManager[None]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_file_argument(parser)
    add_model_flag(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Serves on standard input and output until the client has gone."""
    from sglang_lite.engine.engine import Engine
    from sglang_lite.lint.files import import_program_file, programs_in

    file, function = split_file_and_function(options.file)
    with contextlib.ExitStack() as stack:
        with redirect_stdout(sys.stderr):  # output of the file, whose code runs
            programs = programs_in(import_program_file(file), function)
        engine = None if options.model is None else stack.enter_context(Engine(options.model))
        build_mcp_server(file.stem, programs, engine, _redirect_prints).run()
    return 0


@contextlib.asynccontextmanager
async def _redirect_prints(_: MCPServer) -> AsyncIterator[None]:
    """Redirects what programs print to standard error, because the protocol uses standard output."""
    with redirect_stdout(sys.stderr):
        yield


def build_mcp_server(
    name: str,
    programs: dict[str, SglFunction],
    backend: BackendLike | None,
    lifespan: Lifespan | None = None,
) -> MCPServer:
    """Builds an MCP server with a tool for each program. The tool has the program's arguments and
    annotations, without arguments given by `bind`. It returns the variables of a run as JSON, with
    the body's return value as `return`.

    Args:
        name: name of the server.
        programs: programs by name.
        backend: backend of the runs; None for the default one.
        lifespan: lifespan context for MCPServer; None for none.

    Raises:
        ParameterError: the package `mcp` is not installed.
    """
    from sglang_lite.protocol import ParameterError

    try:
        from mcp.server import MCPServer
    except ModuleNotFoundError as error:
        raise ParameterError(
            "mcp", "a server needs the mcp package.", hint="pip install 'sglang-lite[mcp]'"
        ) from error
    server = MCPServer(name, lifespan=lifespan)
    for each, program in programs.items():
        server.add_tool(
            _tool_function(program, backend),
            name=each,
            description=inspect.getdoc(program.func) or "",
        )
    return server


def _tool_function(program: SglFunction, backend: BackendLike | None) -> Any:
    from mcp.server.mcpserver.exceptions import ToolError

    from sglang_lite.commands.run_file import outcome_to_json_data

    async def run(**arguments: Any) -> str:
        try:
            state = await asyncio.to_thread(lambda: program.bind(**arguments).run(backend=backend))
        except (Exception, SystemExit) as error:  # a body may raise anything
            told = (
                outcome_to_json_data(error)["error"]
                if isinstance(error, Exception)
                else f"the program exited: {error}"
            )
            raise ToolError(str(told)) from error  # the client reads the text of this error
        return json.dumps(outcome_to_json_data(state), ensure_ascii=False)

    written = inspect.signature(program.func, eval_str=True)
    _, *own = written.parameters.values()  # the first is the state
    parameters = [
        each if each.annotation is not each.empty else each.replace(annotation=Any)
        for each in own
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        and each.name not in program.bind_arguments
    ]
    run.__signature__ = written.replace(parameters=parameters, return_annotation=str)  # type: ignore[attr-defined] # a function's
    return run
