"""Counts that a server's clients keep, compared with its `/metrics`: responses by route and status,
and tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from sglang_lite.server.request_metrics import OTHER_ROUTE
from sglang_lite.server.routes import ROUTES

Response = tuple[str, str, int, str]  # route, method, status and key, as `/metrics` labels them

_FIXED = {(method, route.path): route for route in ROUTES for method in route.methods}
_PATTERNS = [
    (
        re.compile(
            re.sub(r"\\{\w+\\}", "[^/]+", re.sub(r"\\{\w+:path\\}", ".+", re.escape(route.path)))
        ),
        route,
    )
    for route in ROUTES
    if "{" in route.path
]
_NO_KEY = ("open", "page")  # routes whose responses are counted without a key
_USAGE_FIELDS = {
    "prompt": (
        "prompt_tokens",
        "input_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    ),
    "completion": ("completion_tokens", "output_tokens"),
}


class ClientCounts:
    """Counts of the clients that share an API key.

    Args:
        key: their key.
        is_exact: True if these clients read every answer to its end and find its tokens in it, so
            that the server's counts must equal theirs. Other clients leave, so that the server may
            have counted more.
    """

    def __init__(self, key: str, *, is_exact: bool) -> None:
        self.key, self.is_exact = key, is_exact
        self.hash = hashlib.sha256(key.encode()).hexdigest()[:8]
        self.responses = Counter[Response]()
        self.tokens = Counter[str]()
        # requests by route and method whose status is not known
        self._unknown = Counter[tuple[str, str]]()

    def hooks(self) -> dict[str, list[Any]]:  # httpx2's type
        """Returns hooks of an `httpx2.AsyncClient`, which count each of its requests and responses."""

        async def sent(request: httpx2.Request) -> None:
            self.sent(request.method, request.url.path)

        async def received(response: httpx2.Response) -> None:
            route, key = self._labels(response.request.method, response.request.url.path)
            self._unknown[route, response.request.method] -= 1
            self.responses[route, response.request.method, response.status_code, key] += 1

        return {"request": [sent], "response": [received]}

    def sent(self, method: str, path: str) -> None:
        """Counts a request whose status is not known yet, or will never be."""
        route, _ = self._labels(method, path)
        self._unknown[route, method] += 1

    def answered(self, content: bytes | str) -> None:
        """Counts the tokens of a whole answer: JSON, or a stream of events."""
        for usage in _usages(content):
            for kind, names in _USAGE_FIELDS.items():
                self.tokens[kind] += sum(usage.get(name) or 0 for name in names)

    def unknown(self) -> Counter[tuple[str, str]]:
        """Returns requests by route and method whose status these clients do not know."""
        return +self._unknown

    def _labels(self, method: str, path: str) -> tuple[str, str]:
        """Labels `route` and `key` of a request's response."""
        route = _FIXED.get((method, path))
        if route is None:
            matches = (
                each
                for pattern, each in _PATTERNS
                if pattern.fullmatch(path) and method in each.methods
            )
            route = next(matches, None)
        if route is None:
            return OTHER_ROUTE, ""
        return route.path, "" if route.access in _NO_KEY else self.hash


class ServerCounts:
    """Counts in the text of `/metrics`."""

    def __init__(self, text: str) -> None:
        self.responses = Counter[Response]()
        self.tokens = Counter[tuple[str, str]]()  # by key and kind
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels
                if sample.name == "sglang_lite_http_responses_total":
                    response = (
                        labels["route"],
                        labels["method"],
                        int(labels["status"]),
                        labels["key"],
                    )
                    self.responses[response] += int(sample.value)
                elif sample.name == "sglang_lite_tokens_total":
                    self.tokens[labels["key"], labels["kind"]] += int(sample.value)

    def minus(self, before: ServerCounts) -> ServerCounts:
        """Returns what was counted since `before`."""
        since = ServerCounts("")
        since.responses = self.responses - before.responses
        since.tokens = self.tokens - before.tokens
        return since


def differences(server: ServerCounts, clients: Iterable[ClientCounts]) -> list[str]:
    """Returns a line for each count of a server that its clients' counts contradict.

    A response that a client has seen must be counted. One that no client has seen may be counted,
    once for each request of its route whose status is unknown: the client left, or a limit of the
    connection refused it.
    """
    clients = list(clients)
    seen, unknown = Counter[Response](), Counter[tuple[str, str]]()
    for each in clients:
        seen += each.responses
        unknown += each.unknown()
    lines, unseen = [], Counter[tuple[str, str]]()
    for response in sorted({*seen, *server.responses}):
        route, method, status, key = response
        more = server.responses[response] - seen[response]
        unseen[route, method] += max(more, 0)
        if more < 0:
            name = f"{method} {route} with status {status} and key {key!r}"
            lines.append(f"{name}: clients {seen[response]}, server {server.responses[response]}")
    for (route, method), count in unseen.items():
        if count > unknown[route, method]:
            left = unknown[route, method]
            lines.append(
                f"{method} {route}: the server has counted {count} responses more, but {left} clients left"
            )
    for each in clients:
        for kind in _USAGE_FIELDS:
            counted, theirs = server.tokens[each.hash, kind], each.tokens[kind]
            if counted < theirs or (each.is_exact and counted > theirs):
                lines.append(
                    f"{kind} tokens of key {each.hash}: clients {theirs}, server {counted}"
                )
    return lines


def _usages(content: bytes | str) -> Iterator[Mapping[str, Any]]:
    """Yields the token counts in an answer; of a stream the last ones."""
    text = content.decode() if isinstance(content, bytes) else content
    if text[:1] in "{[":
        answers = json.loads(text)
        for each in answers if isinstance(answers, list) else [answers]:
            yield from filter(None, [_usage_of(each)])
        return
    lines = (
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    )
    usages = [usage for line in lines if (usage := _usage_of(json.loads(line)))]
    yield from usages[-1:]


def _usage_of(answer: Any) -> Mapping[str, Any] | None:  # what JSON has
    """Token counts of an answer, or of an event that has those of the whole answer."""
    if not isinstance(answer, dict):
        return None
    inner = answer.get("response")
    inner = inner if isinstance(inner, dict) else answer
    usage: Any = inner.get("usage") or inner.get("meta_info")
    if usage is None and answer.get("type") == "Usage":
        usage = answer.get("data")
    return usage if isinstance(usage, dict) else None
