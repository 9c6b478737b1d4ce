"""The clients that backends use where no SDK is installed: what they need, send and refuse."""

import asyncio
import contextlib
import importlib.metadata
import subprocess
import sys
from socketserver import StreamRequestHandler

import httpx2
import pytest
from anthropic._constants import ANTHROPIC_API_VERSION
from anthropic_answers import said as claude_said
from api_server import Drop, Hold, Reply
from hidden_sdks import hide_sdks
from openai_answers import ask, failure, said, streamed

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.lang.concurrency.loop import executor
from sglang_lite.testing import http


@pytest.fixture(autouse=True)
def without_sdks(monkeypatch):
    hide_sdks(monkeypatch)


PROGRAM = """
import importlib.metadata, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("openai", "anthropic"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
if sys.argv[3] == "old":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "1.99.9" if name in ("openai", "anthropic") else version(name)

import sglang_lite as sgl

@sgl.function
def program(s):
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("a"))

kind = {"openai": sgl.OpenAI, "anthropic": sgl.Anthropic}[sys.argv[1]]
backend = kind("claude-haiku-4-5" if kind is sgl.Anthropic else "gpt-4o", base_url=sys.argv[2], api_key="k")
print(program.run(backend=backend)["a"])
print("".join(program.run(backend=backend, stream=True).text_iter("a")))
"""


@pytest.mark.parametrize("installed", ["none", "old"])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_program_runs_where_no_sdk_that_works_can_be_imported(api, provider, installed):
    api.answers = (
        [said("Hello."), streamed("Hel", "lo.")]
        if provider == "openai"
        else [claude_said("Hello.")]
    )
    url = api.url + ("/v1" if provider == "openai" else "")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, provider, url, installed], capture_output=True, text=True
    )
    assert (ran.stdout.split(), ran.returncode) == (["Hello.", "Hello."], 0), ran.stderr


def test_keys_accounts_and_headers_are_sent(api, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-environment")
    monkeypatch.setenv("OPENAI_BASE_URL", api.url + "/v1/")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    api.answers = [said("x")]
    backend = OpenAI(
        "gpt-4o",
        project="proj-2",
        default_headers={"X-Team": "a", "user-agent": "mine"},
        default_query={"v": "3"},
    )
    assert ask(backend) == "x"
    backend.shutdown()
    request = api.requests[0]
    assert request.path == "/v1/chat/completions?v=3"
    assert request.headers["authorization"] == "Bearer sk-from-environment"
    assert request.headers["openai-organization"] == "org-1"
    assert request.headers["openai-project"] == "proj-2"
    assert request.headers["x-team"] == "a"
    assert request.headers["user-agent"] == "mine"


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"api_key": "key-1"}, "Bearer key-1"),
        ({"auth_token": "token-1"}, "Bearer token-1"),
        ({}, "Bearer key-of-environment"),
    ],
)
def test_claude_gets_a_key_or_a_token(api, monkeypatch, options, value):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "key-of-environment")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "X-Team: a\n\nX-Other:b")
    api.answers = [claude_said("x")]
    backend = Anthropic("claude-haiku-4-5", **options)
    assert ask(backend) == "x"
    backend.shutdown()
    headers = api.requests[0].headers
    assert headers["authorization"] == value
    assert headers["anthropic-version"] == ANTHROPIC_API_VERSION
    assert (headers["x-team"], headers["x-other"]) == ("a", "b")


def test_an_empty_key_of_the_environment_is_none(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "")
    with pytest.raises(sgl.ParameterError, match="api_key: no key is given"):
        Anthropic("claude-haiku-4-5")
    with pytest.raises(sgl.ParameterError, match="auth_token: api_key is given, too"):
        Anthropic("claude-haiku-4-5", api_key="a", auth_token="b")


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("kind", [OpenAI, Anthropic])
def test_a_key_is_not_sent_on_to_another_host(api, kind, status):
    with sgl.server_for_tests() as other:
        other.answers = lambda request: said("x")
        api.answers = [Reply("", status, {"Location": f"{other.url}/v1/x"})]
        backend = kind(
            "claude-haiku-4-5", api_key="key-secret-0123", base_url=api.url, max_retries=0
        )
        with contextlib.suppress(sgl.SglError):
            ask(backend)
        backend.shutdown()
    assert len(other.requests) == 1
    assert "key-secret-0123" not in str(other.requests[0].headers)


