"""The official package's own server, for tests: its tools have results of any JSON type.

`--old`: it only speaks the versions that begin with a handshake.
"""

import sys

import anyio
from mcp import MCPError
from mcp.server import Server
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server
from mcp_types import (
    METHOD_NOT_FOUND,
    CallToolResult,
    GetPromptResult,
    ListPromptsResult,
    ListResourcesResult,
    ListToolsResult,
    Prompt,
    PromptArgument,
    PromptMessage,
    ReadResourceResult,
    Resource,
    TextContent,
    TextResourceContents,
    Tool,
)

NUMBERS = {"type": "array", "items": {"type": "integer"}}
COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}


async def list_tools(context, params):
    tools = [Tool(name="row", input_schema=COUNT, output_schema=COUNT)]
    if context.protocol_version == "2026-07-28":
        tools.append(Tool(name="numbers", input_schema=COUNT, output_schema=NUMBERS))
    return ListToolsResult(tools=tools)


async def call_tool(context, params):
    count = params.arguments["count"]
    found = [*range(count)] if params.name == "numbers" else {"count": count}
    return CallToolResult(content=[], structured_content=found)


async def list_resources(context, params):
    return ListResourcesResult(resources=[Resource(uri="note://a", name="a", size=5)])


async def read_resource(context, params):
    return ReadResourceResult(contents=[TextResourceContents(uri=params.uri, text="A note")])


async def list_prompts(context, params):
    arguments = [PromptArgument(name="name", required=True)]
    return ListPromptsResult(prompts=[Prompt(name="greet", arguments=arguments)])


async def get_prompt(context, params):
    content = TextContent(text=f"Greet {params.arguments['name']}.")
    return GetPromptResult(messages=[PromptMessage(role="user", content=content)])


def make_server() -> Server:
    return Server(
        "library",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_read_resource=read_resource,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
    )


async def refuse_discovery(context, call_next):
    """Middleware of a server that does not know how to tell its versions."""
    if context.method == "server/discover":
        raise MCPError(METHOD_NOT_FOUND, "Method not found")
    return await call_next(context)


async def serve(*, old: bool) -> None:
    server = make_server()
    async with stdio_server() as (reading, writing), server.lifespan(server) as state:
        if old:
            await serve_loop(server, reading, writing, lifespan_state=state)
        else:
            await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(lambda: serve(old="--old" in sys.argv))
