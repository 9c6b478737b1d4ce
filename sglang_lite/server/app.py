"""The server as a whole: its ASGI application, and the life of its process."""

from __future__ import annotations

import contextlib
import gc
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import BackendError, CapabilityError, SglError
from sglang_lite.protocol.anything import UserValue
from sglang_lite.server import log, playground
from sglang_lite.server.absent import unsupported_path_error
from sglang_lite.server.endpoint import (
    UNUSED,
    AccessControl,
    Endpoint,
    error_response,
    read_or_create_request_id,
)
from sglang_lite.server.errors import MethodError, NotFoundError, Protocol
from sglang_lite.server.http.sockets import bind_socket, raise_open_file_limit
from sglang_lite.server.http_server import HttpServer
from sglang_lite.server.request_metrics import OTHER_ROUTE
from sglang_lite.server.request_spans import export_spans
from sglang_lite.server.routes import ROUTES
from sglang_lite.server.service import Service
from sglang_lite.server.settings import ServerSettings, warn_if_exposed
from sglang_lite.server.sglang import server_args

logger = logging.getLogger("sglang_lite.server")

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def application(
    engine: Engine, settings: ServerSettings, token: str = "", tracer: Tracer | None = None
) -> Starlette:
    """Creates the ASGI application that serves an engine.

    Args:
        token: token of the playground's page; with "", there is no page.
        tracer: tracer for spans of requests; None for no spans.
    """
    gate = AccessControl(settings, token)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.service = service = Service(engine, settings, tracer)
        await service.start()
        async with _grpc_service_running(service, gate):
            yield
        await service.stop()

    def service() -> Service:
        found: Service = app.state.service
        return found

    endpoints = [
        (route, Endpoint(route, service, gate))
        for route in (*ROUTES, *(playground.ROUTES if token else ()))
    ]
    app = _Application(
        {
            (method, route.path): endpoint
            for route, endpoint in endpoints
            if "{"
            not in route.path  # else a request for the pattern itself would have no parameters
            for method in route.methods
        },
        settings.allowed_origin,
        routes=[
            StarletteRoute(route.path, endpoint, methods=list(route.methods))
            for route, endpoint in endpoints
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _routing_error_response},
    )
    app.state.gate = gate
    return app


@contextlib.asynccontextmanager
async def _grpc_service_running(service: Service, gate: AccessControl) -> AsyncIterator[None]:
    """Serves SGLang's gRPC service within the context, if the settings ask for it."""
    if service.settings.grpc_port is None:
        yield
        return
    from sglang_lite.server.grpc_service import serve_grpc

    server, service.grpc_port = await serve_grpc(service, gate, service.settings.grpc_port)
    logger.info("Serving gRPC at %s:%d", service.settings.host, service.grpc_port)
    try:
        yield
    finally:
        await server.stop(None)


def _check_grpc(settings: ServerSettings) -> None:
    """Raises an error before the model is loaded if the settings ask for gRPC and it can't be
    served.
    """
    if settings.grpc_port is None:
        return
    try:
        from sglang_lite.server import grpc_service  # noqa: F401 # is the package installed?
    except ModuleNotFoundError as error:
        hint = "pip install 'sglang-lite[grpc]'"
        raise CapabilityError("grpc_port needs gRPC.", parameter="grpc_port", hint=hint) from error
    bind_socket(settings.host, settings.grpc_port, "--grpc-port").close()


