"""MCP servers of each version of the protocol: raw ones, and the official package's own; over pipes
and HTTP. The names of their tools, and their results of any JSON type.
"""

import contextlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import sglang_lite as sgl
from tests.lang.code_mode.test_server_tools import run_code
from tests.lang.mcp_library_server import make_server, refuse_discovery
from tests.lang.mcp_raw_server import RESOURCES, STATELESS, RawServer
from tests.waiting import until

HANDSHAKE = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"]
RAW = [sys.executable, str(Path(__file__).with_name("mcp_raw_server.py"))]
LIBRARY = [sys.executable, str(Path(__file__).with_name("mcp_library_server.py"))]


def by_name(tools):
    return {tool.__name__: tool for tool in tools}


# ---------------------------------------------------------------------------------------- versions


@contextlib.contextmanager
def over_http(raw, port=0):
    """Serves a raw server over HTTP. Yields its URL and a list of the headers of each request."""
    headers = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers.append((asked["method"], dict(self.headers.items())))
            try:
                answer = raw.answer(asked)
            except ConnectionAbortedError:
                self.close_connection = True
                return
            content = b"" if answer is None else json.dumps(answer).encode()
            if raw.status != 200:
                content = b"<html>"
            self.send_response(202 if answer is None else raw.status)
            self.send_header("content-type", "application/json")
            if raw.session:
                self.send_header("mcp-session-id", raw.session)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/mcp", headers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def library_over_http(server):
    """Serves the official package's server over HTTP. Yields its URL."""
    settings = uvicorn.Config(server.streamable_http_app(), port=0, log_level="error")
    served = uvicorn.Server(settings)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        until(lambda: served.started)
        yield f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}/mcp"
    finally:
        served.should_exit = True
        thread.join()


@pytest.mark.filterwarnings("ignore:.*the tool odd is left out")
@pytest.mark.parametrize("version", [*HANDSHAKE, STATELESS])
def test_a_raw_server_of_each_version_answers_over_pipes(version):
    with sgl.mcp([*RAW, version]) as tools:
        assert tools.protocol_version == version
        assert by_name(tools)["words"](text="one") == "one and so on"
        row = {"name": "x", "parts": [1, 2]}
        # before 2025-06-18, results were only text
        assert by_name(tools)["row"](name="x") in (row, json.dumps(row))
        assert len(tools.resources()) == len(RESOURCES)
        assert tools.get_prompt("picture")


@pytest.mark.filterwarnings("ignore:.*the tool odd is left out")
@pytest.mark.parametrize("version", ["2025-06-18", STATELESS])
def test_a_raw_server_of_each_age_answers_over_http(version):
    raw = RawServer(version)
    with over_http(raw) as (url, headers), sgl.mcp(url) as tools:
        assert tools.protocol_version == version
        assert by_name(tools)["words"](text="one") == "one and so on"
        assert len(tools.resources()) == len(RESOURCES)
    greeted = {"initialize", "notifications/initialized"} & {*raw.seen}
    assert bool(greeted) == (version != STATELESS)
    called = {name.lower(): value for name, value in dict(headers)["tools/call"].items()}
    assert called["mcp-protocol-version"] == version
    assert "mcp-session-id" not in called


def break_calls(raw):
    """Makes calls with the text "cut" end without a response, and those with the text
    "slow" last until one was cut.
    """
    answer, finish = raw.answer, threading.Event()

    def answer_or_break(asked):
        text = asked.get("params", {}).get("arguments", {}).get("text")
        if text == "slow":
            assert finish.wait(20)
        if text == "cut":
            finish.set()
            raise ConnectionAbortedError
        return answer(asked)

    raw.answer = answer_or_break


@pytest.mark.filterwarnings("ignore:.*the tool odd is left out")
@pytest.mark.parametrize("version", ["2025-06-18", STATELESS])
def test_a_network_error_fails_only_its_own_call(version):
    raw = RawServer(version)
    with over_http(raw) as (url, _), sgl.mcp(url) as tools:
        break_calls(raw)
        words = by_name(tools)["words"]
        slow = words.start({"text": "slow"})
        with pytest.raises(sgl.ToolError, match="failed in words: RemoteProtocolError"):
            words(text="cut")
        assert slow.result() == "slow and so on"
        assert words(text="one") == "one and so on"


def test_a_server_that_is_started_again_is_used_again():
    raw = RawServer(STATELESS)
    with over_http(raw) as (url, _):
        tools = sgl.mcp(url, tools=["words"])
    with tools:
        with pytest.raises(sgl.ToolError, match="failed in words: ConnectError"):
            tools[0](text="one")
        with over_http(raw, port=int(url.split(":")[2].split("/")[0])):
            assert tools[0](text="two") == "two and so on"


@pytest.mark.parametrize(("status", "said"), [(404, "Not Found"), (503, "Service Unavailable")])
def test_an_error_says_the_http_status(status, said):
    raw = RawServer("2025-06-18")
    with over_http(raw) as (url, _), sgl.mcp(url) as tools:
        raw.status = status
        with pytest.raises(sgl.ToolError, match=rf"words: HTTP status {status} \({said}\)"):
            tools[0](text="one")


