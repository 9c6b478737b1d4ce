"""Web application of the playground: serves the page and handles the page's requests. Only
reachable from this machine.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from sglang_lite.page.constraint_report import ConstraintText, report_constraint
from sglang_lite.page.render import render_page
from sglang_lite.playground.programs import Playground, RerunRequest, RunRequest

_MAX_BODY = 4 * 2**20
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",  # the address has the token
    "x-content-type-options": "nosniff",
}
_Body = TypeVar("_Body", RunRequest, RerunRequest, ConstraintText)


def build_application(playground: Playground, token: str, port: int) -> Starlette:
    """Builds the ASGI application of a playground.

    Args:
        token: secret that the address of the page and each of its requests must contain.
        port: port on which it is served. Requests under names other than the loopback's are
            refused, so no web page can reach it through a name that resolves to this machine.
    """
    hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    def reject_foreign_request(request: Request, given: str) -> Response | None:
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        if host not in hosts or origin not in (None, f"http://{host}"):
            return _json_response({"error": {"text": "Requests of other pages are refused."}}, 403)
        if not hmac.compare_digest(given.encode(), token.encode()):
            return _json_response(
                {"error": {"text": "The token is wrong. Open the address that was printed."}}, 401
            )
        return None

    async def serve_page(request: Request) -> Response:
        return reject_foreign_request(
            request, request.query_params.get("token", "")
        ) or HTMLResponse(render_page("Playground", [], "playground"), headers=_HEADERS)

    def make_endpoint(
        kind: type[_Body] | None, answer: Callable[..., Any]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if failed := reject_foreign_request(request, request.headers.get("x-token", "")):
                return failed
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MAX_BODY:
                    return _json_response({"error": {"text": "The request is too large."}}, 413)
            try:
                arguments = [] if kind is None else [msgspec.json.decode(body, type=kind)]
            except msgspec.DecodeError as error:
                return _json_response({"error": {"text": str(error)}}, 400)
            return _json_response(await asyncio.to_thread(answer, *arguments))

        return endpoint

    return Starlette(
        routes=[
            Route("/", serve_page),
            Route("/programs", make_endpoint(None, playground.describe_programs), methods=["POST"]),
            Route("/run", make_endpoint(RunRequest, playground.run), methods=["POST"]),
            Route("/rerun", make_endpoint(RerunRequest, playground.rerun), methods=["POST"]),
            Route("/check", make_endpoint(ConstraintText, report_constraint), methods=["POST"]),
        ]
    )


def _json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, _HEADERS, "application/json")


def serve_playground(
    playground: Playground, listening: socket.socket, announce: Callable[[str], object]
) -> None:
    """Serves a playground until the process is interrupted.

    Args:
        listening: socket bound to the loopback.
        announce: function that is called with a line that contains the address of the page.
    """
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(16)
    server = uvicorn.Server(
        uvicorn.Config(
            build_application(playground, token, port), log_level="warning", access_log=False
        )
    )
    listening.listen()
    threading.Thread(target=playground.prepare, daemon=True).start()
    announce(f"Playground: http://127.0.0.1:{port}/?token={token}")
    server.run([listening])