class _Application(Starlette):
    """Starlette application that looks up paths without parameters in a table. Starlette itself
    would try one route after another and pass through layers of error handling, which endpoints
    don't need. That would take longer than handling a small request.

    Args:
        endpoints: endpoints by method and path.
        origins: origins of web pages whose browsers may read answers (CORS).
        settings: arguments of Starlette's application.
    """

    def __init__(
        self, endpoints: Mapping[tuple[str, str], Endpoint], origins: Sequence[str], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._endpoints = endpoints
        self._outer: ASGIApp = self._dispatch_request
        if origins:
            shown = ["x-request-id", "retry-after", UNUSED]
            self._outer = CORSMiddleware(
                self._dispatch_request,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=shown,
                allow_private_network=True,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outer(scope, receive, send)

    async def _dispatch_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = (
            self._endpoints.get((scope["method"], scope["path"]))
            if scope["type"] == "http"
            else None
        )
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            scope["app"] = self
            await endpoint(scope, receive, send)


async def _routing_error_response(request: Request, error: Exception) -> Response:
    """Answers an error of the router itself: an unknown path, or a method that the path doesn't
    have.
    """
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    refused: SglError = NotFoundError(
        f"the path {path!r} does not exist.", hint="/openapi.json lists all paths."
    )
    if error.status_code == 405:
        refused = MethodError(f"{path!r} does not accept {request.method}.")
    elif error.status_code != 404:
        refused = BackendError(str(error.detail))
    elif absent := unsupported_path_error(path):
        refused = absent
    request_id = read_or_create_request_id(request)
    response = error_response(refused, _protocol_for_path(path), request_id)
    request.app.state.service.metrics.count_response(
        OTHER_ROUTE, request.method, response.status_code, ""
    )
    response.headers.update({**(error.headers or {}), "x-request-id": request_id})
    if error.status_code == 405:
        response.headers["allow"] = ", ".join(_allowed_methods_for_path(request))
    return response


def _allowed_methods_for_path(request: Request) -> list[str]:
    """Returns the methods of all routes that match a request's path. Starlette names only the
    methods of the first route. If a route without parameters has this path, routes with parameters
    are ignored, as in the OpenAPI document.
    """
    routes = [
        route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE
    ]
    fixed = [route for route in routes if route.path == request.url.path]
    return sorted(set().union(*(route.methods for route in fixed or routes)))


def _protocol_for_path(path: str) -> Protocol:
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith("/api/"):
        return "ollama"
    return "openai" if path.startswith("/v1/") else "native"


def print_line(line: str) -> None:
    """Prints a line and flushes it, since the reader may be a pipe."""
    print(line, flush=True)


def serve(
    settings: ServerSettings,
    engine_settings: Mapping[str, UserValue],
    announce: Callable[[str], object] = print_line,
    listening: socket.socket | None = None,
) -> int:
    """Runs the server until SIGTERM or SIGINT. Open requests may then continue for up to `drain_s`.
    A second signal ends them immediately.

    Args:
        settings: settings of the server.
        engine_settings: keywords of `Engine`.
        announce: function called with one line of text when the server can be reached, and with
            another that has the address of the playground, if there is one.
        listening: bound socket to use instead of one with the address of the settings.

    Returns:
        The exit status.
    """
    listening = listening or bind_socket(settings.host, settings.port)
    log.configure(settings)
    warn_if_exposed(settings)
    raise_open_file_limit(settings.max_connections)
    host, port = listening.getsockname()[:2]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(listening))
        _check_grpc(settings)
        tracer = None
        if settings.enable_trace:
            tracer = stack.enter_context(
                export_spans(settings.otlp_traces_endpoint, f"{host}:{port}")
            )
        engine = stack.enter_context(
            Engine(**server_args.translate_engine_settings(engine_settings))
        )
        token = secrets.token_urlsafe(16) if settings.has_playground else ""
        server = HttpServer(application(engine, settings, token, tracer), settings)
        with contextlib.suppress(SglError):  # the first conversation reports the error
            engine.chat_template()  # imports the template engine
        gc.collect()
        # loaded objects stay alive: a collector's pass over them takes as long as a hundred
        # requests
        gc.freeze()
        listening.listen(2048)
        announce(
            f"Serving {settings.served_model_name or engine.model_name} at {settings.scheme}://{host}:{port}"
        )
        if token:
            announce(f"Playground: {settings.scheme}://{host}:{port}/?token={token}")
        server.run(sockets=[listening])
    return 0
