"""The ASGI endpoint that serves any route, and the `Route` record that describes one."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import BackendError, SglError
from sglang_lite.protocol.anything import Json
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.async_engine import key_in_use
from sglang_lite.server.errors import (
    AuthenticationError,
    ForbiddenError,
    Protocol,
    RateLimitError,
    encode_error_content,
    error_headers,
    find_error_status,
)
from sglang_lite.server.fields import Fields
from sglang_lite.server.http.body import parse_object, read_bytes
from sglang_lite.server.http.disconnect import run_until_disconnect
from sglang_lite.server.reader import RequestReader
from sglang_lite.server.service import Service
from sglang_lite.server.settings import ServerSettings
from sglang_lite.wire.limits import Limits
from sglang_lite.wire.long_texts import KEEP

logger = logging.getLogger("sglang_lite.server")
R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")
ANTHROPIC_VERSION = "anthropic-version"  # header of every request of Anthropic's clients
UNUSED = "x-unused-fields"  # header that names the fields of a request that have no effect
_MAX_ITEMS = 2**20
_SHORT = 4096  # bytes; reading a shorter body takes less time than switching threads
_QUERY_NEUTRAL = ("beta",)  # Anthropic's client sets it along with fields that are known by name


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """HTTP request, as handlers see it.

    Attributes:
        data: body of the request.
        path, query: path and query parameters of the address.
        headers: headers of the request, by lower-case names.
        request_id: value of `X-Request-Id`, or a new id.
        key: API key of the request; "" if none is required.
        limits: limits for parsing the body.
        unused: names of fields without effect, which are reported in a header of the response.
        reports: True if unknown fields are also reported there; False if they are refused.
    """

    data: bytes
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    request_id: str
    key: str
    limits: Limits
    unused: list[str] = field(default_factory=list)
    reports: bool = False

    def parse_body(self) -> dict[str, Json]:
        """Returns the body as plain data. Raises WireError if the body isn't a JSON object."""
        return parse_object(self.data, self.limits)

    def read_fields(self, fields: Fields[R]) -> R:
        """Returns the body as a record.

        Raises:
            WireError: the body isn't a JSON object.
            ParameterError: see `Fields.parse_record`.
        """
        return fields.parse_record(self.parse_body(), self.unused if self.reports else None)


@dataclass(frozen=True, slots=True)
class BodyTask:
    """Task for a process that reads bodies: a function, and the body that it reads.

    Attributes:
        function: takes a reader, a request that has only its body, and `more`.
        data, limits, reports: as in HttpRequest.
        more: further arguments of the function.
    """

    function: Callable[..., object]
    data: bytes
    limits: Limits
    reports: bool
    more: tuple[object, ...]


async def read_body(
    service: Service,
    call: HttpRequest,
    function: Callable[..., T],
    more: tuple[object, ...] = (),
    size: int = 0,
) -> T:
    """Calls a function that reads a request's body, and returns its result. Long bodies are read on
    another thread, and bodies larger than `large_body_kb` in another process.

    Args:
        function: function at the top level of a module that takes a reader, the request and `more`.
            It uses nothing else, and appends to the request's `unused`.
        more: further arguments of the function.
        size: size in bytes of the data that the function reads besides the body.

    Raises:
        SglError: the error of the function.
    """
    size += len(call.data)
    if size > service.settings.large_body_kb * 1024:
        found: T
        found, unused = await service.reader_pool.run_task(
            BodyTask(function, call.data, call.limits, call.reports, more)
        )
        call.unused.extend(unused)
        return found
    if size > _SHORT:
        return await asyncio.to_thread(function, service.reader, call, *more)
    return function(service.reader, call, *more)


async def read_record(service: Service, call: HttpRequest, fields: Fields[R]) -> R:
    """Returns the body as a record: see `HttpRequest.read_fields`."""
    return await read_body(service, call, _read_call_fields, (fields,))


def _read_call_fields(_: RequestReader, call: HttpRequest, fields: Fields[R]) -> R:
    return call.read_fields(fields)


