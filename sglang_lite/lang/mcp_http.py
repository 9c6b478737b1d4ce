"""HTTP client for connections to MCP servers, in which a network error only fails its own request."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final

import httpx2
from mcp_types import INTERNAL_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND

from sglang_lite.lang.mcp_stream import SESSION_HAS_ENDED

_CONNECT_S: Final = 30.0
_SESSION: Final = "mcp-session-id"
_JSON: Final = "application/json"


class McpHttpClient(httpx2.AsyncClient):
    """HTTP client whose responses to failed requests are error messages of the protocol. The SDK
    ends the whole connection for a network error, and leaves out the HTTP status.

    Args:
        read_timeout: maximum seconds between two parts of a response.
    """

    def __init__(self, read_timeout: float) -> None:
        super().__init__(timeout=httpx2.Timeout(_CONNECT_S, read=read_timeout))

    async def send(
        self,
        request: httpx2.Request,
        **options: Any,  # those of httpx2
    ) -> httpx2.Response:
        """Sends a request. Reads the response unless it is a stream of events."""
        try:
            response = await super().send(request, **options)
            if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
                return response
            try:
                await response.aread()
            finally:
                await response.aclose()
        except (httpx2.RequestError, httpx2.StreamError) as error:
            problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return _respond_with_error(request, HTTPStatus.BAD_GATEWAY, INTERNAL_ERROR, problem)
        if response.status_code < HTTPStatus.BAD_REQUEST or _is_error_message(response):
            return response
        code, problem = INTERNAL_ERROR, f"HTTP status {response.status_code}"
        if response.status_code == HTTPStatus.NOT_FOUND:
            # the SDK's own code for this status
            code = INVALID_REQUEST if _SESSION in request.headers else METHOD_NOT_FOUND
        if response.reason_phrase:
            problem += f" ({response.reason_phrase})"
        if code == INVALID_REQUEST:
            problem += f": {SESSION_HAS_ENDED}"
        return _respond_with_error(request, response.status_code, code, problem)


def _is_error_message(response: httpx2.Response) -> bool:
    try:
        content = response.json()
    except ValueError:
        return False
    return isinstance(content, dict) and isinstance(content.get("error"), dict)


def _respond_with_error(
    request: httpx2.Request, status: int, code: int, problem: str
) -> httpx2.Response:
    """Returns a response with an error message. The SDK gives it the id of the request."""
    message = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": problem}}
    return httpx2.Response(
        status, headers={"content-type": _JSON}, content=json.dumps(message), request=request
    )
