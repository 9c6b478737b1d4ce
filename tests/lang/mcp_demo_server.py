"""An MCP server for tests, by the protocol's official package."""

import asyncio
import os

from mcp.server import MCPServer
from pydantic import BaseModel

server = MCPServer("demo")


class Place(BaseModel):
    name: str
    near: list["Place"] = []


@server.tool()
def add(a: int, b: int = 3) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count(place: Place) -> str:
    """Counts places."""
    return str(1 + sum(int(count(each)) for each in place.near))


@server.tool()
def fails(why: str) -> str:
    raise ValueError(why)


@server.tool()
def dies() -> str:
    os._exit(3)


@server.tool()
def long(size: int = 3_000_000) -> str:
    return "x" * size


@server.tool()
async def waits() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


if __name__ == "__main__":
    server.run()