def test_an_error_says_that_a_session_has_ended():
    raw = RawServer("2025-06-18")
    raw.session = "one"
    with over_http(raw) as (url, _), sgl.mcp(url) as tools:
        raw.status = 404
        with pytest.raises(sgl.ToolError, match="the session has ended") as refused:
            tools[0](text="one")
        assert refused.value.hint == "Connect again with sgl.mcp."


def delay_answers(raw):
    """Makes each answer take 0.7 s."""
    answer, never = raw.answer, threading.Event()

    def answer_late(asked):
        never.wait(0.7)
        return answer(asked)

    raw.answer = answer_late


def test_getting_a_prompt_takes_no_longer_than_the_timeout():
    raw = RawServer("2025-06-18")
    with over_http(raw) as (url, _), sgl.mcp(url, timeout=1.0) as tools:
        delay_answers(raw)
        with pytest.raises(sgl.ToolError, match=r"did not answer prompts/get picture within 1 s"):
            tools.get_prompt("picture")


def test_a_server_that_ends_at_what_is_no_handshake_is_started_again():
    with sgl.mcp([*RAW, "2024-11-05", "--dies"]) as tools:
        assert tools.protocol_version == "2024-11-05"
        assert tools[0](text="one") == "one and so on"


def test_a_server_without_a_version_of_ours_says_which_it_speaks():
    server = Path(__file__).with_name("mcp_bad_server.py")
    with pytest.raises(sgl.ToolError, match=r"too old \(it speaks \['2099-01-01'\]\)"):
        sgl.mcp([sys.executable, str(server), "start: knows no version of ours"])


# A server in this process is called without messages, so it needs no handshake.
@pytest.mark.parametrize(
    ("transport", "old"),
    [("pipe", False), ("pipe", True), ("http", False), ("http", True), ("process", False)],
)
def test_the_official_servers_of_both_ages_answer(transport, old):
    with contextlib.ExitStack() as stack:
        target: Any = [*LIBRARY, *["--old"] * old]
        if transport != "pipe":
            target = make_server()
            if old:
                target.middleware.append(refuse_discovery)
        if transport == "http":
            target = stack.enter_context(library_over_http(target))
        tools = stack.enter_context(sgl.mcp(target))
        assert tools.protocol_version == ("2025-11-25" if old else STATELESS)
        assert [*by_name(tools)] == ["row", "numbers"][: 2 - old]
        assert tools[0](count=3) == {"count": 3}
        if not old:
            assert tools[1](count=3) == [0, 1, 2]
        (listed,) = tools.resources()
        assert (listed.uri, listed.name, listed.size) == ("note://a", "a", 5)
        assert tools.read_resource(listed.uri).text == "A note"
        (prompt,) = tools.prompts()
        assert (prompt.name, [each.name for each in prompt.arguments]) == ("greet", ["name"])


# ----------------------------------------------------------------------------------------- results


RESULTS = [
    ("row", {"name": "x"}, {"name": "x", "parts": [1, 2]}),
    ("numbers", {"count": 2}, [0, 1]),
    ("total", {"values": [1, 2]}, 3),
    ("shout", {"text": "é"}, "É"),
    ("is_even", {"value": 4}, True),
    ("find", {"value": 4}, None),
    ("words", {"text": "one"}, "one and so on"),
]


@pytest.mark.parametrize(("name", "given", "result"), RESULTS)
def test_results_of_any_type_reach_callers_and_models(raw, name, given, result):
    tool = by_name(raw)[name]
    found = tool(**given)
    assert found == result
    assert type(found) is type(result)
    answers = iter([json.dumps({"tool": name, "arguments": given}), '{"answer": "so"}'])

    @sgl.function
    def asks(s):
        s += sgl.user("What is it?")
        return sgl.use_tools(s, [tool])

    state = asks.run(backend=sgl.ScriptedBackend(lambda _: next(answers)))
    shown = state.messages()[2]["content"].removeprefix(f"Result of {name}: ")
    assert json.loads(shown) == result


def test_a_tool_whose_results_have_a_wrong_schema_is_left_out():
    said = "the tool odd is left out: the schema of its results can't be used: json_schema: type must be"
    with pytest.warns(UserWarning, match=said), sgl.mcp([*RAW, STATELESS]) as tools:
        assert "odd" not in by_name(tools)
    with pytest.raises(sgl.ParameterError, match="odd: the schema of its results can't be used"):
        sgl.mcp([*RAW, STATELESS], tools=["odd"])


@pytest.fixture
def odd():
    """Tools with odd schemas and results, by name."""
    with contextlib.ExitStack() as stack:

        def connect(**tools):
            raw = RawServer(STATELESS)
            raw.tools = tools
            url, _ = stack.enter_context(over_http(raw))
            return by_name(stack.enter_context(sgl.mcp(url)))

        yield connect


