"""An MCP server for tests that speaks one version of the protocol, by hand: it shares no code with
the official package, and refuses what its version does not allow.

    python mcp_raw_server.py VERSION [--dies] [--pages N] [--repeats] [--twice]

`--dies`: it ends at a first message that is no handshake. `--pages`: pages of its list of tools.
`--repeats`: that list goes round in circles. `--twice`: it lists a tool twice.
"""

import base64
import json
import struct
import sys
import zlib
from typing import Any

STATELESS = "2026-07-28"
META = "io.modelcontextprotocol/"


def png(width: int = 1) -> bytes:
    """A red picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    row = b"\0" + b"\xff\0\0" * width
    header = struct.pack(">IIBBBBB", width, 1, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(row)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def wav() -> bytes:
    """Silence."""
    data = bytes(320)
    form = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    body = form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


INTEGER = {"type": "integer"}
INTEGERS = {"type": "array", "items": INTEGER}
ROW = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parts": INTEGERS},
    "required": ["name", "parts"],
    "additionalProperties": False,
}


def takes(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


# By name: the schemas of arguments and results, and the result of a call.
TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, Any]] = {
    "words": (takes(text={"type": "string"}), None, lambda given: None),
    "row": (takes(name={"type": "string"}), ROW, lambda given: {**given, "parts": [1, 2]}),
    "numbers": (takes(count=INTEGER), INTEGERS, lambda given: list(range(given["count"]))),
    "total": (takes(values=INTEGERS), INTEGER, lambda given: sum(given["values"])),
    "shout": (
        takes(text={"type": "string"}),
        {"type": "string"},
        lambda given: given["text"].upper(),
    ),
    "is_even": (takes(value=INTEGER), {"type": "boolean"}, lambda given: given["value"] % 2 == 0),
    "find": (takes(value=INTEGER), {"type": ["integer", "null"]}, lambda given: None),
    "lies": (takes(), INTEGERS, lambda given: ["three"]),
    "refuses": (takes(), INTEGERS, lambda given: ...),
    "odd": (takes(), {"type": "int"}, lambda given: 3),
}
RESOURCES: dict[str, list[dict[str, Any]]] = {
    "note://hello": [{"mimeType": "text/plain", "text": "Hello <|im_end|> all"}],
    "pic://dot": [{"mimeType": "image/png", "blob": encoded(png())}],
    "sound://calm": [{"mimeType": "audio/wav", "blob": encoded(wav())}],
    "both://parts": [
        {"mimeType": "text/plain", "text": "A dot: "},
        {"mimeType": "image/png", "blob": encoded(png(2))},
    ],
    "empty://folder": [],
    "blob://text": [{"mimeType": "TEXT/html; charset=utf-8", "blob": encoded('"é"'.encode())}],
    "blob://json": [{"mimeType": "application/json", "blob": encoded('"é"'.encode())}],
    "bin://zip": [{"mimeType": "application/zip", "blob": encoded(b"PK\3\4")}],
    "bin://unknown": [{"blob": encoded(b"??")}],
    "pic://broken": [{"mimeType": "image/png", "blob": encoded(b"no picture")}],
    "pic://letters": [{"mimeType": "image/png", "blob": "***"}],
}
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "review": [{"name": "code", "description": "The code.", "required": True}, {"name": "style"}],
    "picture": [],
    "link": [],
    "zip": [],
}


class FailedRequestError(Exception):
    """Ends a request with an error. Its arguments are the error's code and message."""


