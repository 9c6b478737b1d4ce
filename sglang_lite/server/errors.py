"""Errors as each protocol has them: one table of statuses and names."""

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

Protocol: TypeAlias = Literal["native", "openai", "anthropic"]


class AuthenticationError(SglError):
    """The key is missing or wrong."""


class OriginError(SglError):
    """A page in a browser asks, which no server of this package is for."""


class NotFoundError(SglError):
    """Refusal of a route, model or response that does not exist."""


class MethodError(SglError):
    """The route has no such method."""


class TooLargeError(SglError):
    """The body of a request is too large."""


class SlowBodyError(SglError):
    """The body of a request does not come."""


class RateLimitError(SglError):
    """Too many requests are open, of all or of one key."""

    retryable = True


@dataclass(frozen=True, slots=True)
class Status:
    """HTTP status of an error, and its names in OpenAI's and Anthropic's protocol."""

    status: int
    openai: str
    anthropic: str
    code: str | None = None
    retry_after_s: int | None = None


_BAD = Status(400, "invalid_request_error", "invalid_request_error")
_TABLE: tuple[tuple[type[SglError], Status], ...] = (  # the first one counts
    (AuthenticationError, Status(401, "authentication_error", "authentication_error", "invalid_api_key")),
    (OriginError, Status(403, "permission_error", "permission_error", "forbidden")),
    (NotFoundError, Status(404, "not_found_error", "not_found_error", "not_found")),
    (MethodError, Status(405, "invalid_request_error", "invalid_request_error", "method_not_allowed")),
    (TooLargeError, Status(413, "invalid_request_error", "request_too_large", "request_too_large")),
    (SlowBodyError, Status(408, "invalid_request_error", "invalid_request_error", "request_timeout")),
    (RateLimitError, Status(429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded", 1)),
    (CapabilityError, Status(400, "invalid_request_error", "invalid_request_error", "unsupported")),
    (ParameterError, _BAD),
    (ConstraintError, _BAD),
    (TemplateError, _BAD),
    (WireError, _BAD),
    (OverloadedError, Status(503, "overloaded_error", "overloaded_error", "overloaded", 1)),
    (RequestTimeoutError, Status(504, "timeout_error", "timeout_error", "timeout")),
    (RequestAbortedError, Status(499, "aborted_error", "api_error", "aborted")),  # nginx's for a client that has gone
    (EngineClosedError, Status(503, "server_error", "api_error", "engine_closed", 5)),
    (BackendError, Status(500, "server_error", "api_error")),
    (SglError, Status(500, "server_error", "api_error")),
)


def status_of(error: SglError) -> Status:
    """The row of the table for an error; of a batch, for the first that failed."""
    cause = _cause(error)
    return next(status for kind, status in _TABLE if isinstance(cause, kind))


def _cause(error: SglError) -> SglError:
    if not isinstance(error, BatchError):
        return error
    return next((result for result in error.results if isinstance(result, SglError)), error)


def parameter_of(error: SglError) -> str | None:
    """The parameter, or the JSON Pointer into the body or a schema, that an error names."""
    error = _cause(error)
    if isinstance(error, ParameterError | CapabilityError):
        return error.parameter
    if isinstance(error, ConstraintError | WireError):
        return getattr(error, "pointer", None)
    return None


def content_of(error: SglError, protocol: Protocol, request_id: str | None = None) -> dict[str, Json]:
    """The JSON content of an error, in a protocol's shape: of a response, or of an event in a stream."""
    found = status_of(error)
    if protocol == "anthropic":
        content: dict[str, Any] = {
            "type": "error",
            "error": {"type": found.anthropic, "message": str(error)},
        }
        return content if request_id is None else {**content, "request_id": request_id}
    told: dict[str, Any] = {"message": str(error), "type": found.openai, "param": parameter_of(error)}
    if protocol == "native":
        name = {"err_type": type(error).__name__}  # as where SGLang tells of a request that has failed
        return {"error": {**told, "code": found.status, "retryable": error.retryable, **name}}
    return {"error": {**told, "code": found.code}}


def headers_of(error: SglError) -> Mapping[str, str]:
    """The headers that a response with an error has beside its content."""
    if isinstance(error, SlowBodyError):
        return {"connection": "close"}  # what still comes would be taken for the next request
    after = status_of(error).retry_after_s
    return {} if after is None else {"retry-after": str(after)}
