"""HTTP client of a server: connection pools, streams of server-sent events, and conversion of
failures into our errors.

Independent of any protocol on top of HTTP: callers know what bodies, answers and events mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import ssl
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit
from weakref import WeakKeyDictionary

import httpx2

from sglang_lite import errors
from sglang_lite.lang.backend.http.connection_pool import pool_arguments
from sglang_lite.lang.backend.http.rate_limit import retry_after
from sglang_lite.lang.concurrency.loop import current_deadline
from sglang_lite.lang.concurrency.loop_end import Handle, close_with_loop
from sglang_lite.protocol import (
    BackendError,
    EngineClosedError,
    OverloadedError,
    ParameterError,
    RequestAbortedError,
    RequestTimeoutError,
    SglError,
)
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.wire.long_texts import KEEP, replace_long_schemas

MAX_EVENT_BYTES: Final = 1 << 28
_DONE = "[DONE]"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
_CONNECT_S = 10.0
_JSON = {"Content-Type": "application/json"}
_UNKNOWN_TEXT = 424  # status of a request that names a schema by a hash unknown to the server
_LOST_WORKER_STATUSES = frozenset({500, 502, 503, 504})  # sent by gateways that lost their worker


LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")  # reached without the environment's proxies


class LostConnectionError(BackendError):
    """Raised if a connection breaks, or if a gateway reports that its server is gone. The request
    may be repeated.
    """

    retryable = True


def trace_headers() -> dict[str, str]:
    """Returns headers that name the current OpenTelemetry span to a server. They are empty without
    a span or if this process doesn't use OpenTelemetry.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.propagate import inject

    headers: dict[str, str] = {}
    inject(headers)
    return headers


class Retries:
    """Retries of one request, with exponentially growing pauses. The client's setting `retries`
    limits the number of retries in a row.

    Args:
        server: server that the request is sent to.
    """

    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._closings = server.closings
        self._retried = 0

    def reset_retry_count(self) -> None:
        self._retried = 0

    async def pause_before_retry(self, error: BackendError) -> None:
        """Pauses before the next attempt, at least as long as the server asks. Raises the error of
        the last attempt if no retries are left, if the server's pause would exceed the timeout, or
        if the connections have been closed.
        """
        if self._retried >= self._server.retries or self.connections_closed:
            raise error
        retry_after = error.retry_after or 0.0
        deadline = current_deadline.get()
        remaining = math.inf if deadline is None else deadline - time.monotonic()
        if retry_after > min(remaining, self._server.timeout_s or math.inf):
            allowed = f"The server allows another try after {retry_after:g} s"
            error.hint = f"{allowed}, but the timeout ends before that, so it was not tried again."
            raise error
        self._retried += 1
        pause = min(_FIRST_PAUSE_S * 2 ** (self._retried - 1), _LONGEST_PAUSE_S)
        # Random, because otherwise all branches of a batch would retry at the same time.
        await asyncio.sleep(retry_after + pause * random.uniform(0.5, 1.0))
        if self.connections_closed:
            raise error

    @property
    def connections_closed(self) -> bool:
        """True if the connections were closed after the request began. No new connection may then
        be opened for it.
        """
        return self._server.closings != self._closings


def split_address(url: UserValue) -> SplitResult:
    """Splits the address of a server into its parts.

    Raises:
        ParameterError: the address is not an HTTP address.
    """
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ParameterError(
            "base_url",
            f"{url!r:.200} is not an address.",
            hint='Use one like "http://127.0.0.1:30000".',
        )
    return parts


def _create_tls_context(file: str) -> ssl.SSLContext:
    """Creates a TLS context that trusts the certificate authorities in a file."""
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:  # from the file or its contents
        problem = (
            f"{file} has no certificate authorities that can be read: {error.strerror or error}."
        )
        raise ParameterError("verify", problem, hint="Give a PEM file of certificates.") from error