def drop_ignored_priorities(
    service: Service, call: HttpRequest, requests: list[GenerateRequest]
) -> list[GenerateRequest]:
    """Returns the requests unchanged if the engine's policy is "priority". Otherwise sets their
    priorities to 0 and, if one was set, reports the field as unused.
    """
    if service.engine.config.policy == "priority" or not any(
        request.priority for request in requests
    ):
        return requests
    call.unused.append("priority")
    return [replace(request, priority=0) for request in requests]


Handler: TypeAlias = Callable[[Service, HttpRequest], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """Route of the server.

    Attributes:
        path: path, with parameters as `{name}`.
        handler: function that answers a request.
        summary: description for the OpenAPI document.
        methods: HTTP methods of the route.
        protocol: protocol whose error format is used.
        query: names of the query parameters.
        fields: fields of the body; None for a route without body, or whose handler parses the body.
        body_type: media type of the body.
        streams: True if the answer may be a stream of events.
        media_type: media type of the answer.
        access: what a request needs. "open": nothing. "key": an API key, if there are any. "admin":
            the administrator's key or, if there is none, an API key. "owner": the administrator's
            key, because the request names folders of this machine; if there are no keys at all, a
            local server accepts it. "page": the token of the playground's page.
        counts_as_open: True if its requests count as open requests.
        acts: True if even a GET has side effects, so a web page must not be able to trigger it, for
            example with an `<img>` tag (CSRF).
    """

    path: str
    handler: Handler
    summary: str
    methods: tuple[str, ...] = ("POST",)
    protocol: Protocol = "native"
    query: tuple[str, ...] = ()
    fields: Fields[Any] | None = None
    body_type: str = "application/json"
    streams: bool = False
    media_type: str = "application/json"
    access: Literal["open", "key", "admin", "owner", "page"] = "key"
    counts_as_open: bool = False
    acts: bool = False


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a response with plain data or records as JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: SglError, protocol: Protocol, request_id: str) -> Response:
    """Returns the response for an error."""
    return json_response(
        encode_error_content(error, protocol, request_id),
        find_error_status(error).status,
        error_headers(error),
    )


