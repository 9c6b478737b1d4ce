"""Clients of OpenAI's and Anthropic's APIs over plain HTTP, for environments without their SDKs.

This module has the names of both SDKs that the backends use, with the same meanings, so that a
backend works with any of the three.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from types import SimpleNamespace
from typing import Final

import anyio
import httpx2

from sglang_lite.lang.backend.http.client import EventReader, split_address
from sglang_lite.lang.backend.http.rate_limit import retry_after
from sglang_lite.protocol import UNSET, ParameterError, Unset
from sglang_lite.protocol.anything import Foreign, Json
from sglang_lite.version import __version__

# Like the SDKs' defaults.
_TIMEOUT: Final = httpx2.Timeout(600, connect=5)
_HTTPX_TIMEOUT: Final = httpx2.Timeout(5)  # of a client that was given none
_MAX_RETRIES: Final = 2
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 8.0
_LONGEST_RETRY_AFTER_S: Final = 120.0  # a call that would have to wait longer fails at once
_LAST_BYTES_S: Final = 0.1  # to read what follows the last event, so that the connection is reused
_RETRIED: Final = frozenset({408, 409, 429})  # statuses below 500 that are worth another try
_ANTHROPIC_VERSION: Final = "2026-10-21"  # as Anthropic's SDK 2 sends
_ARGUMENTS: Final = (
    "api_key, base_url, timeout, max_retries, default_headers, default_query, http_client, organization and project "
    "of OpenAI, or auth_token of Anthropic"
)


class ApiError(Exception):
    """Raised if a call fails.

    Attributes:
        body: JSON value of the response or of the event that reports the failure, or None.
        response: response with the failure, or None.
        status_code: status of the response; 0 without one.
        request_id: the provider's id of the request, or None.
    """

    def __init__(
        self, message: str, body: Json = None, response: httpx2.Response | None = None
    ) -> None:
        super().__init__(message)
        headers: Mapping[str, str] = {} if response is None else response.headers
        self.body = body
        self.response = response
        self.status_code = 0 if response is None else response.status_code
        self.request_id = headers.get("x-request-id") or headers.get("request-id")


class APIConnectionError(ApiError):
    """Raised if no response arrives."""


class APITimeoutError(APIConnectionError):
    """Raised if no response arrives in time."""


OpenAIError = AnthropicError = ApiError
DefaultAsyncHttpxClient = partial(
    httpx2.AsyncClient,
    follow_redirects=True,
    timeout=_TIMEOUT,
    limits=httpx2.Limits(max_connections=1000, max_keepalive_connections=100),
)


class JsonFields(dict[str, Json]):
    """JSON object whose fields can be read as attributes. A field that is missing is None."""

    def __getattr__(self, name: str) -> Json:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def to_dict(self, mode: str) -> dict[str, Json]:
        return self


def parse_answer(content: bytes) -> JsonFields:
    """Parses an answer. What is not an object is returned as parsed.

    Raises:
        ApiError: the answer is not JSON.
    """
    answer: JsonFields = _parse_json(content, "the answer")
    return answer


def _parse_json(data: bytes | str, what: str) -> Json:
    try:
        return json.loads(data, object_hook=JsonFields)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{what} is not JSON ({error})") from error


class ResponseEvents:
    """Events of an answer that is still arriving. Leaving the `async with` block closes it."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self._events = self._read_events()

    async def __aenter__(self) -> ResponseEvents:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._response.aclose()

    def __aiter__(self) -> AsyncIterator[JsonFields]:
        return self._events

    async def _read_events(self) -> AsyncGenerator[JsonFields, None]:
        reader = EventReader()
        async with aclosing(self._response.aiter_bytes()) as chunks:
            async for chunk in chunks:
                for data in reader.feed(chunk):
                    if data.startswith("[DONE]"):
                        await _read_to_end(chunks)
                        return
                    yield _parse_event(data)


async def _read_to_end(chunks: AsyncIterator[bytes]) -> None:
    """Reads what follows the last event. Gives up soon, and at any error: the answer is complete,
    and this only saves the connection.
    """
    with suppress(Exception):
        async with asyncio.timeout(_LAST_BYTES_S):
            async for _ in chunks:
                pass


def _parse_event(data: str) -> JsonFields:
    """Parses an event of a stream.

    Raises:
        ApiError: the event reports that the answer failed.
    """
    event = _parse_json(data, "an event")
    if not isinstance(event, JsonFields):
        raise ApiError(f"an event is no JSON object, but {data[:200]}")
    if event.error:
        raise ApiError("an event reports a failure", body=event.error)
    return event


