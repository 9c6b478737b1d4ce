"""Requests to a running server whose engine sends its weights to others. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from sglang_lite.protocol import ModelError

_ADDRESS = re.compile(r"instance://(\[[0-9a-fA-F:]+\]|[^/:@]+):(\d{1,5})/?")
_KEY = "SGLANG_LITE_SEED_KEY"  # environment variable with the server's admin key
_LARGEST_ANSWER = 64 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Rejects redirects, because the key would also be sent to their target."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())


class Seed:
    """Client of a server with SGLang's routes. Ignores proxies that the environment sets.

    Args:
        host, port: where it listens. An IPv6 address may be in brackets.
        timeout_s: maximum number of seconds for an answer.
    """

    def __init__(self, host: str, port: int, timeout_s: float = 60.0) -> None:
        self.host = host.strip("[]")
        self._timeout_s = timeout_s
        self._address = f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def __str__(self) -> str:
        return f"instance://{self._address}"

    def request_json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:  # JSON
        """Sends a request and returns the answer. Raises ModelError if there is none, or the server
        rejects it.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"http://{self._address}{path}", data, headers)
        try:
            with _OPENER.open(request, timeout=self._timeout_s) as response:
                answer = json.loads(response.read(_LARGEST_ANSWER))
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode("utf-8", "replace")
            hint = f"Set {_KEY} to its administrator's key." if error.code in (401, 403) else ""
            raise ModelError(
                f"{self}: {path} was refused with {error.code}: {said}", hint=hint
            ) from error
        except (OSError, HTTPException, ValueError) as error:
            raise ModelError(
                f"{self}: {path}: {error}", hint="Check host and port of its server."
            ) from error
        if not isinstance(answer, dict):
            raise ModelError(f"{self}: {path} was answered by no object.")
        return answer


def seed_address(model: str) -> tuple[str, int] | None:
    """Returns host and port of `instance://host:port`, or None for other names. Raises ModelError
    for an invalid address.
    """
    if not model.startswith("instance://"):
        return None
    if not (match := _ADDRESS.fullmatch(model)):
        raise ModelError(f"{model}: no address of the form instance://host:port.")
    return match[1], int(match[2])