class Endpoint:
    """ASGI application of a route: checks keys and limits, reads the body, calls the handler,
    answers errors, logs a line.

    Args:
        route: route to serve.
        service: function that returns the service; called for each request, because the service
            exists only after startup.
        gate: keys and counts of open requests, shared by all routes.
    """

    def __init__(self, route: Route, service: Callable[[], Service], gate: AccessControl) -> None:
        self._route = route
        self._service = service
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        request = Request(scope, receive)
        request_id = read_or_create_request_id(request)
        status = 0
        told: dict[str, str | int] = {"sglang_lite.request_id": request_id}  # of the request's span

        def count(status: int) -> None:
            metrics = self._service().metrics
            key = request.scope.get(_KEY, "")
            metrics.count_response(self._route.path, request.method, status, key)
            told["http.response.status_code"] = status

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                count(status)  # before the client sees it
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if self._service().shutting_down:  # the client's next request has to go elsewhere
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        path = self._route.path
        spans = self._service().spans
        polls = self._route.access == "open" or path in _POLLED
        try:
            attributes = {"http.request.method": request.method, "http.route": path}
            with (
                contextlib.nullcontext()
                if spans is None or polls
                else spans.open_span(f"{request.method} {path}", attributes, request.headers, told)
            ):
                try:
                    await self._authenticate_and_answer(request, request_id, send_with_id)
                finally:
                    if not status:
                        count(_CLIENT_LEFT)
        finally:
            took = time.perf_counter() - started
            level = logging.DEBUG if polls and status < 400 else logging.INFO
            line = {
                "method": request.method,
                "route": path,
                "status": status or _CLIENT_LEFT,
                "ms": round(took * 1000, 1),
                "request_id": request_id,
            }
            logger.log(level, "%s %s %d %.1f ms %s", *line.values(), extra={"request": line})
            self._service().metrics.observe_response_time(path, took)

    async def _authenticate_and_answer(self, request: Request, request_id: str, send: Send) -> None:
        route = self._route
        scope = request.scope
        receive = request.receive
        protocol = route.protocol
        if protocol == "openai" and ANTHROPIC_VERSION in request.headers:
            protocol = "anthropic"
        try:
            self._gate.check_host(request)
            key = request.scope[_KEY] = self._gate.authenticate_request(request, route)
            with self._gate.count_open_request(key, route.counts_as_open):
                service = self._service()
                if route.counts_as_open:
                    service.count_request(key)
                settings = service.settings
                most = int(settings.max_body_mb * 2**20)
                data = service.texts.expand_body(
                    await read_bytes(request, most, settings.body_timeout_s), most
                )
                if KEEP in request.headers:
                    service.texts.keep_schemas(data)
                call = HttpRequest(
                    data,
                    request.path_params,
                    request.query_params,
                    request.headers,
                    request_id,
                    key,
                    Limits(most, settings.max_depth, _MAX_ITEMS),
                    unused=[
                        name
                        for name in request.query_params
                        if name not in (*route.query, *_QUERY_NEUTRAL)
                    ],
                    reports=settings.unknown_fields == "report",
                )
                await run_until_disconnect(
                    self._send_handler_response(service, call, protocol, scope, receive, send),
                    receive,
                )
        except SglError as error:
            await error_response(error, protocol, request_id)(scope, receive, send)
        except ClientDisconnect:  # while the body was read
            pass

    async def _send_handler_response(
        self,
        service: Service,
        call: HttpRequest,
        protocol: Protocol,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        key_in_use.set(call.key)
        try:
            response = await self._route.handler(service, call)
        except SglError as error:
            response = error_response(error, protocol, call.request_id)
        # a bug of this package: the client gets status 500, and the server continues
        except Exception:
            logger.exception("request %s failed", call.request_id)
            failed = BackendError(
                "the server failed.",
                hint=f"See request {call.request_id} in the log of the server.",
            )
            response = error_response(failed, protocol, call.request_id)
        if call.unused:
            response.headers[UNUSED] = ", ".join(
                dict.fromkeys(map(_sanitise_header_value, call.unused))
            )[:1000]
            logger.warning(
                "request %s: these fields have no effect: %s",
                call.request_id,
                response.headers[UNUSED],
            )
        await response(scope, _wait_forever, send)


async def _wait_forever() -> Any:  # `run_until_disconnect` watches for the disconnection already
    await asyncio.Event().wait()


def read_or_create_request_id(request: Request) -> str:
    """Returns a request's `X-Request-Id`, or a new id if the header is missing or invalid."""
    given = request.headers.get("x-request-id", "")
    return (
        given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else random_id()
    )


def _sanitise_header_value(name: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in name[:100])


# routes that gateways poll; other clients poll open routes
_POLLED = ("/v1/loads", "/get_load")
_CLIENT_LEFT = 499  # nginx's status for a client that left before it was answered
_KEY = "sglang_lite.key"  # entry for the API key in a request's scope, once the key is checked
# headers with which browsers mark the requests of a page
_OF_PAGES = ("origin", "referer", "sec-fetch-site")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]+)?", re.IGNORECASE)


