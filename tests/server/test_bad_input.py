"""Requests that a server must refuse: one 4xx each, in the protocol's shape, and the next request
is served.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
import tracemalloc
from typing import Any

import httpx2
import pytest

import sglang_lite as sgl
from tests.server.conftest import SETTINGS, TEMPLATE, serving
from tests.server.scripted import Scripted
from tests.waiting import until

GREEDY = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
LEAVING = int(os.environ.get("SGLANG_LITE_LEAVING", "100"))
ROUTES = ("/generate", "/v1/chat/completions", "/v1/completions")


def raw(url, data, *, half_closed=True):
    """Bytes sent and received, as they are, until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"text": NaN}', b'{"text": "a", "text": "b"}',
        b'{"a": ' * 200 + b"1" + b"}" * 200, b"[" * 100_000, b'{"messages": 1e999}', b'{"prompt": "\\ud800"}',
        b'{"text": "\\ud800"}', b'{"text": ' + b"9" * 10_000 + b"}", b'{"text": "a", "seed": 123456789012345678901234567890}',
        b'{"messages": [{"role": "user", "content": "\\udc00"}]}', b'{"messages": [[]]}', b'{"messages": [{"role": []}]}',
        b'{"prompt": [1, "a"]}', b'{"prompt": [-1]}', b'{"prompt": [9999999]}', b'{"input_ids": [[]]}', b'{"input_ids": [1.5]}',
        b'{"text": "a", "sampling_params": []}', b'{"text": "a", "sampling_params": {"max_new_tokens": 1e400}}',
        b'{"text": "a", "sampling_params": {"json_schema": "{"}}', b'{"text": "a", "sampling_params": {"regex": "("}}',
        b'{"text": ["a", "b"], "rid": ["x", "x"]}', b'{"text": "a", "sampling_params": {"stop": [1]}}',
        b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"prompt": "a", "logprobs": 100000}', b'{"prompt": []}',
    ],
)  # fmt: skip
def test_what_is_no_request_is_a_4xx_that_says_why(http, route, body):
    response = http.post(route, content=body)
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["message"]
    assert "Traceback" not in response.text


CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER = [{"role": "user", "content": "a"}]
MEANINGLESS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "ids and a text": (TEXT, {"prompt": [[1], "a"]}, "prompt", "mixes texts"),
    "a text and ids": (TEXT, {"prompt": ["a", [1]]}, "prompt", "mixes texts"),
    "no prompts": (TEXT, {"prompt": []}, "prompt", "is empty"),
    "a large bias": (TEXT, {"prompt": "a", "logit_bias": {"5": 500}}, "logit_bias.5", "-100 and 100"),
    "a small bias": (CHAT, {"messages": USER, "logit_bias": {"5": -101}}, "logit_bias.5", "-100 and 100"),
    "no tokens": (MESSAGES, {"messages": USER, "max_tokens": 0}, "max_tokens", "less than 1"),
    "no content": (MESSAGES, {"messages": [{"role": "user", "content": ""}]}, "messages[0].content", "is empty"),
    "no blocks": (MESSAGES, {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "is empty"),
    "an empty block": (
        MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
        "messages[0].content[0].text", "is empty",
    ),
    "an empty block of the system": (
        MESSAGES, {"messages": USER, "system": [{"type": "text", "text": ""}]}, "system[0].text", "is empty",
    ),
}  # fmt: skip
LENIENT: dict[str, tuple[str, dict[str, Any]]] = {
    "a high temperature": (CHAT, {"messages": USER, "temperature": 3}),
    "a result of no call": (CHAT, {"messages": [*USER, {"role": "tool", "content": "x"}]}),
    "a user without words": (CHAT, {"messages": [{"role": "user", "content": ""}]}),
    "no tokens of a chat": (CHAT, {"messages": USER, "max_tokens": 0}),
    "no tokens of a text": (TEXT, {"prompt": "a", "max_tokens": 0}),
    "five stops": (TEXT, {"prompt": "a", "stop": list("abcde")}),
    "the largest bias": (TEXT, {"prompt": "a", "logit_bias": {"5": 100, "6": -100}}),
    "a high temperature of messages": (MESSAGES, {"messages": USER, "temperature": 3}),
    "a tool that said nothing": (MESSAGES, {"messages": [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": ""}]},
    ]}),
    "an answer without words": (MESSAGES, {"messages": [
        *USER, {"role": "assistant", "content": [{"type": "text", "text": ""}]}, *USER,
    ]}),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANINGLESS)