class ServerClient:
    """Client of an HTTP server, with one connection pool per event loop.

    Args:
        url: address of the server.
        api_key: key that is sent with every request, or None.
        verify: TLS verification: False for none, or the path of a file of certificate authorities.
        timeout_s: longest wait for the next bytes of an answer, in seconds, or None for no limit.
        retries: number of retries of a lost request.

    Attributes:
        url, timeout_s, retries: as given.
        names_texts: whether the server keeps long schemas, so that they are sent only once.
        closings: number of times that the connections were closed.

    Raises:
        ParameterError: the address is not an HTTP address, or the file has no certificate
            authorities.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        verify: bool | str | None,
        timeout_s: float | None,
        retries: int,
    ) -> None:
        parts = split_address(url)
        trusted = _create_tls_context(verify) if isinstance(verify, str) else verify is not False
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.retries = retries
        self.closings = 0
        self.names_texts = False
        self._key = api_key
        self._settings: dict[str, Any] = {
            "base_url": self.url,
            "headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            # Without TLS, no certificate authorities are read, which takes 30 ms of processor time
            # for each client.
            "verify": parts.scheme == "https" and trusted,
            "timeout": httpx2.Timeout(timeout_s, connect=_CONNECT_S),
            "limits": httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            "trust_env": parts.hostname not in LOCAL_HOSTS,
        }
        self._clients: WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx2.AsyncClient, Handle]
        ] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    def _client_of_loop(self) -> httpx2.AsyncClient:
        """Returns the HTTP client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            pool = pool_arguments(
                self._settings["verify"],
                max_connections=None,
                trust_env=self._settings["trust_env"],
            )
            client = httpx2.AsyncClient(**self._settings, **pool)
            self._clients[loop] = client, close_with_loop(client.aclose)
        return self._clients[loop][0]

    def run_in_background(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Starts a background task that no caller awaits. Closing the connections cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Closes the connections of the running event loop and cancels its background tasks."""
        self.closings += 1
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        for task in tasks:  # first, because a connection that is still being opened is in no pool
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        _, handle = self._clients.pop(loop, (None, None))
        if handle is not None:
            await handle.aclose()

    # ------------------------------------------------------------------------------------- requests

    def request_blocking(self, method: str, path: str, body: object = None) -> httpx2.Response:
        """Sends one request and blocks until the response has arrived.

        Raises:
            SglError: no response arrives, or the response is an error.
        """
        with self._translate_http_errors(), httpx2.Client(**self._settings) as client:
            response = client.request(method, path, json=body)
        if response.status_code >= 400:
            raise self._response_error(response.status_code, response.content, response.headers)
        return response

    def request_status(self, method: str, path: str) -> int:
        """Sends one request, blocks, and returns the response's status code. Raises SglError if no
        response arrives.
        """
        with self._translate_http_errors(), httpx2.Client(**self._settings) as client:
            return client.request(method, path).status_code

    async def post(self, path: str, body: object, *, once: bool = False) -> Any:  # any JSON value
        """Sends a request and returns its JSON answer. A lost request is sent again, unless it must
        not be applied twice (`once`).

        Raises:
            SglError: the server reports an error, or sends no answer.
        """
        retries = Retries(self)
        while True:
            try:
                with self._translate_http_errors():
                    for content, more in self._encode_request_bodies(body):
                        headers = {**_JSON, **trace_headers(), **more}
                        response = await self._client_of_loop().post(
                            path, content=content, headers=headers
                        )
                        if response.status_code != _UNKNOWN_TEXT:
                            break
                if response.status_code >= 400:
                    raise self._response_error(
                        response.status_code, response.content, response.headers
                    )
                return self._parse_json(response.content)
            except RETRYABLE_ERRORS as error:
                if once:
                    raise
                await retries.pause_before_retry(error)

    async def stream_events(
        self,
        path: str,
        body: object,
        began: Callable[[Mapping[str, str]], object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[str, None]:
        """Yields the data of each server-sent event, up to the event `[DONE]`. Closing the
        generator early closes the connection.

        Args:
            began: callback for the response headers, before the first event.
            headers: further headers of the request; None for those of the current span.

        Raises:
            LostConnectionError: the stream broke off.
            SglError: the server reports an error.
        """
        headers = trace_headers() if headers is None else headers
        with self._translate_http_errors():
            attempts = self._encode_request_bodies(body)
            while attempts:
                content, more = attempts.pop(0)
                sent = {**_JSON, **headers, **more}
                async with self._client_of_loop().stream(
                    "POST", path, content=content, headers=sent
                ) as response:
                    if response.status_code == _UNKNOWN_TEXT and attempts:
                        continue
                    if response.status_code >= 400:
                        raise self._response_error(
                            response.status_code, await response.aread(), response.headers
                        )
                    if began is not None:
                        began(response.headers)
                    reader = EventReader()
                    async with contextlib.aclosing(response.aiter_bytes()) as pieces:
                        async for piece in pieces:
                            for data in reader.feed(piece):
                                if data == _DONE:
                                    return
                                yield data
                    problem = f"{self.url}: the stream ended before the answer was complete."
                    raise LostConnectionError(problem, hint="Try again.")

    def _encode_request_bodies(self, body: object) -> list[tuple[bytes, dict[str, str]]]:
        """Returns the JSON bodies to try in order, each with its headers. The first may replace
        long schemas by hashes, if the server may know them already. The last is always complete.
        """
        whole = json.dumps(
            body, ensure_ascii=False, separators=(",", ":"), allow_nan=False
        ).encode()
        short = replace_long_schemas(whole) if self.names_texts else whole
        return [(short, {}), *([] if short == whole else [(whole, {KEEP: "1"})])]

    async def stream_json(self, path: str, body: object) -> AsyncGenerator[dict[str, Json], None]:
        """Yields the events of a stream, each as a JSON object.

        Raises:
            SglError: the stream broke off, or the server or an event reports an error.
        """
        async with contextlib.aclosing(self.stream_events(path, body)) as events:
            async for data in events:
                yield self.parse_event(data)

    def parse_event(self, data: str) -> dict[str, Json]:
        """Parses the data of an event as a JSON object. Raises SglError if it is not an object or
        reports an error.
        """
        content = self._parse_json(data)
        if not isinstance(content, dict):
            raise self._unreadable_error(f"an event is {data[:80]!r}")
        if "error" in content:
            error = content["error"]
            code = error.get("code") if isinstance(error, dict) else None
            raise self._response_error(code if isinstance(code, int) else 500, data)
        return content

    # --------------------------------------------------------------------------------------- errors

    @contextlib.contextmanager
    def _translate_http_errors(self) -> Iterator[None]:
        """Converts exceptions of the HTTP library raised in the `with` block into our errors."""
        try:
            yield
        except httpx2.ReadTimeout as error:
            problem = f"{self.url} sent nothing within the timeout."
            raise RequestTimeoutError(problem, hint="Raise timeout=.") from error
        except (httpx2.TransportError, httpx2.StreamError) as error:
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            hint = "Check base_url, and that the server runs."
            if "CERTIFICATE_VERIFY_FAILED" in why:
                hint = "Give verify= a file with the authority that has signed the server's certificate."
            raise LostConnectionError(
                f"{self.url}: the connection failed ({why}).", hint=hint
            ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreadable_error(str(error)) from error

    def _unreadable_error(self, what: str) -> BackendError:
        return BackendError(
            f"{self.url} sent an answer that can't be read: {self._redact_key(what)}.",
            hint="Check what listens there.",
        )

    def _parse_json(self, data: bytes | str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._unreadable_error(f"{error}, in {data[:80]!r}") from None

    def _response_error(
        self, status: int, data: bytes | str, headers: Mapping[str, str] | None = None
    ) -> SglError:
        """Returns the error that a server's response reports, in any of the known formats."""
        error = self._parse_error_report(status, data)
        if isinstance(error, BackendError):
            error.retry_after = retry_after(headers or {})
        return error

    def _parse_error_report(self, status: int, data: bytes | str) -> SglError:
        report: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            report = json.loads(data)
        if isinstance(report, dict):
            report = report.get("error", report)
        if not isinstance(report, dict):
            content = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
            report = {"message": report if isinstance(report, str) else content}
        message = self._redact_key(str(report.get("message") or f"HTTP {status}")[:2000])
        name = report.get("err_type")
        typed = typed_error(name, message, report.get("param")) if isinstance(name, str) else None
        if typed is not None:
            return typed
        text = f"{self.url}: {message} (HTTP {status})"
        # A server of this package sends 500 with the class of an error, and has not lost its
        # worker.
        if status in _LOST_WORKER_STATUSES and not (status == 500 and isinstance(name, str)):
            return LostConnectionError(text, hint="Check the server's log.")
        if status == 429:
            return OverloadedError(text, hint="Run fewer programs at a time (num_threads=).")
        return BackendError(
            text, hint=_HINTS.get(status, "Correct the part of the request that the message names.")
        )

    def _redact_key(self, text: str) -> str:
        return text if self._key is None or len(self._key) < 8 else text.replace(self._key, "…")


_HINTS = {
    401: "Check api_key=.",
    403: "Check the permissions of api_key=.",
    404: "Check base_url=.",
    405: "Check base_url=.",
}


def typed_error(name: str, message: str, parameter: object = None) -> SglError | None:
    """Creates an error of the class that a server names. Returns None for a class that requests
    never raise.

    Args:
        parameter: name of the parameter in the server's report, if any.
    """
    kind = getattr(errors, name, None)
    if kind is ParameterError and isinstance(parameter, str):
        return ParameterError(parameter, message.removeprefix(f"{parameter}: "))
    if kind is EngineClosedError:
        return LostEngineError(message)
    if kind in _PLAIN:
        error: SglError = kind(message)
        return error
    return None


class LostEngineError(EngineClosedError):
    """Raised if a server's engine has died. The request may be repeated, because the engine may be
    restarted.
    """

    retryable = True


RETRYABLE_ERRORS = (
    LostConnectionError,
    LostEngineError,
    OverloadedError,
)  # errors after which the same request may be sent again
_PLAIN = frozenset({
    errors.CapabilityError, errors.ConstraintError, errors.ModelError, errors.ProgramError, errors.TemplateError,
    OverloadedError, RequestAbortedError, RequestTimeoutError,
})  # fmt: skip


class EventReader:
    """Parser of server-sent events (HTML Living Standard, 9.2). The bytes may be cut at any
    position. Comments are ignored.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._size = 0
        self._after_return = False
        self._first = True  # no line has ended yet; the first one may begin with a byte order mark

    def feed(self, chunk: bytes) -> list[str]:
        """Returns the data of the events that these bytes complete.

        Raises:
            BackendError: an event is larger than MAX_EVENT_BYTES.
        """
        if not chunk:
            return []
        half = self._after_return
        self._after_return = chunk.endswith(b"\r")
        if half and chunk.startswith(b"\n"):  # rest of a line ending that was cut in two
            chunk = chunk[1:]
        found = []
        *lines, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._line += line
            text = self._line.decode("utf-8", "replace")
            self._line.clear()
            if self._first:
                text = text.removeprefix("\ufeff")
                self._first = False
            if text:
                name, _, value = text.partition(":")
                if name == "data":
                    value = value.removeprefix(" ")
                    self._data.append(value)
                    self._size += len(value)
            elif self._data:
                data = "\n".join(self._data)
                found += [data] if data else []
                self._data = []
                self._size = 0
        self._line += rest
        if len(self._line) + self._size > MAX_EVENT_BYTES:
            raise BackendError(f"an event has more than {MAX_EVENT_BYTES:,} bytes.")
        return found