def test_an_answer_of_another_content_type_is_read(api, openai):
    body = said("x").body.to_json()
    for kind in ("text/plain", "application/JSON"):
        api.answers = [Reply(body, headers={"Content-Type": kind})]
        assert ask(openai()) == "x"


def test_a_client_of_ones_own_is_used_with_its_timeout(api):
    api.answers = [Hold()]
    client = httpx2.AsyncClient(timeout=0.2)
    backend = OpenAI("gpt-4o", api_key="k", base_url=api.url, http_client=client, max_retries=0)
    with pytest.raises(sgl.RequestTimeoutError):
        ask(backend)
    asyncio.run_coroutine_threadsafe(client.aclose(), executor().loop).result()


@pytest.mark.parametrize(
    ("answers", "tries"),
    [
        ([failure(400, "no")], 1),
        ([failure(500, "x", **{"x-should-retry": "false"})], 1),
        ([failure(400, "x", **{"x-should-retry": "true", "retry-after-ms": "1"}), said("ok")], 2),
        ([failure(429, "x", **{"Retry-After": "121"})], 1),
        ([failure(503, "x", **{"retry-after-ms": "1"})] * 3, 3),
        ([Drop(), said("ok")], 2),
    ],
)
def test_only_what_may_succeed_later_is_tried_again(api, openai, answers, tries):
    api.answers = answers
    backend = openai(max_retries=2)
    if answers[-1] is answers[0]:
        with pytest.raises(sgl.BackendError):
            ask(backend)
    else:
        assert ask(backend) == "ok"
    assert len(api.requests) == tries


@pytest.mark.parametrize("streams", [False, True])
def test_calls_in_a_row_share_a_connection(api, openai, monkeypatch, streams):
    accepted = []
    monkeypatch.setattr(
        http.Handler,
        "setup",
        lambda self: (accepted.append(self), StreamRequestHandler.setup(self)),
    )
    api.answers = (lambda request: streamed("o", "k")) if streams else (lambda request: said("ok"))
    backend = openai()

    @sgl.function
    def program(s):
        for name in "abcd":
            s += sgl.user("x") + sgl.assistant(sgl.gen(name))

    assert program.run(backend=backend, stream=streams)["d"] == "ok"
    assert (len(api.requests), len(accepted)) == (4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"webhook_secret": "x"},
            r"webhook_secret: .*sglang-lite\[openai\].*Otherwise use api_key",
        ),
        ({"api_keyy": "x"}, r"api_keyy: .*Otherwise use api_key"),
        ({"api_key": lambda: "k"}, "api_key: function is not a text"),
        ({"max_retries": -1}, "max_retries: -1 is not a number of retries"),
        ({"timeout": "5"}, "timeout: '5' is not a number of seconds"),
        ({"base_url": "ftp://x"}, "base_url: 'ftp://x' is not an address"),
        ({"is_azure": True}, r"is_azure: Azure needs OpenAI's SDK.*sglang-lite\[openai\]"),
        (
            {"client": object()},
            "client: no SDK of a version that works here is installed, for AsyncOpenAI",
        ),
        ({"api_key": "key\n"}, "api_key: it has blanks, line ends"),
        ({"default_headers": 5}, "default_headers: int is not a mapping"),
        ({"default_query": [1]}, "default_query: list is not a mapping"),
        ({"http_client": 5}, "http_client: int is not an httpx2.AsyncClient"),
        ({"base_url": "http://x/v1?a=1"}, "base_url: an address with a query"),
    ],
)
def test_what_only_an_sdk_can_do_is_refused_by_name(options, message):
    given = options if "client" in options else {"api_key": "k", **options}
    with pytest.raises(sgl.ParameterError, match=message):
        OpenAI("gpt-4o", **given)


@pytest.mark.parametrize(
    ("version", "agent"),
    [
        ("3.99", "AsyncOpenAI/"),
        ("2.9", "sglang-lite/"),
        ("4.0", "sglang-lite/"),
        ("odd", "sglang-lite/"),
    ],
)
def test_an_installed_sdk_is_used_if_it_has_the_right_version(
    api, openai, monkeypatch, version, agent
):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    api.answers = [said("x")]
    ask(openai())
    assert api.requests[0].headers["user-agent"].startswith(agent)
