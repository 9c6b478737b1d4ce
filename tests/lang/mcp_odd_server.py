"""An MCP server for tests two of whose tools have schemas that can't be used, and one whose results
aren't what its schema says; by hand, since the SDK refuses to.
"""

import json
import sys
from typing import Any

SCHEMAS = {
    "good": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "refused": {"type": "string"},
    "unheld": {"type": "object", "properties": {"x": {"type": "int"}}},
    "lies": {"type": "object"},
}
COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}

for line in sys.stdin:
    asked = json.loads(line)
    answer: dict[str, Any] | None
    match asked["method"]:
        case "initialize":
            answer = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "odd", "version": "1"},
            }
        case "tools/list":
            if "--endless" in sys.argv:
                tools, page = (
                    [{"name": "good", "inputSchema": SCHEMAS["good"]}],
                    {"nextCursor": "more"},
                )
            else:
                tools, page = (
                    [{"name": name, "inputSchema": schema} for name, schema in SCHEMAS.items()],
                    {},
                )
                tools.append(
                    {
                        "name": "good",
                        "description": "A second one.",
                        "inputSchema": {"type": "object"},
                    }
                )
            tools = [
                {**tool, "outputSchema": COUNT} if tool["name"] == "lies" else tool
                for tool in tools
            ]
            answer = {"tools": tools, **page}
        case "tools/call" if asked["params"]["name"] == "lies":
            answer = {"content": [], "structuredContent": {"count": "three"}}
        case "tools/call":
            answer = {"content": [{"type": "text", "text": str(asked["params"]["arguments"]["x"])}]}
        case _:
            answer = None
    if "id" in asked:
        unknown: dict[str, Any] = {"error": {"code": -32601, "message": "Method not found"}}
        reply = unknown if answer is None else {"result": answer}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **reply}), flush=True)
