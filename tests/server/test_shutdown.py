"""A server that ends tells each client, in the form of its protocol."""

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.server.conftest import Running
from tests.server.scripted import Scripted
from tests.waiting import until

TURNS: Any = [{"role": "user", "content": "a"}]


class Clients:
    """Real clients of a server, by the protocol that they speak. Each function sends a request, and
    returns the last error that its client reports.
    """

    def __init__(self, url):
        self._url = url
        self._openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
        )
        self._anthropic = anthropic.Anthropic(
            base_url=url, api_key="none", max_retries=0, timeout=60
        )

    def chat(self, **more):
        with pytest.raises(openai.APIError) as failed:
            list(self._openai.chat.completions.create(model="", messages=TURNS, **more))
        return failed.value

    def completion(self, **more):
        with pytest.raises(openai.APIError) as failed:
            list(self._openai.completions.create(model="", prompt="a", **more))
        return failed.value

    def response(self, **more):
        with pytest.raises(openai.APIError) as failed:
            list(self._openai.responses.create(model="", input="a", **more))
        return failed.value

    def message(self, **more):
        with pytest.raises(anthropic.APIError) as failed:
            list(self._anthropic.messages.create(model="", max_tokens=9, messages=TURNS, **more))
        return failed.value

    def native(self, **more):
        return httpx2.post(f"{self._url}/generate", json={"text": "a", **more}, timeout=60)

    def lines(self, path, **body):
        """Lines of a stream, without a client's reading."""
        body = {"model": "", "stream": True, **body}
        with httpx2.stream("POST", f"{self._url}/v1/{path}", json=body, timeout=60) as stream:
            return [line for line in stream.iter_lines() if line]


class Ending:
    """A server that is told to end while requests are open that never end by themselves."""

    def __init__(self, engine, stack, *open_requests, **settings):
        """Opens requests, given as the name and the fields of a function of `Clients`."""
        fake = Scripted(engine, ["said"], endless=True)
        self.running = stack.enter_context(contextlib.closing(_Closing(fake, **settings)))
        self.url = self.running.url
        self.clients = Clients(self.url)
        pool = stack.enter_context(ThreadPoolExecutor(len(open_requests)))
        stack.callback(self.running.terminate)  # if a test fails: a second signal ends what is open
        self.open = [
            pool.submit(getattr(self.clients, name), *path, **more)
            for name, path, more in open_requests
        ]
        until(lambda: len(fake.submitted) == 1 + len(open_requests))  # one is the server's own
        self.running.terminate()
        until(lambda: "shutting down" in httpx2.get(f"{self.url}/ready", timeout=60).text)

    def end(self):
        """Sends the second signal, and returns what each open request came to."""
        self.running.terminate()
        return [each.result(60) for each in self.open]


class _Closing(Running):
    def close(self):
        self.terminate()
        self.stop()


def told(response):
    """Content of an answer of status 503 from a server that says when to come again."""
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    return response.json()


def test_new_requests_are_refused_while_open_ones_continue(engine):
    with contextlib.ExitStack() as stack:
        ending = Ending(engine, stack, ("chat", (), {}))
        clients = ending.clients
        for name in ("chat", "completion", "response"):
            for more in ({}, {"stream": True}):
                error = told(getattr(clients, name)(**more).response)["error"]
                assert (error["type"], error["code"], error["param"]) == (
                    "server_error",
                    "engine_closed",
                    None,
                )
                assert "the server is shutting down" in error["message"]
        for more in ({}, {"stream": True}):
            found = told(clients.message(**more).response)
            assert (found["type"], found["error"]["type"]) == ("error", "api_error")
            error = told(clients.native(**more))["error"]
            assert (error["code"], error["err_type"]) == (503, "EngineClosedError")
        for path, status in (
            ("/ready", 503),
            ("/ping", 200),
            ("/health", 200),
            ("/v1/models", 200),
            ("/metrics", 200),
        ):
            response = httpx2.get(ending.url + path, timeout=60)
            assert (response.status_code, response.headers["connection"]) == (status, "close")
        assert not any(each.done() for each in ending.open)


def test_what_has_not_ended_gets_an_error_in_its_protocols_form(engine, caplog):
    caplog.set_level("INFO")
    stream, turns = {"stream": True}, {"messages": TURNS, "max_tokens": 9}
    with contextlib.ExitStack() as stack:
        ending = Ending(
            engine, stack, ("chat", (), stream), ("completion", (), stream), ("message", (), stream),
            ("lines", ("chat/completions",), turns), ("lines", ("messages",), turns),
            ("chat", (), {}), ("message", (), {}), ("response", (), {}),
        )  # fmt: skip
        *streams, lines, events, chat, message, response = ending.end()
        for error in streams:
            assert "it was closed" in error.message
        assert json.loads(lines[-2][6:])["error"]["code"] == "engine_closed"
        assert lines[-1] == "data: [DONE]"
        assert events[-2] == "event: error"
        assert json.loads(events[-1][6:])["error"]["type"] == "api_error"
        assert (
            told(chat.response)["error"]["code"]
            == told(response.response)["error"]["code"]
            == "engine_closed"
        )
        assert told(message.response)["error"]["type"] == "api_error"
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith(("sglang_lite", "uvicorn"))
    ]
    assert lines.count("shutting down: 8 requests have not ended, and get an error") == 1
    assert not [
        record for record in caplog.records if record.exc_info or record.levelname == "ERROR"
    ]


def test_a_response_that_has_not_ended_fails(engine):
    with contextlib.ExitStack() as stack:
        ending = Ending(engine, stack, ("lines", ("responses",), {"input": "a"}))
        ((*_, last),) = ending.end()
        found = json.loads(last[6:])
        assert (found["type"], found["response"]["status"]) == ("response.failed", "failed")
        assert "it was closed" in found["response"]["error"]["message"]


def test_the_time_of_open_requests_is_limited(engine):
    with contextlib.ExitStack() as stack:
        ending = Ending(engine, stack, ("chat", (), {}), drain_s=1)
        (chat,) = [each.result(25) for each in ending.open]  # the default is 30 s
        assert told(chat.response)["error"]["code"] == "engine_closed"


def test_a_client_that_does_not_read_does_not_hold_up_the_end(engine, caplog, monkeypatch):
    """More is written than the buffers of a connection hold."""
    monkeypatch.setattr("sglang_lite.server.http_server._LAST_S", 0.2)
    fake = Scripted(engine, ["a" * 10_000_000] * 3)
    running = Running(fake)
    body = json.dumps({"model": "", "messages": TURNS, "stream": True}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    with socket.create_connection(
        ("127.0.0.1", int(running.url.rsplit(":", 1)[1])), timeout=60
    ) as connection:
        connection.sendall(head + body)
        connection.recv(1)
        running.terminate()
        running.terminate()
        running.stop()
    assert not [
        record for record in caplog.records if record.exc_info or record.levelname == "ERROR"
    ]
