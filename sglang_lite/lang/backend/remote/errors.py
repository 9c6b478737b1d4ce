"""Converts the errors of a provider's SDK into ours. Our errors describe the failure, suggest a
remedy and name the request's id. They contain no keys.

The SDK handles timeouts and retries: requests that fail here have been retried as often as its
settings allow.
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sglang_lite.errors import Origin
from sglang_lite.lang.backend.http.rate_limit import retry_after
from sglang_lite.protocol import (
    BackendError,
    OverloadedError,
    RefusalError,
    RequestTimeoutError,
    Usage,
)

_BUSY = {
    "overloaded_error",
    "rate_limit_error",
    "rate_limit_exceeded",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
}
_RETRIES = "max_retries= of the backend sets how often it is tried again"
_HINTS = {
    401: "Check api_key=, or the environment variable that it is read from.",
    402: "Check the account's billing.",
    403: "Check the permissions of the API key.",
    404: "Check model_name= and base_url=.",
    413: "Shorten the prompt.",
    429: "Check the account's quota and billing.",
}


@dataclass(frozen=True, slots=True)
class ErrorTranslator:
    """Translates the errors that one backend's SDK raises.

    Attributes:
        name: name of the backend, for messages.
        origin: provider and model.
        base, timeout, connection: error classes of the SDK: base class, time limits, failed
            connections.
        secrets: function that returns the values that must not be shown.
    """

    name: str
    origin: Origin
    base: type[Exception] | tuple[type[Exception], ...]
    timeout: type[Exception] | tuple[type[Exception], ...]
    connection: type[Exception] | tuple[type[Exception], ...]
    secrets: Callable[[], Iterable[object]]

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Converts errors of the SDK and of its HTTP library raised in the `with` block into ours."""
        import httpx2

        try:
            yield
        except self.base as error:
            raise self._translate_sdk_error(error) from self._shareable_cause(error)
        except httpx2.TimeoutException as error:
            raise self._timeout_error() from self._shareable_cause(error)
        except (httpx2.HTTPError, ssl.SSLError) as error:  # while an answer is read
            broken = self.unreadable_response_error(
                f"the connection failed in the middle of the answer ({error})"
            )
            broken.retryable = True
            raise broken from self._shareable_cause(error)
        except json.JSONDecodeError as error:
            raise self.unreadable_response_error(
                f"the answer is not JSON ({error})"
            ) from self._shareable_cause(error)

    @contextlib.contextmanager
    def report_unreadable_answer(self) -> Iterator[None]:
        """Reports fields of an answer that are missing or have wrong types as an error of the
        server. For `with` blocks that read an answer.
        """
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise self.unreadable_response_error(
                f"the answer can't be read ({type(error).__name__}: {error})"
            ) from error

    def unreadable_response_error(self, what: str) -> BackendError:
        """Makes the error for an answer that can't be read."""
        return BackendError(
            f"{self.name}: {self.redact_secrets(what)}.",
            hint="Check what listens at base_url, or try again.",
        )

    def answer_failure_error(self, why: str) -> BackendError:
        """Makes the error for an answer that reports its own failure. It may be retried."""
        ours = BackendError(
            f"{self.name}: {self.redact_secrets(shorten_message(why))}", hint="Try again."
        )
        ours.retryable = True
        return ours

    def refusal_error(self, why: str) -> RefusalError:
        return RefusalError(
            f"{self.name} refused to answer: {self.redact_secrets(why)}", hint="Change the prompt."
        )

    def redact_secrets(self, text: str) -> str:
        """Removes the secrets from a text, also where it quotes them."""
        for secret in self.secrets():
            if secret and len(str(secret)) > 8:
                for form in (str(secret), repr(str(secret))[1:-1], str(secret).strip()):
                    text = text.replace(form, "…")
        return text

    def _shareable_cause(self, error: Exception) -> Exception | None:
        """Returns the SDK's error if it is safe to show as the cause of ours. Returns None if its
        text contains a secret. (An API may repeat the key that it was sent.)
        """
        shown = f"{error} {error.__cause__} {error.__context__}"
        return error if self.redact_secrets(shown) == shown else None

    def _timeout_error(self) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"{self.name} did not answer in time.", hint=f"Raise timeout=; {_RETRIES}."
        )

    def _translate_sdk_error(self, error: Exception) -> BackendError:
        if isinstance(error, self.timeout):
            return self._timeout_error()
        if isinstance(error, self.connection):
            cause = error.__cause__ or error
            why = self.redact_secrets(f"{type(cause).__name__}: {cause}")
            lost = BackendError(
                f"{self.name}: the connection failed ({why}).",
                hint=f"Check base_url, and the proxy, if one is set; {_RETRIES}.",
            )
            lost.retryable = True
            return lost
        status, (message, kinds) = _status_of(error), _parse_api_error(error)
        request = getattr(error, "request_id", None)
        facts = [f"HTTP {status}"] * (status >= 400) + [f"request {request}"] * bool(request)
        text = f"{self.name}: {self.redact_secrets(message)}" + (
            f" ({', '.join(facts)})" if facts else ""
        )
        ours = _error_by_status(text, status, kinds)
        ours.usage = Usage() if status >= 400 else None  # a rejected request used nothing
        ours.origin = Origin(self.origin.provider, self.origin.model, request)
        ours.retry_after = retry_after(
            getattr(getattr(error, "response", None), "headers", None) or {}
        )
        return ours


def _parse_api_error(error: Exception) -> tuple[str, set[str]]:
    """Returns an API's message about a failure, and the terms by which the API classifies it."""
    body = getattr(error, "body", None)
    fields = body.get("error", body) if isinstance(body, dict) else body
    fields = fields if isinstance(fields, dict) else {"message": fields}
    message = str(fields.get("message") or getattr(error, "message", error))
    return shorten_message(message), {
        str(fields.get("type")),
        str(fields.get("code")),
        str(getattr(error, "status", None)),
    }


def _status_of(error: Exception) -> int:
    for name in ("status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int):
            return status
    return 0


def _error_by_status(text: str, status: int, kinds: set[str]) -> BackendError:
    """Makes the error for a failed request, by status code and kind of failure."""
    ours: BackendError
    if kinds & _BUSY or (status in (429, 503, 529) and "insufficient_quota" not in kinds):
        ours = OverloadedError(
            text, hint=f"Run fewer programs at a time (num_threads=); {_RETRIES}."
        )
    elif status in (408, 504):
        ours = RequestTimeoutError(text, hint=f"Raise timeout=; {_RETRIES}.")
    else:
        again = (
            "Correct the part of the request that the message names."
            if 400 <= status < 500
            else f"Try again; {_RETRIES}."
        )
        ours = BackendError(text, hint=_HINTS.get(status, again))
        ours.retryable = not 400 <= status < 500
    return ours


_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


def shorten_message(message: str) -> str:
    """Shortens a message for display. Keeps the first 1,000 characters of a text, and the title of
    an HTML page.
    """
    if not message.lstrip().startswith("<"):
        return message[:1000]
    title = _TITLE.search(message)
    return f"a page of HTML ({' '.join(title[1].split())[:200]})" if title else "a page of HTML"
