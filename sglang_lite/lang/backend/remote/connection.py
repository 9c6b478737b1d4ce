"""Connection of a backend to its API. It has one client of the SDK per event loop, and a limit on
calls.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import re
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_lite.errors import Origin
from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.http.client import LOCAL_HOSTS, split_address
from sglang_lite.lang.backend.http.connection_pool import pool_arguments
from sglang_lite.lang.backend.http.rate_limit import RateLimit, shared_limit
from sglang_lite.lang.backend.remote import builtin_clients
from sglang_lite.lang.backend.remote.errors import ErrorTranslator
from sglang_lite.lang.concurrency.loop import executor_loop, is_on_executor_thread
from sglang_lite.lang.concurrency.loop_end import Handle, close_with_loop
from sglang_lite.protocol import BackendError, ParameterError
from sglang_lite.protocol.anything import Foreign

Errors = type[Exception] | tuple[type[Exception], ...]
ResponseHook = Callable[[int, Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class Connector:
    """Factory of clients for an SDK.

    Attributes:
        package: name of the SDK's package.
        extra: name of this package's extra that installs the SDK.
        make_client: creates a client. Arguments: the SDK's module; `on_response`, a callback for
            the status and headers of each answer; the previous client, or None.
        errors: returns the SDK's error classes, given its module: base classes, time limits, failed
            connections.
        existing_client: client that the user has created and will close, or None.
        close: closes a client.
        major: major version of the SDK that works. Without it, or with another one, the built-in
            client is used. None if there is no built-in client for this SDK.
    """

    package: str
    extra: str
    make_client: Callable[[Any, ResponseHook, Any], Any]
    errors: Callable[[Any], tuple[Errors, Errors, Errors]]
    existing_client: object = None
    close: Callable[[Any], Coroutine[Any, Any, object]] = lambda client: client.close()
    major: int | None = None


class ApiConnection:
    """Connection of a backend to its API.

    Attributes:
        sdk: module of the SDK, or that of the built-in clients, which has the same names.
        latest_client: client that was created last.
        limit: limit on the calls.
        server: address that the client sends to, as text.
    """

    def __init__(self, backend: str, connector: Connector, limit: RateLimit | None) -> None:
        self.sdk = _import_sdk(backend, connector)
        self._connector = connector
        try:
            self.latest_client: Any = connector.make_client(
                self.sdk, self._make_response_hook(), None
            )
        except connector.errors(self.sdk)[0] as error:
            raise ParameterError(backend, str(error)) from error
        self._loop: asyncio.AbstractEventLoop | None = None  # loop that the client is open for
        self._used = False
        self._handle: Handle | None = None
        self.server = str(getattr(self.latest_client, "base_url", ""))
        key = getattr(self.latest_client, "api_key", None)
        self.limit = (
            shared_limit(f"{connector.package} {self.server}", key) if limit is None else limit
        )

    def error_translator(self, name: str, origin: Origin) -> ErrorTranslator:
        """Creates the translator of the SDK's errors."""
        return ErrorTranslator(
            name, origin, *self._connector.errors(self.sdk), self._client_secrets
        )

    def client(self) -> Foreign:
        """Returns the client for the running event loop. A client that was used on another loop,
        for example before a fork of the process, is replaced by a new one.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return self.latest_client
        if self._used:
            self.latest_client = self._connector.make_client(
                self.sdk, self._make_response_hook(), self.latest_client
            )
        if self.latest_client is not self._connector.existing_client:
            self._handle = close_with_loop(partial(self._connector.close, self.latest_client))
        self._loop = loop
        self._used = True
        return self.latest_client

    def close(self) -> None:
        """Closes the connections. The next call of `client` opens new ones."""
        if self.latest_client is self._connector.existing_client:
            return
        loop = self._loop
        self._loop = None
        handle = self._handle
        self._handle = None
        if (
            handle is not None
            and loop is not None
            and loop is executor_loop()
            and not is_on_executor_thread()
        ):
            asyncio.run_coroutine_threadsafe(_close_handle(handle), loop).result()

    def _make_response_hook(self) -> ResponseHook:
        """Returns a callback that reports each answer's status and headers to the rate limit. The
        callback holds only a weak reference, so it does not keep this object alive.
        """
        mine = weakref.ref(self)

        def on_response(status: int, headers: Mapping[str, str]) -> None:
            connection = mine()
            if connection is not None:
                connection.limit.update_from_response(status, headers)

        return on_response

    def _client_secrets(self) -> Iterator[object]:
        for name in ("api_key", "auth_token", "admin_api_key"):
            yield getattr(self.latest_client, name, None)


def _import_sdk(backend: str, connector: Connector) -> Any:  # module
    """Imports the SDK, or the built-in clients if the SDK is missing or has another major version.

    Raises:
        BackendError: the SDK is missing, and there is no built-in client.
    """
    has_builtin = connector.major is not None
    if has_builtin and _installed_version(connector.package) != connector.major:
        return builtin_clients
    try:
        return importlib.import_module(connector.package)
    except ImportError as error:
        if has_builtin:
            return builtin_clients
        raise BackendError(
            f"{backend} needs the {connector.package} SDK.",
            hint=f"pip install 'sglang-lite[{connector.extra}]'",
        ) from error


def _installed_version(package: str) -> int:
    """Returns the major version of a package, or 0 if it is not installed or has no such version."""
    try:
        version = str(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return 0
    found = re.match(r"(?:\d+!)?(\d+)", version)  # after an epoch, if any
    return int(found[1]) if found else 0


async def _close_handle(handle: Handle) -> None:
    await handle.aclose()


def sdk_client_factory(
    kind: str, args: Sequence[Foreign], options: Mapping[str, Foreign], client: object
) -> Callable[..., Foreign]:
    """Returns a factory of clients. It works for the SDKs of both OpenAI and Anthropic, and for the
    built-in clients.

    Args:
        kind: name of the client's class.
        args, options: arguments of the client.
        client: existing client to use instead. On another event loop, a copy of it with new
            connections is used.

    Raises:
        ParameterError: both a client and arguments for one are given, or `base_url` is not an HTTP
            address.
    """
    url = options.get("base_url")
    trust_env = not (isinstance(url, str) and split_address(url).hostname in LOCAL_HOSTS)
    if client is not None and (args or options):
        raise ParameterError(
            "client",
            "other arguments of the client have no effect beside it.",
            hint="Leave them out.",
        )

    def make(sdk: Any, on_response: ResponseHook, before: Any) -> Any:
        async def hook(response: Any) -> None:
            on_response(response.status_code, response.headers)

        if client is not None and sdk is builtin_clients:
            raise ParameterError(
                "client",
                f"no SDK of a version that works here is installed, for {kind}.",
                hint="Install the SDK (docs/backends.md has the versions), or give api_key= and base_url=.",
            )
        if client is not None and not isinstance(client, getattr(sdk, kind)):
            raise ParameterError(
                "client",
                f"{type(client).__name__} is not {kind}.",
                hint="Give an asynchronous client.",
            )
        if client is not None and before is None:
            return client
        if (
            options.get("http_client") is not None
        ):  # the limit does not see the headers of its answers
            if before is not None:
                raise BackendError(
                    "the connections of http_client= belong to another event loop or to the process before a fork, "
                    "or were closed by shutdown(). It can't be used again.",
                    hint="Make a new backend where it is used.",
                )
            return explains_wrong_arguments(getattr(sdk, kind))(*args, **options)
        rest = {name: value for name, value in options.items() if name != "http_client"}
        pool = pool_arguments(trust_env=trust_env)
        http = sdk.DefaultAsyncHttpxClient(
            event_hooks={"response": [hook]}, trust_env=trust_env, **pool
        )
        return (
            before.copy(http_client=http)
            if client is not None
            else explains_wrong_arguments(getattr(sdk, kind))(*args, http_client=http, **rest)
        )

    return make


def sdk_error_getter(base: str) -> Callable[[Foreign], tuple[Errors, Errors, Errors]]:
    """Returns a function that finds the error classes of an SDK. It works for the SDKs of both
    OpenAI and Anthropic, and for the built-in clients. `base` is the name of the class from which
    all of the SDK's errors derive.
    """
    return lambda sdk: (getattr(sdk, base), sdk.APITimeoutError, sdk.APIConnectionError)