class _BuiltinClient:
    """Client of one API.

    Args:
        package: name of the SDK's package.
        base_url: address of the API.
        headers: headers of the API's own, such as the one with the key.
        http_client, max_retries, default_headers, default_query: arguments of the SDK's client,
            with the same meanings.
        timeout: the same; if left out, that of `http_client` unless it is httpx's default.
        of_sdk: arguments that are unknown here.

    Attributes:
        base_url: address of the API, which ends in "/".

    Raises:
        ParameterError: an argument is unknown or invalid.
    """

    def __init__(
        self,
        package: str,
        base_url: str,
        headers: Mapping[str, str],
        *,
        http_client: httpx2.AsyncClient,
        timeout: float | httpx2.Timeout | Unset | None = UNSET,
        max_retries: int = _MAX_RETRIES,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, Json] | None = None,
        **of_sdk: Foreign,
    ) -> None:
        for name in of_sdk:
            raise ParameterError(
                name,
                f"the built-in client, which is used without the package {package}, has no such argument.",
                hint=f"pip install 'sglang-lite[{package}]' if it is one of that package's client. "
                f"Otherwise use {_ARGUMENTS}.",
            )
        if not isinstance(max_retries, int) or max_retries < 0:
            raise ParameterError(
                "max_retries", f"{max_retries!r} is not a number of retries.", hint="Use 0 or more."
            )
        if not isinstance(timeout, int | float | httpx2.Timeout | Unset | None):
            raise ParameterError(
                "timeout", f"{timeout!r} is not a number of seconds.", hint="Use one, or None."
            )
        if not isinstance(http_client, httpx2.AsyncClient):
            raise ParameterError(
                "http_client",
                f"{type(http_client).__name__} is not an httpx2.AsyncClient.",
                hint="Give one, or leave it out.",
            )
        for name, value in (("default_headers", default_headers), ("default_query", default_query)):
            if not isinstance(value, Mapping | None):
                raise ParameterError(
                    name, f"{type(value).__name__} is not a mapping.", hint="Give a dict."
                )
        address = split_address(str(base_url))
        if address.query or address.fragment:
            raise ParameterError(
                "base_url",
                "an address with a query or fragment has no place for the path of a call.",
                hint="Use default_query= for a query.",
            )
        self.base_url = httpx2.URL(str(base_url).rstrip("/") + "/")
        self._http = http_client
        if isinstance(timeout, Unset):
            own = http_client.timeout
            timeout = _TIMEOUT if own == _HTTPX_TIMEOUT else own
        self._timeout = timeout
        self._max_retries = max_retries
        named = {
            "User-Agent": f"sglang-lite/{__version__}",
            "Accept": "application/json",
            "Content-Type": "application/json",
        }
        custom = _headers_from_environment(f"{package.upper()}_CUSTOM_HEADERS")
        self._headers = _merge_headers(named, headers, custom, default_headers or {})
        self._query = dict(default_query or {})

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self,
        path: str,
        extra_body: Mapping[str, Json] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        **fields: Json,
    ) -> JsonFields | ResponseEvents | str:
        """Makes a call. Returns its answer, or a stream of its events if the field `stream` is
        true. An answer that is not JSON is returned as text.

        Raises:
            ApiError: the call failed, as often as it may be retried.
        """
        body = {**fields, **(extra_body or {})}
        streams = bool(body.get("stream"))
        response = await self._send_with_retries(path, body, extra_headers or {}, stream=streams)
        if streams:
            return ResponseEvents(response)
        try:
            return parse_answer(response.content)
        except ApiError:
            if "json" in response.headers.get("content-type", ""):
                raise
            return response.text

    async def _send_with_retries(
        self, path: str, body: Mapping[str, Json], headers: Mapping[str, str], *, stream: bool
    ) -> httpx2.Response:
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        encoded = content.encode()
        retried = 0
        while True:
            try:
                return await self._send_once(path, encoded, headers, stream=stream)
            except ApiError as error:
                if retried == self._max_retries or not _is_worth_retrying(error):
                    raise
                pause = _pause_before_retry(error, retried)
            retried += 1
            await asyncio.sleep(pause)

    async def _send_once(
        self, path: str, content: bytes, headers: Mapping[str, str], *, stream: bool
    ) -> httpx2.Response:
        try:
            request = self._http.build_request(
                "POST",
                self.base_url.join(path),
                content=content,
                headers=_merge_headers(self._headers, headers),
                params=self._query or None,
                timeout=self._timeout,
            )
            response = await self._http.send(request, stream=stream)
            if response.is_success:
                return response
            async with aclosing(response):
                await response.aread()
        except httpx2.TimeoutException as error:
            raise APITimeoutError("the request timed out") from error
        except (httpx2.RequestError, ssl.SSLError, anyio.EndOfStream) as error:
            raise APIConnectionError("the connection failed") from error
        raise _response_error(response)


