"""The application finds a path that is there as it stands at once; its answers are those of
Starlette's own way.
"""

import asyncio
import json
import re
from typing import Any

import pytest
from starlette.applications import Starlette

from sglang_lite.server.absent import ABSENT, unsupported_path_error
from sglang_lite.server.app import application
from sglang_lite.server.known_texts import KnownTexts
from sglang_lite.server.request_metrics import RequestMetrics
from sglang_lite.server.routes import ROUTES
from sglang_lite.server.service import Service
from sglang_lite.server.settings import ServerSettings, warn_if_exposed
from tests.server.sglang.surface import read_surface

NO_ENGINE: Any = None  # nothing here asks it
FIXED = [(method, route) for route in ROUTES if "{" not in route.path for method in route.methods]


class _Broken:
    """Service that nothing can be asked of."""

    settings = ServerSettings()
    shutting_down, spans = False, None
    metrics, texts = RequestMetrics(""), KnownTexts()

    def count_request(self, key):
        pass

    def __getattr__(self, name):
        raise ZeroDivisionError(name)


def asked(way, method, path, headers=(), body=b"{}"):
    """Status, headers by name and content of an answer, and the scope that it was made in."""
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"x-request-id", b"an-id"), *headers], "scheme": "http", "server": ("a", 1), "http_version": "1.1",
    }  # fmt: skip
    received, sent = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive():
        if received:
            return received.pop()
        return await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    asyncio.run(way(scope, receive, send))
    head, *parts = sent
    told = {name.decode(): value.decode() for name, value in head["headers"]}
    return head["status"], told, b"".join(part.get("body", b"") for part in parts), scope


@pytest.fixture
def app():
    found = application(NO_ENGINE, ServerSettings(api_key=("secret",)))
    found.state.service = _Broken()
    return found


@pytest.fixture
def both(app):
    """The answers to a request of the application itself, and by Starlette's routes and layers."""

    def ask(*request, **more):
        direct, routed = (
            asked(app, *request, **more),
            asked(lambda *a: Starlette.__call__(app, *a), *request, **more),
        )
        assert direct[:3] == routed[:3]
        assert direct[3]["app"] is routed[3]["app"] is app
        return direct

    return ask


