"""Errors in the form of each protocol, from one table of statuses and names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sglang_lite.errors import BatchError
from sglang_lite.protocol import (
    BackendError,
    CapabilityError,
    ConstraintError,
    EngineClosedError,
    OverloadedError,
    ParameterError,
    RequestAbortedError,
    RequestTimeoutError,
    SglError,
    TemplateError,
    WireError,
)
from sglang_lite.protocol.anything import Json

Protocol: TypeAlias = Literal["native", "openai", "anthropic", "ollama"]


class AuthenticationError(SglError):
    """Request whose key is missing or wrong."""


class ForbiddenError(SglError):
    """Request that the server's settings forbid, such as one from a web page or to a foreign host
    name.
    """


class NotFoundError(SglError):
    """Route, model or response that doesn't exist."""


class NotServedError(SglError):
    """Route that SGLang or Ollama has and this server lacks."""


class MethodError(SglError):
    """HTTP method that the route doesn't have."""


class TooLargeError(SglError):
    """Request whose body is too large."""


class UnknownTextError(SglError):
    """Request with the hash of a text that the server doesn't know. The client then sends the text
    itself.
    """


class SlowRequestError(SglError):
    """Request whose headers or body don't arrive in time."""


class LongUrlError(SglError):
    """Request whose address is too long."""


class LargeHeadersError(SglError):
    """Request whose headers are too large or too many."""


class RateLimitError(SglError):
    """Request that exceeds a limit: too many requests are open, or its key's quota is used up.

    Args:
        retry_after_s: seconds after which the request may succeed.
    """

    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """HTTP status of an error, and its names in OpenAI's and Anthropic's protocol."""

    status: int
    openai: str
    anthropic: str
    code: str | None = None
    retry_after_s: int | None = None


_BAD = ErrorStatus(400, "invalid_request_error", "invalid_request_error")
_TABLE: tuple[tuple[type[SglError], ErrorStatus], ...] = (  # the first matching row counts
    (
        AuthenticationError,
        ErrorStatus(401, "authentication_error", "authentication_error", "invalid_api_key"),
    ),
    (ForbiddenError, ErrorStatus(403, "permission_error", "permission_error", "forbidden")),
    (NotFoundError, ErrorStatus(404, "not_found_error", "not_found_error", "not_found")),
    (
        NotServedError,
        ErrorStatus(501, "not_implemented_error", "invalid_request_error", "not_implemented"),
    ),
    (
        MethodError,
        ErrorStatus(405, "invalid_request_error", "invalid_request_error", "method_not_allowed"),
    ),
    (
        TooLargeError,
        ErrorStatus(413, "invalid_request_error", "request_too_large", "request_too_large"),
    ),
    (
        UnknownTextError,
        ErrorStatus(424, "invalid_request_error", "invalid_request_error", "unknown_text"),
    ),
    (
        SlowRequestError,
        ErrorStatus(408, "invalid_request_error", "invalid_request_error", "request_timeout"),
    ),
    (LongUrlError, ErrorStatus(414, "invalid_request_error", "request_too_large", "url_too_long")),
    (
        LargeHeadersError,
        ErrorStatus(431, "invalid_request_error", "request_too_large", "headers_too_large"),
    ),
    (
        RateLimitError,
        ErrorStatus(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
    ),
    (
        CapabilityError,
        ErrorStatus(400, "invalid_request_error", "invalid_request_error", "unsupported"),
    ),
    (ParameterError, _BAD),
    (ConstraintError, _BAD),
    (TemplateError, _BAD),
    (WireError, _BAD),
    (OverloadedError, ErrorStatus(503, "overloaded_error", "overloaded_error", "overloaded", 1)),
    (RequestTimeoutError, ErrorStatus(504, "timeout_error", "timeout_error", "timeout")),
    # nginx's status: client left
    (RequestAbortedError, ErrorStatus(499, "aborted_error", "api_error", "aborted")),
    (EngineClosedError, ErrorStatus(503, "server_error", "api_error", "engine_closed", 5)),
    (BackendError, ErrorStatus(500, "server_error", "api_error")),
    (SglError, ErrorStatus(500, "server_error", "api_error")),
)


def find_error_status(error: SglError) -> ErrorStatus:
    """Returns the HTTP status and the names of an error. For a BatchError, returns those of its
    first failed request.
    """
    cause = _unwrap_batch_error(error)
    return next(status for kind, status in _TABLE if isinstance(cause, kind))


def _unwrap_batch_error(error: SglError) -> SglError:
    if not isinstance(error, BatchError):
        return error
    return next((result for result in error.results if isinstance(result, SglError)), error)


def error_parameter(error: SglError) -> str | None:
    """Returns the parameter that an error names, or the JSON Pointer to the fault. Returns None for
    errors without either.
    """
    error = _unwrap_batch_error(error)
    if isinstance(error, ParameterError | CapabilityError):
        return error.parameter
    if isinstance(error, ConstraintError | WireError):
        return getattr(error, "pointer", None)
    return None


def encode_error_content(
    error: SglError, protocol: Protocol, request_id: str | None = None
) -> dict[str, Json]:
    """Returns the JSON content of an error in a protocol's form, for a response or an event of a
    stream.
    """
    found = find_error_status(error)
    if protocol == "anthropic":
        content: dict[str, Any] = {
            "type": "error",
            "error": {"type": found.anthropic, "message": str(error)},
        }
        return content if request_id is None else {**content, "request_id": request_id}
    if protocol == "ollama":
        return {"error": str(error)}
    told: dict[str, Any] = {
        "message": str(error),
        "type": found.openai,
        "param": error_parameter(error),
    }
    if protocol == "native":
        name = {"err_type": type(error).__name__}  # as in SGLang's report of a failed request
        return {"error": {**told, "code": found.status, "retryable": error.retryable, **name}}
    return {"error": {**told, "code": found.code}}


def error_headers(error: SglError) -> Mapping[str, str]:
    """Returns the headers to add to the response for an error."""
    if isinstance(error, SlowRequestError):
        return {"connection": "close"}  # later parts of the body would be read as the next request
    after = (
        error.retry_after_s
        if isinstance(error, RateLimitError)
        else find_error_status(error).retry_after_s
    )
    return {} if after is None else {"retry-after": str(after)}