def test_a_pattern_of_results_that_takes_exponential_time_is_checked(odd):
    slow = {"type": "string", "pattern": "^(a+)+$"}
    tools = odd(
        bad=(slow, {"structuredContent": "a" * 40 + "!"}), fine=(slow, {"structuredContent": "aaa"})
    )
    with pytest.raises(sgl.ToolError, match="failed in bad: its result breaks its schema"):
        tools["bad"]()
    assert tools["fine"]() == "aaa"


@pytest.mark.parametrize("schema", [{"pattern": r"^(a|aa)+\1$"}, {"$ref": "#/$defs/none"}])
def test_a_tool_whose_results_can_not_be_checked_is_left_out(odd, schema):
    with pytest.warns(UserWarning, match="the tool bad is left out: the schema of its results"):
        tools = odd(bad=(schema, {}), fine=(None, {}))
    assert [*tools] == ["fine"]


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_a_tool_without_a_usable_name_is_left_out(odd, name):
    with pytest.warns(UserWarning, match=f"the tool {re.escape(repr(name))} is left out: its name"):
        tools = odd(**{name: (None, {}), "fine": (None, {})})
    assert [*tools] == ["fine"]


def test_a_result_without_what_its_schema_describes_is_an_error(odd):
    tools = odd(bad=({"type": "string"}, {}))
    with pytest.raises(sgl.ToolError, match="its result has no structured content"):
        tools["bad"]()


def test_texts_of_resources_in_results_are_shown(odd):
    note = {"uri": "note://a", "text": "A note"}
    content = [
        {"type": "resource", "resource": note},
        {"type": "resource_link", "uri": "note://b", "name": "b"},
        {"type": "resource", "resource": {"uri": "bin://c", "blob": ""}},
    ]
    tools = odd(reads=(None, {"content": content}))
    assert tools["reads"]() == "A note\n(resource note://b: b)\n(resource, not shown)"


def test_a_failure_with_only_structured_content_is_shown(odd):
    tools = odd(fails=(None, {"structuredContent": {"why": "no row"}, "isError": True}))
    assert tools["fails"]() == 'Error: {"why": "no row"}'


def test_a_result_that_breaks_its_schema_is_an_error_with_the_tools_name(raw):
    with pytest.raises(sgl.ToolError, match=r"failed in lies: .* 'three' is not of type 'integer'"):
        by_name(raw)["lies"]()


# ------------------------------------------------------------------------------- names and listings


def search(query: str) -> str:
    """Searches."""
    return query


def test_tools_of_one_name_are_an_error_that_names_both(raw):
    named = by_name(raw)["words"]
    with sgl.mcp([*RAW, "2025-06-18"]) as other:

        @sgl.function
        def asks(s, tools):
            s += sgl.user("?")
            return sgl.use_tools(s, tools)

        for use in (
            lambda tools: asks.run(tools, backend=sgl.ScriptedBackend(default="x")),
            sgl.CodeTools,
        ):
            with pytest.raises(sgl.ParameterError) as refused:
                use([named, other[0]])
            assert re.search(
                "two tools are called 'words', of the MCP server .* 2026-07-28 and of the MCP server"
                ".* 2025-06-18",
                refused.value.message,
            )
            assert 'sgl.mcp(…, prefix="other_")' in refused.value.hint
    with pytest.raises(sgl.ParameterError) as refused:
        sgl.gen("a", tools=[named, search, by_name([search])["search"]])
    assert re.search(
        r"'search', of the function \(.*py:\d+\) and of the function", refused.value.message
    )
    assert refused.value.hint == "Rename one of them."


def test_a_prefix_tells_tools_of_one_name_apart(raw):
    with sgl.mcp([*RAW, "2025-06-18"], tools=["words"], prefix="other_") as (other,):
        assert other.__name__ == "other_words"
        value = run_code('return other_words(text="a") + words(text="b")', [other, raw[0]])["value"]
        assert value == "a and so onb and so on"
    wrong: Any
    for wrong in ("two words", 3):
        with pytest.raises(sgl.ParameterError, match="can't be part of a tool's name"):
            sgl.mcp([*RAW, "2025-06-18"], prefix=wrong)


def test_a_tool_that_is_listed_twice_is_told():
    with pytest.warns(UserWarning, match="it lists the tool words twice; the first one is used"):
        tools = sgl.mcp([*RAW, "2025-06-18", "--twice"])
    with tools:
        assert [*by_name(tools)] == ["words", "row"]


def test_a_hundred_pages_are_read():
    with sgl.mcp([*RAW, "2025-06-18", "--pages", "100"]) as tools:
        assert [*by_name(tools)] == ["words", "row"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pages", "101"], "its list of tools has more than 100 pages"),
        (["--repeats"], "its list of tools does not end: it repeats the cursor '2'"),
    ],
)
@pytest.mark.parametrize("names", [None, ["words"]])
def test_a_list_that_does_not_end_is_an_error(options, said, names):
    with pytest.raises(sgl.ToolError) as refused:
        sgl.mcp([*RAW, "2025-06-18", *options], tools=names)
    assert f"2025-06-18 {' '.join(options)} can't be used: {said}." in refused.value.message