class AccessControl:
    """Keys that a server requires, host names under which it may be addressed, and limits on open
    requests, in total and for each key.

    Args:
        token: token of the playground's page; "" if there is none.
    """

    def __init__(self, settings: ServerSettings, token: str = "") -> None:
        self._token = token
        self._keys = settings.api_key
        self._admin = settings.admin_api_key
        self._scheme = settings.scheme
        self._is_local = settings.is_local
        self._most = settings.max_open
        self._most_per_key = settings.max_open_per_key
        self._hosts = {"localhost", *map(str.lower, settings.allowed_host)}
        self._origins = frozenset(settings.allowed_origin)
        self._checks_host = settings.is_local or bool(settings.allowed_host)
        self.open: Counter[str] = Counter()

    def check_host(self, request: Request) -> None:
        """Raises ForbiddenError if a request addresses the server by a name that isn't its own.
        This stops web pages whose name resolves to this machine (DNS rebinding) from using the
        server.
        """
        host = request.headers.get("host", "")
        if not self._checks_host or not host:  # browsers always send it
            return
        found = _HOST.fullmatch(host)
        name = found[1].lower() if found else ""
        if name not in self._hosts and not _is_address(name.strip("[]")):
            raise ForbiddenError(
                f"{host[:200]!r} is not a name of this server.",
                hint="Use localhost or an IP address, or start the server with --allowed-host and the name.",
            )

    def authenticate_request(self, request: Request, route: Route) -> str:
        """Returns the API key of a request, or "" if none is required.

        Raises:
            AuthenticationError: the key is missing or wrong.
            ForbiddenError: no key is required, and a web page sent the request; or only an
                administrator may send the request, and the server has no administrator key.
        """
        if route.access == "open":
            return ""
        if route.access == "page":
            self._check_playground_request(request)
            return ""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = (
            bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        )
        admin = [] if self._admin is None else [self._admin]
        taken = admin or list(self._keys)
        if route.access == "key":
            taken = [*self._keys, *admin] if self._keys else []
        valid = [key for key in taken if hmac.compare_digest(key.encode(), given.encode())]
        if taken and not valid:
            problem = "is not valid" if given else "is missing"
            raise AuthenticationError(
                f"the {'API' if route.access == 'key' or not admin else 'administrator'} key {problem}.",
                hint="Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
            )
        if route.access == "owner" and not admin and (taken or not self._is_local):
            raise ForbiddenError(
                "the request names folders of the server's machine, so only its administrator may send it.",
                hint="Start the server with --admin-api-key, and send that key.",
            )
        of_page = any(
            name in request.headers for name in (_OF_PAGES if route.acts else _OF_PAGES[:1])
        )
        if not taken and of_page and request.headers.get("origin") not in self._origins:
            raise ForbiddenError(  # otherwise, any page open in a browser on this machine could
                "requests from web pages need a key.",
                hint="Start the server with --api-key or --allowed-origin, or send the request from a program.",
            )
        return valid[0] if valid else ""

    def _check_playground_request(self, request: Request) -> None:
        """Raises an error unless the playground's own page sent the request, or the request opens
        that page.
        """
        origin = request.headers.get("origin")
        own = f"{self._scheme}://{request.headers.get('host')}"
        if origin is not None and origin != own and origin not in self._origins:
            raise ForbiddenError(
                "another page sent the request.",
                hint="Open the address that the server has printed, or start it with"
                " --allowed-origin and the page's.",
            )
        given = request.headers.get("x-token") or request.query_params.get("token", "")
        if not self._token or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise AuthenticationError(
                "the page's token is missing or wrong.",
                hint="Open the address that the server has printed.",
            )

    def count_open_request(self, key: str, counts_as_open: bool) -> _OpenCount:
        """Returns a context in which a request counts as open. Raises RateLimitError if too many
        are open.
        """
        if counts_as_open and self.open.total() >= self._most:
            raise RateLimitError(
                f"{self._most:,} requests are open, which is the limit.", hint="Try again later."
            )
        if counts_as_open and self.open[key] >= self._most_per_key:
            raise RateLimitError(
                f"{self._most_per_key:,} requests of this key are open, which is the limit.",
                hint="Try again later.",
            )
        return _OpenCount(self.open, key, int(counts_as_open))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(slots=True)
class _OpenCount:
    counts: Counter[str]
    key: str
    count: int

    def __enter__(self) -> None:
        self.counts[self.key] += self.count

    def __exit__(self, *_: object) -> None:
        self.counts[self.key] -= self.count
        if not self.counts[self.key]:
            del self.counts[self.key]