def _response_error(response: httpx2.Response) -> ApiError:
    """Returns the error for a response that reports a failure."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return ApiError(response.text or f"HTTP {response.status_code}", response=response)
    # OpenAI's SDK passes the object on, Anthropic's the whole body; both are understood.
    return ApiError(f"HTTP {response.status_code}", body=body, response=response)


def _is_worth_retrying(error: ApiError) -> bool:
    if error.response is None:
        return isinstance(error, APIConnectionError)
    headers = error.response.headers
    asked = headers.get("x-should-retry")
    if (retry_after(headers) or 0) > _LONGEST_RETRY_AFTER_S:
        return False
    if asked in ("true", "false"):
        return bool(asked == "true")
    return error.status_code in _RETRIED or error.status_code >= 500


def _pause_before_retry(error: ApiError, retried: int) -> float:
    """Returns the seconds to wait before the next try: as long as the response asks for, or an
    exponentially growing time.
    """
    asked = None if error.response is None else retry_after(error.response.headers)
    if asked:
        return asked
    return min(_FIRST_PAUSE_S * 2.0 ** min(retried, 10), _LONGEST_PAUSE_S) * random.uniform(
        0.75, 1.0
    )


def _validate_key(key: object) -> str:
    """Returns the key if it is text.

    Raises:
        ParameterError: it is not.
    """
    if not isinstance(key, str):
        raise ParameterError(
            "api_key",
            f"{type(key).__name__} is not a text.",
            hint="Give a str. Functions that return keys need the provider's SDK.",
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise ParameterError(
            "api_key",
            "it has blanks, line ends or other characters that a header can't have.",
            hint="Strip it: a key that is read from a file often ends with a line end.",
        )
    return key


def _merge_headers(*mappings: Mapping[str, str]) -> httpx2.Headers:
    """Merges headers, whose names may differ in case. Later ones replace earlier ones."""
    merged = httpx2.Headers()
    for each in mappings:
        merged.update(each)
    return merged


def _headers_from_environment(variable: str) -> dict[str, str]:
    """Reads headers from an environment variable, one in each line, as the SDKs do."""
    lines = os.environ.get(variable, "").splitlines()
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


class AsyncOpenAI(_BuiltinClient):
    """Client of OpenAI's API. The attributes that make calls have the names of the SDK's methods.

    Args:
        api_key, base_url: key and address; None for OPENAI_API_KEY and OPENAI_BASE_URL of the
            environment, and OpenAI's own address.
        organization, project: account to charge; None for OPENAI_ORG_ID and OPENAI_PROJECT_ID.
        options: further arguments of `_BuiltinClient`.

    Raises:
        ParameterError: no key is given, or an argument is invalid.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        organization: str | None = None,
        project: str | None = None,
        **options: Foreign,
    ) -> None:
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        if not key:
            raise ParameterError(
                "api_key", "no key is given.", hint="Give api_key=, or set OPENAI_API_KEY."
            )
        self.api_key = _validate_key(key)
        accounts = {
            "OpenAI-Organization": organization or os.environ.get("OPENAI_ORG_ID"),
            "OpenAI-Project": project or os.environ.get("OPENAI_PROJECT_ID"),
        }
        headers = {name: value for name, value in accounts.items() if value}
        address = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        headers["Authorization"] = f"Bearer {self.api_key}"
        super().__init__("openai", address, headers, **options)
        self.chat = SimpleNamespace(
            completions=SimpleNamespace(create=partial(self._call, "chat/completions"))
        )
        self.completions = SimpleNamespace(create=partial(self._call, "completions"))
        self.responses = SimpleNamespace(create=partial(self._call, "responses"))
        self.decisions = SimpleNamespace(create=partial(self._call, "decisions"))


class AsyncAzureOpenAI:
    """Refuses Azure, whose addresses and tokens only OpenAI's SDK knows."""

    def __init__(self, **options: Foreign) -> None:
        raise ParameterError(
            "is_azure",
            "Azure needs OpenAI's SDK, version 3 or newer.",
            hint="pip install 'sglang-lite[openai]'",
        )


class AsyncAnthropic(_BuiltinClient):
    """Client of Anthropic's API. The attribute that makes calls has the name of the SDK's method.

    Args:
        api_key, auth_token, base_url: key, or token to send instead, and address; None for
            ANTHROPIC_API_KEY, ANTHROPIC_AUTH_TOKEN and ANTHROPIC_BASE_URL of the environment, and
            Anthropic's own address.
        options: further arguments of `_BuiltinClient`.

    Raises:
        ParameterError: an argument is invalid.
    """

    credentials = None  # kinds of credentials that only the SDK has

    def __init__(
        self,
        *,
        api_key: str | None = None,
        auth_token: str | None = None,
        base_url: str | None = None,
        **options: Foreign,
    ) -> None:
        if api_key is not None and auth_token is not None:
            raise ParameterError(
                "auth_token", "api_key is given, too.", hint="Give one of the two."
            )
        if api_key is None and auth_token is None:
            api_key = os.environ.get("ANTHROPIC_API_KEY") or None
            if api_key is None:
                auth_token = os.environ.get("ANTHROPIC_AUTH_TOKEN") or None
        self.api_key = api_key
        self.auth_token = auth_token
        headers = {"anthropic-version": _ANTHROPIC_VERSION}
        key = auth_token if api_key is None else api_key
        if key is not None:
            # Not X-Api-Key, which HTTP libraries pass on to other hosts at a redirect.
            headers["Authorization"] = f"Bearer {_validate_key(key)}"
        address = base_url or os.environ.get("ANTHROPIC_BASE_URL") or "https://api.anthropic.com"
        super().__init__("anthropic", address, headers, **options)
        self.messages = SimpleNamespace(create=partial(self._call, "v1/messages"))