def message_of(content):
    """Text of an error, which in Ollama's protocol is all there is."""
    error = json.loads(content)["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize(("method", "route"), FIXED, ids=lambda each: getattr(each, "path", each))
def test_a_path_has_the_same_answer_either_way(both, method, route):
    """Here a refusal for want of a key, or the server's own failure."""
    status, headers, content, _ = both(method, route.path)
    assert status == (
        500
        if route.access == "open" and route.path not in ("/", "/ping", "/openapi.json")
        else status
    )
    assert status != 401 or route.access != "open"
    assert headers["x-request-id"] == "an-id"
    if status >= 400:
        assert message_of(content)


def test_a_failure_of_ours_is_an_answer_in_the_shape_of_the_protocol(both):
    key = [(b"authorization", b"Bearer secret")]
    status, headers, content, _ = both("GET", "/version", key)
    assert (status, json.loads(content)["server"]) == (200, "sglang_lite")
    body = b'{"messages": [{"role": "user", "content": "a"}]}'
    status, headers, content, _ = both("POST", "/v1/chat/completions", key, body=body)
    error = json.loads(content)["error"]
    assert (status, headers["content-type"], error["type"]) == (
        500,
        "application/json",
        "server_error",
    )
    assert "an-id" in error["message"]
    assert "ZeroDivisionError" not in error["message"]


@pytest.mark.parametrize(("method", "path", "expected"), [
    ("DELETE", "/v1/chat/completions", 405), ("GET", "/nothing", 404), ("GET", "/v1/models/", 401),
    ("POST", "/v1/chat/completions/more", 404), ("HEAD", "/version", 401),
])  # fmt: skip
def test_what_no_path_has_is_refused_either_way(both, method, path, expected):
    assert both(method, path)[0] == expected


@pytest.mark.parametrize(("path", "methods"), [
    ("/v1/responses/resp_1", "DELETE, GET, HEAD"), ("/generate", "POST, PUT"), ("/v1/models/a/b", "GET, HEAD"),
    ("/program/prog-1/answer", "POST"), ("/v1/responses/compact", "POST"),
])  # fmt: skip
def test_a_refused_method_is_told_all_that_its_path_has(both, path, methods):
    """RFC 9110, 10.2.1: also of a path that has several routes."""
    status, headers, *_ = both("OPTIONS", path)
    assert (status, headers["allow"]) == (405, methods)


@pytest.mark.parametrize("path", ABSENT)
def test_a_route_of_sglangs_that_is_not_here_says_what_it_needs(both, path):
    status, _, content, _ = both("POST", path)
    told = message_of(content)
    assert (status, told.split(" ")[0]) == (501, path)
    assert "this server doesn't have that" in told


SGLANGS = list(read_surface()["routes"])


def test_each_route_of_sglangs_is_here_or_says_what_it_needs():
    here = {re.sub("{.*?}", "{}", route.path) for route in ROUTES}
    absent = [path for path in SGLANGS if re.sub("{.*?}", "{}", path) not in here]
    assert [path for path in absent if unsupported_path_error(path) is None] == []
    assert len(SGLANGS) - len(absent) >= 60


# Those that SGLang's http_server serves by more than one method.
OF_SEVERAL_METHODS = {
    "POST PUT": ["/generate", "/encode", "/classify", "/v1/rerank"],
    "GET POST": [
        "/flush_cache", "/start_profile", "/stop_profile", "/start_expert_distribution_record",
        "/stop_expert_distribution_record", "/dump_expert_distribution_record", "/get_weights_by_name",
        "/weights_checker", "/release_memory_occupation", "/resume_memory_occupation", "/open_session",
        "/close_session", "/configure_logging",
    ],
}  # fmt: skip


@pytest.mark.parametrize("methods", OF_SEVERAL_METHODS)
def test_each_method_of_sglangs_routes_is_here(both, methods):
    for path in OF_SEVERAL_METHODS[methods]:
        assert path in SGLANGS
        answers = [both(method, path)[0] for method in methods.split()]
        assert answers == [401] * 2 or answers == [403] * 2, path  # for want of a key


def test_routes_that_are_here_are_not_told_absent():
    assert not ABSENT.keys() & {route.path for route in ROUTES}


def test_an_error_of_the_connection_reaches_who_runs_the_application(app):
    """Uvicorn, which logs it."""

    async def receive():
        raise OSError("of the connection")

    with pytest.raises(OSError, match="of the connection"):
        asyncio.run(app({"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
                         "headers": [(b"x-api-key", b"secret")]}, receive, None))  # fmt: skip


def test_the_lifespan_is_starlettes(monkeypatch):
    told = []

    async def run():
        async def start(self):
            told.append("start")

        async def stop(self):
            told.append("stop")

        monkeypatch.setattr(Service, "start", start)
        monkeypatch.setattr(Service, "stop", stop)
        messages = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]

        async def receive():
            return messages.pop()

        async def send(message):
            told.append(message["type"])

        await application(NO_ENGINE, ServerSettings())({"type": "lifespan"}, receive, send)

    asyncio.run(run())
    assert told == ["start", "lifespan.startup.complete", "stop", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, False), ({"host": "::1"}, False), ({"host": "localhost"}, False), ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True), ({"host": "box.lan"}, True), ({"host": "0.0.0.0", "api_key": ("secret",)}, False),
    ],
)  # fmt: skip
def test_a_server_that_strangers_can_use_warns(caplog, settings, warned):
    warn_if_exposed(ServerSettings(**settings))
    assert ("Set --api-key" in caplog.text) == warned
    assert "secret" not in caplog.text