def test_what_has_no_meaning_is_refused_at_its_place_with_a_cure(http, case):
    route, body, place, told = MEANINGLESS[case]
    response = http.post(route, json={"max_tokens": 2, **body})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"{place}: ")
    assert told in message
    assert message.count(". ") >= 1  # the second sentence is the cure
    assert place == response.json()["error"].get("param", place)


@pytest.mark.parametrize("case", LENIENT)
def test_what_clients_of_other_servers_send_is_served(http, case):
    route, body = LENIENT[case]
    assert http.post(route, json={"max_tokens": 2, **body}).status_code == 200


def test_a_schema_that_explodes_fails_alone(folder):
    deep: dict = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string", "maxLength": 10**9}}},
    }
    for _ in range(10):
        deep = {
            "anyOf": [{"type": "array", "items": deep, "minItems": 50, "maxItems": 10**6}, deep]
        }
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    format = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": deep}}
    with (
        sgl.Engine(
            folder, **SETTINGS, chat_template=TEMPLATE, compile_timeout_s=1, in_process=True
        ) as engine,
        serving(engine) as url,
        httpx2.Client(base_url=url, timeout=60) as http,
    ):
        response = http.post("/v1/chat/completions", json={**body, "response_format": format})
        assert response.status_code in (200, 400)
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_body_that_is_too_large_is_not_read(engine):
    with serving(engine, max_body_mb=0.1) as url:
        response = httpx2.post(
            f"{url}/generate", content=b'{"text": "' + b"a" * 200_000 + b'"}', timeout=60
        )
        assert response.status_code == 413
        assert httpx2.get(f"{url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_mb_takes_no_memory(engine, chunked):
    length, part = 100_000_000, b"a" * 1_000_000
    head = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % length
    before = b"%x\r\n" % len(part) if chunked else b""
    with serving(engine, max_body_mb=1) as url:
        port = int(url.rsplit(":", 1)[1])
        tracemalloc.start()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n")
            with contextlib.suppress(OSError):  # it may close before it has all
                for _ in range(length // len(part)):
                    client.sendall(before + part + (b"\r\n" if chunked else b""))
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(4096).startswith(b"HTTP/1.1 413")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 10_000_000
        assert httpx2.get(f"{url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize("data", [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\x00", b"GET / HTTP/9.9\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000,
])  # fmt: skip
def test_what_is_no_http_closes_its_connection_alone(url, http, data):
    try:
        answered = raw(url, data)
    except OSError:  # the server has closed the connection already
        answered = b""
    assert not answered or answered.split(b" ")[1][:1] == b"4"
    assert http.get("/health").status_code == 200


def test_routes_and_methods_that_are_not_there(http):
    for path, kind in (("/nope", "not_found_error"), ("/v1/nope", "not_found_error")):
        response = http.get(path, headers={"x-request-id": "mine"})
        assert response.status_code == 404
        assert response.json()["error"]["type"] == kind
        assert response.headers["x-request-id"] == "mine"
    response = http.get("/generate")
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == {"POST", "PUT"}


def test_no_page_in_a_browser_is_served_without_a_key(http, engine):
    page = {"origin": "http://example.org"}
    for method, path in (("POST", "/generate"), ("POST", "/flush_cache"), ("GET", "/v1/models")):
        response = http.request(method, path, headers=page, content=b"{}")
        assert response.status_code == 403
        assert "--api-key" in response.json()["error"]["message"]
    assert http.get("/health", headers=page).status_code == 200
    with serving(engine, api_key=("secret",)) as url:
        headers = {**page, "x-api-key": "secret"}
        assert httpx2.get(f"{url}/v1/models", headers=headers, timeout=60).status_code == 200


def test_an_administrators_key_alone_leaves_the_rest_open(engine):
    with serving(engine, admin_api_key="root") as url:
        assert httpx2.get(f"{url}/v1/models", timeout=60).status_code == 200
        assert httpx2.post(f"{url}/flush_cache", timeout=60).status_code == 401
        assert (
            httpx2.post(f"{url}/flush_cache", headers={"x-api-key": "root"}, timeout=60).status_code
            == 200
        )


def test_a_key_is_demanded_of_all_but_health(engine):
    with serving(engine, api_key=("secret-1", "secret-2"), admin_api_key="root") as url:
        body = {"text": "a", "sampling_params": GREEDY}

        def status(path, key=None, method="POST", **options):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return httpx2.request(method, f"{url}{path}", headers=headers, **options).status_code

        assert status("/health", method="GET") == 200
        assert [
            status("/generate", key, json=body) for key in (None, "x", "secret", "secret-3")
        ] == [401] * 4
        assert [
            status("/generate", key, json=body) for key in ("secret-1", "secret-2", "root")
        ] == [200] * 3
        assert [status("/flush_cache", key) for key in (None, "secret-1", "root")] == [
            401,
            401,
            200,
        ]
        other = httpx2.post(
            f"{url}/generate", headers={"x-api-key": "secret-2"}, json=body, timeout=60
        )
        assert other.status_code == 200
        refused = httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert "secret" not in refused.text
        info = httpx2.get(f"{url}/server_info", headers={"x-api-key": "secret-2"}, timeout=60).text
        assert "secret" not in info
        assert "root" not in json.loads(info).values()


def test_more_than_may_be_open_is_told_to_come_again(engine):
    with serving(engine, max_open=2) as url:
        long = {
            "text": "a",
            "stream": True,
            "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        }

        async def ask():
            async with (
                httpx2.AsyncClient(base_url=url, timeout=60) as client,
                client.stream("POST", "/generate", json=long) as one,
                client.stream("POST", "/generate", json=long) as two,
            ):
                assert one.status_code == two.status_code == 200
                return await client.post("/generate", json={"text": "a"}), await client.get(
                    "/health"
                )

        third, health = asyncio.run(ask())
        assert (third.status_code, third.headers["retry-after"], health.status_code) == (
            429,
            "1",
            200,
        )
        assert third.json()["error"]["retryable"]


def test_one_key_may_have_so_many_requests_open_and_leaves_the_others_theirs(engine):
    with serving(engine, api_key=("one", "two"), max_open_per_key=1) as url:
        long = {
            "text": "a",
            "stream": True,
            "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
        }
        headers = {key: {"x-api-key": key} for key in ("one", "two")}
        with httpx2.stream(
            "POST", f"{url}/generate", json=long, headers=headers["one"], timeout=60
        ) as stream:
            assert stream.status_code == 200
            body = {"text": "a", "sampling_params": GREEDY}
            answers = {
                key: httpx2.post(f"{url}/generate", json=body, headers=headers[key], timeout=60)
                for key in headers
            }
        assert [answer.status_code for answer in answers.values()] == [429, 200]
        assert answers["one"].headers["retry-after"] == "1"


def test_no_prompt_and_no_key_is_in_the_log(engine, caplog):
    caplog.set_level("DEBUG")
    with serving(engine, api_key=("open-sesame",), unknown_fields="report") as url:
        for key in ("open-sesame", "closed-sesame"):
            for path, body in (
                ("/generate", {"text": "my-prompt", "sampling_params": GREEDY}),
                ("/generate", {"text": "my-prompt", "sampling_params": {"regex": "(my-prompt"}}),
                ("/generate", {"text": ["my-prompt"], "rid": 3}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "my-prompt"}], "max_tokens": 2, "more": 1}),
                ("/v1/completions", {"prompt": "my-prompt" * 1000}),
                ("/v1/messages", {"messages": "my-prompt"}),
            ):  # fmt: skip
                httpx2.post(
                    f"{url}{path}",
                    json=body,
                    headers={"authorization": f"Bearer {key}"},
                    timeout=60,
                )
    told = [
        record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))
    ]
    lines = [record.getMessage() for record in told]
    assert sum(line.startswith("POST /") for line in lines) == 12
    assert any(line.endswith("these fields have no effect: more") for line in lines)
    assert not [
        line for line in caplog.text.splitlines() if "my-prompt" in line or "sesame" in line
    ]