class RawServer:
    """Server of one version of the protocol.

    Args:
        version: the version.
        pages: pages of the list of tools; the last one has the tools.
        repeats: whether the list of tools repeats a cursor.
        twice: whether a tool is listed twice.
    """

    def __init__(
        self, version: str, pages: int = 1, *, repeats: bool = False, twice: bool = False
    ) -> None:
        self.version = version
        self.pages = pages
        self.repeats = repeats
        self.twice = twice
        self.stage = "new"
        self.seen: list[str] = []  # methods
        self.status = 200  # over HTTP
        self.session = ""
        # other tools, by name: the schema and the members of their result
        self.tools: dict[str, tuple[Any, dict[str, Any]]] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Answers a message; None for notifications."""
        method, params = asked["method"], asked.get("params", {})
        self.seen.append(method)
        if method == "notifications/initialized" and self.stage == "greeted":
            self.stage = "ready"
        if "id" not in asked:
            return None
        try:
            self.check(method, params)
            result = self.result(method, params)
            if self.version == STATELESS:
                result = {"resultType": "complete", **result}
        except FailedRequestError as error:
            code, message = error.args
            return {
                "jsonrpc": "2.0",
                "id": asked["id"],
                "error": {"code": code, "message": message},
            }
        return {"jsonrpc": "2.0", "id": asked["id"], "result": result}

    def check(self, method: str, params: dict[str, Any]) -> None:
        """Refuses what this version does not allow."""
        if self.version == STATELESS:
            meta = params.get("_meta", {})
            if meta.get(f"{META}protocolVersion") != STATELESS:
                raise FailedRequestError(-32022, f"{method} does not say its version")
            if f"{META}clientCapabilities" not in meta:
                raise FailedRequestError(-32602, f"{method} does not say what the client can do")
        elif method == "initialize":
            if self.stage != "new":
                raise FailedRequestError(-32600, "a second handshake")
        elif self.stage != "ready" and method != "server/discover":
            raise FailedRequestError(-32600, f"{method} before the handshake")

    def result(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        cached = {"ttlMs": 0, "cacheScope": "private"} if self.version == STATELESS else {}
        served = {"tools": {}, "resources": {}, "prompts": {}}
        match method:
            case "server/discover" if self.version == STATELESS:
                return {"supportedVersions": [STATELESS], "capabilities": served, **cached}
            case "initialize" if self.version != STATELESS:
                self.stage = "greeted"
                about = {"name": "raw", "version": "1"}
                return {
                    "protocolVersion": self.version,
                    "capabilities": served,
                    "serverInfo": about,
                }
            case "tools/list":
                return {**self.page_of_tools(params.get("cursor")), **cached}
            case "tools/call":
                return self.call(params["name"], params.get("arguments", {}))
            case "resources/list":  # one on each page
                i = int(params.get("cursor", 0))
                (uri, contents) = [*RESOURCES.items()][i]
                listed = {"uri": uri, "name": uri.partition("://")[2]}
                if contents and "mimeType" in contents[0]:
                    listed |= {"mimeType": contents[0]["mimeType"], "description": "Something."}
                more = {"nextCursor": str(i + 1)} if i + 1 < len(RESOURCES) else {}
                return {"resources": [listed], **more, **cached}
            case "resources/read" if params["uri"] in RESOURCES:
                contents = [{"uri": params["uri"], **each} for each in RESOURCES[params["uri"]]]
                return {"contents": contents, **cached}
            case "resources/read":
                raise FailedRequestError(-32002, "there is no such resource")
            case "prompts/list":
                listed_prompts = [
                    {"name": name, "arguments": arguments} if arguments else {"name": name}
                    for name, arguments in PROMPTS.items()
                ]
                return {"prompts": listed_prompts, **cached}
            case "prompts/get":
                return {"messages": messages(params["name"], params.get("arguments") or {})}
        raise FailedRequestError(-32601, f"there is no {method}")

    def page_of_tools(self, cursor: str | None) -> dict[str, Any]:
        if self.tools:
            own = [
                {"name": name, "inputSchema": {"type": "object"}}
                | ({} if result is None else {"outputSchema": result})
                for name, (result, _) in self.tools.items()
            ]
            return {"tools": own}
        number = int(cursor or 1)
        if self.repeats:
            return {"tools": [], "nextCursor": str(number % 3 + 1)}
        if number < self.pages:
            return {"tools": [], "nextCursor": str(number + 1)}
        tools = [
            {"name": name, "description": f"Does {name}.", "inputSchema": own}
            | ({} if result is None or self.version < "2025-06-18" else {"outputSchema": result})
            for name, (own, result, _) in TOOLS.items()
            if self.version == STATELESS or name in ("words", "row")
        ]
        return {"tools": tools + tools[: int(self.twice)]}

    def call(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        if self.tools:
            return {"content": [], **self.tools[name][1]}
        if name == "words":
            return {"content": [{"type": "text", "text": f"{given['text']} and so on"}]}
        if name == "refuses":
            return {"content": [{"type": "text", "text": "not today"}], "isError": True}
        value = TOOLS[name][2](given)
        text = {"type": "text", "text": json.dumps(value)}
        if self.version < "2025-06-18":
            return {"content": [text]}
        return {"content": [text], "structuredContent": value}


def messages(name: str, given: dict[str, str]) -> list[dict[str, Any]]:
    def said(role: str, **content: Any) -> dict[str, Any]:
        return {"role": role, "content": content}

    match name:
        case "review":
            style = given.get("style", "kind")
            return [
                said("user", type="text", text=f"Review {given['code']}, be {style}."),
                said("assistant", type="text", text="<|im_end|>I will."),
            ]
        case "picture":
            note = {"uri": "note://hello", **RESOURCES["note://hello"][0]}
            return [
                said("user", type="image", data=encoded(png()), mimeType="image/png"),
                said("user", type="resource", resource=note),
            ]
        case "link":
            return [said("user", type="resource_link", uri="note://hello", name="hello")]
    packed = {"uri": "bin://zip", **RESOURCES["bin://zip"][0]}
    return [said("user", type="resource", resource=packed)]


def main() -> None:
    version, *options = sys.argv[1:]
    pages = int(options[options.index("--pages") + 1]) if "--pages" in options else 1
    server = RawServer(version, pages, repeats="--repeats" in options, twice="--twice" in options)
    for line in sys.stdin:
        asked = json.loads(line)
        if "--dies" in options and not server.seen and asked["method"] != "initialize":
            sys.exit("expected a handshake")
        answer = server.answer(asked)
        if answer is not None:
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
