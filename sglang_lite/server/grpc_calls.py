"""Functions that all gRPC calls share: they check keys and limits, write a log line, record counts
and spans, and set the status of an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from starlette.requests import Request

from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import ParameterError, SglError
from sglang_lite.server import native
from sglang_lite.server.async_engine import key_in_use
from sglang_lite.server.endpoint import AccessControl, Route
from sglang_lite.server.errors import RateLimitError, find_error_status
from sglang_lite.server.service import Service

logger = logging.getLogger("sglang_lite.server")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_SCHEDULER = "sglang.grpc.scheduler.SglangScheduler"
_OF_KEY = Route("gRPC", native.generate, "Any call", protocol="native")


class GrpcCalls:
    """Checks, logs and counts the gRPC calls of a server.

    Args:
        gate: keys and counts of open requests of the HTTP server.
    """

    def __init__(self, service: Service, gate: AccessControl) -> None:
        self._service = service
        self._gate = gate
        self._connections = _Connections(service.settings.max_connections_per_client)

    @contextlib.asynccontextmanager
    async def guard_grpc_call(
        self,
        call: str,
        context: grpc.aio.ServicerContext,
        route: Route = _OF_KEY,
        *,
        request_id: str = "",
        counts: bool = False,
        of: str = _SCHEDULER,
    ) -> AsyncIterator[None]:
        """Checks a call's key and limits, and logs the call at the end of the context. If the block
        fails, ends the call with an error status.

        Args:
            call: name of the call.
            route: route whose access rights apply.
            counts: whether the call counts as an open request.
            of: full name of the call's service.
        """
        headers = {
            name.lower(): value
            for name, value in context.invocation_metadata()
            if isinstance(value, str)
        }
        encoded = [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()
        ]
        started = time.perf_counter()
        request_id = request_id or random_id()
        key = ""
        status = 200
        text = ""
        told: dict[str, str | int] = {"sglang_lite.request_id": request_id}
        with self._open_call_span(of, call, headers, told) if counts else contextlib.nullcontext():
            try:
                key = self._gate.authenticate_request(
                    Request({"type": "http", "headers": encoded, "query_string": b""}), route
                )
                with (
                    self._connections.count_call(context.peer()),
                    self._gate.count_open_request(key, counts),
                ):
                    if counts:
                        self._service.count_request(key)
                    key_in_use.set(key)
                    yield
            except SglError as error:
                status = find_error_status(error).status
                text = str(error)
            except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
                status = 499
                raise
            # a bug of this package: the client gets a status, and the server continues
            except Exception:
                logger.exception("the gRPC call %s failed", call)
                status = 500
                text = "the server failed. See its log."
            finally:
                code = (
                    grpc.StatusCode.OK
                    if status == 200
                    else _CODES.get(status, grpc.StatusCode.INTERNAL)
                )
                told["rpc.grpc.status_code"] = code.value[0]
                self._log(call, request_id, status, key, time.perf_counter() - started)
        if text:
            await context.abort(code, text)

    def _open_call_span(
        self, service: str, call: str, headers: dict[str, str], told: dict[str, str | int]
    ) -> contextlib.AbstractContextManager[None]:
        if self._service.spans is None:
            return contextlib.nullcontext()
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": call}
        return self._service.spans.open_span(f"{service}/{call}", attributes, headers, told)

    def _log(self, call: str, request_id: str, status: int, key: str, took: float) -> None:
        """Logs and counts a gRPC call like an HTTP request. `status` is the corresponding HTTP
        status.
        """
        ms = round(took * 1000, 1)
        line = {
            "method": "gRPC",
            "route": f"/{call}",
            "status": status,
            "ms": ms,
            "request_id": request_id,
        }
        logger.info("%s %s %d %.1f ms %s", *line.values(), extra={"request": line})
        self._service.metrics.count_response(f"/{call}", "gRPC", status, key)
        self._service.metrics.observe_response_time(f"/{call}", took)


def refuse_fields(request: Any, *names: str) -> None:  # of the protocol
    """Raises ParameterError if one of the fields of a message is set."""
    given = {field.name for field, _ in request.ListFields()}
    for name in names:
        if name in given:
            raise ParameterError(name, "is not supported by this server.", hint="Leave it out.")


class _Connections:
    """Counts the connections of each client that have open calls. Idle connections don't count:
    gRPC doesn't report them, and closes them itself.

    Args:
        most: most connections of a client's address.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # numbers of calls by address and peer
        self._calls: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @contextlib.contextmanager
    def count_call(self, peer: str) -> Iterator[None]:
        """Counts a call within the context. Raises RateLimitError if its client has too many
        connections.

        Args:
            peer: address and port of the connection, as gRPC writes them.
        """
        address = peer.rpartition(":")[0]
        calls = self._calls[address]
        if peer not in calls and len(calls) >= self._most:
            told = f"{self._most:,} connections of this client have calls, which is the limit."
            raise RateLimitError(told, hint="Send calls over one connection.")
        calls[peer] += 1
        try:
            yield
        finally:
            calls[peer] -= 1
            if not calls[peer]:
                del calls[peer]
            if not calls:
                del self._calls[address]