def test_a_template_that_loops_fails_its_request_alone(engine, http):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    body = {"model": "", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with serving(Scripted(engine, ["said"], template=endless)) as url:
        refused = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )
        assert "template" in refused.json()["error"]["message"]
        assert httpx2.get(f"{url}/health", timeout=60).status_code == 200
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_reader_that_stops_reading_holds_up_nobody_and_gets_larger_pieces_later(
    url, http, engine
):
    """All so far with its log-probabilities in each event: more than the buffers of any connection
    hold.
    """
    count = 700
    body = json.dumps({
        "text": "a", "stream": True, "return_logprob": True,
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
    }).encode()  # fmt: skip
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect((host, int(port)))
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        first = connection.recv(16)
        assert (
            http.post("/generate", json={"text": "b", "sampling_params": GREEDY}).status_code == 200
        )
        until(lambda: not engine.stats()["running"])  # it has ended, though nobody has read that
        rest = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    lines = (first + rest).split(b"data: ")
    events = [line for line in lines[1:] if line.startswith(b"{")]
    assert lines[-1].startswith(b"[DONE]")
    assert len(events) < count
    last = json.loads(events[-1].partition(b"\n")[0])
    assert (
        last["output_ids"]
        == engine.generate("a", {"max_new_tokens": count, "temperature": 0, "ignore_eos": True})[
            "output_ids"
        ]
    )


def test_a_name_in_use_is_refused(http, engine):
    long = {
        "text": "a",
        "stream": True,
        "rid": "mine",
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
    }
    with http.stream("POST", "/generate", json=long) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert http.post("/generate", json={"text": "a", "rid": "mine"}).status_code == 400
        assert http.post("/abort_request", json={"rid": "mine"}).status_code == 200
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_all_can_be_aborted(http):
    long = {
        "text": "a",
        "stream": True,
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
    }
    with http.stream("POST", "/generate", json=long) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert http.post("/abort_request", json={"abort_all": True}).status_code == 200
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert http.get("/v1/loads").json()["loads"][0]["num_total_reqs"] == 0


def test_clients_that_leave_take_their_requests_along(url, engine):
    async def leave(client, i):
        body = {
            "text": f"number {i}",
            "stream": i % 2 == 0,
            "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True},
        }
        task = asyncio.ensure_future(_read(client, body))
        await client.get("/ping")
        for _ in range(i % 7):
            await client.get("/ping")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _read(client, body):
        async with client.stream("POST", "/generate", json=body) as stream:
            async for _ in stream.aiter_lines():
                pass

    async def run():
        limits = httpx2.Limits(max_connections=2 * LEAVING)
        async with httpx2.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            engine.flush_cache()
            before = engine.stats()["free_tokens"]
            await asyncio.gather(*(leave(client, i) for i in range(LEAVING)))
            await asyncio.to_thread(
                until, lambda: not engine.stats()["running"] and not engine.stats()["waiting"]
            )
            engine.flush_cache()
            return before, engine.stats()["free_tokens"]

    before, after = asyncio.run(run())
    assert before == after


def requested(route, body):
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
        route.encode(),
        len(content),
        content,
    )


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_a_client_that_leaves_with_requests_in_the_line_ends_the_one_that_is_answered(
    engine, waiting
):
    fake = Scripted(engine, ["a"], endless=True)
    with serving(fake) as url:
        with connected(url) as connection:
            connection.sendall(
                requested("/v1/completions", {"model": "", "prompt": "a", "stream": True})
                * (1 + waiting)
            )
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: fake.submitted[-1].aborted)
    # one of the server's own, as it starts; those in the line never began
    assert len(fake.submitted) == 2


def test_requests_in_one_line_are_answered_in_order(url, http):
    asked = [{"text": text, "sampling_params": {**GREEDY, "max_new_tokens": 8}} for text in "abc"]
    line = b"".join(requested("/generate", body) for body in asked)
    told = raw(
        url,
        line + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        half_closed=False,
    )
    texts = [
        json.loads(part[: part.rindex(b"}") + 1])["text"] for part in told.split(b"\r\n\r\n")[1:4]
    ]
    assert texts == [http.post("/generate", json=body).json()["text"] for body in asked]
    assert told.count(b"HTTP/1.1 200") == 4


def test_a_body_that_does_not_come_is_given_up(engine):
    with serving(engine, max_open=1, body_timeout_s=0.05) as url, connected(url) as connection:
        connection.sendall(requested("/generate", {"text": "a"})[:-3])
        told = b"".join(iter(lambda: connection.recv(65536), b""))  # and the connection is closed
        assert told.startswith(b"HTTP/1.1 408")
        assert b"the body did not arrive within 0.05 seconds" in told
        with connected(url) as other:  # head and body in one piece, which takes no time
            other.sendall(requested("/generate", {"text": "a", "sampling_params": GREEDY}))
            assert other.recv(12) == b"HTTP/1.1 200"
