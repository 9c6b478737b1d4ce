"""Tools of MCP servers in programs, and programs as tools of one."""

import asyncio
import enum
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters

import sglang_lite as sgl
from sglang_lite.commands.mcp_server import build_mcp_server
from sglang_lite.lang.tools import SchemaTool
from tests.lang.mcp_demo_server import server

COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_demo_server.py"))]


@pytest.fixture(scope="module")
def tools():
    """Tools of a server in a process of its own, by name."""
    with sgl.mcp(COMMAND) as found:
        yield {tool.__name__: tool for tool in found}


def called(answers, tools, **options):
    """The first call that a model makes which answers so."""

    @sgl.function
    def calls(s):
        s += sgl.user("Do it.")
        s += sgl.assistant(sgl.gen("call", tools=tools, tool_choice="required", **options))

    return calls.run(backend=sgl.ScriptedBackend(answers))["call"]


def test_tools_run_in_the_servers_process(tools):
    assert [*tools] == ["add", "count", "fails", "dies", "long", "waits"]
    assert tools["add"].__doc__ == "Adds two numbers."
    assert tools["add"](a=1) == {"result": 4}
    assert tools["count"](
        place={"name": "a", "near": [{"name": "b", "near": [{"name": "c"}]}]}
    ) == {"result": "3"}


def test_a_model_is_held_to_the_servers_schema(tools):
    fitting = {"tool": "count", "arguments": {"place": {"name": "a", "near": [{"name": "b"}]}}}
    call = called({"": json.dumps(fitting)}, [*tools.values()])
    assert (call.name, call.arguments) == ("count", fitting["arguments"])
    assert call.run() == {"result": "2"}
    for wrong in (
        {"tool": "count", "arguments": {"place": {"name": "a", "near": [{"name": 3}]}}},
        {"tool": "add", "arguments": {"a": "1"}},
        {"tool": "add", "arguments": {"a": 1, "c": 2}},
        {"tool": "add", "arguments": {}},
    ):
        with pytest.raises(sgl.BackendError, match="does not satisfy"):
            called({"": json.dumps(wrong)}, [*tools.values()])


def test_an_engine_writes_calls_that_fit(tools, engine):
    @sgl.function
    def calls(s, tool):
        s += "Call: " + sgl.gen(
            "call", tools=[tool], tool_choice="required", max_tokens=400, temperature=1.0
        )

    for name in ("add", "count"):
        whole = 0
        for seed in range(9):
            try:
                call = calls.run(tools[name], backend=engine, seed=seed)["call"]
            except sgl.TruncatedError:
                continue
            assert call.run()["result"]
            whole += 1
        assert whole


def test_use_tools_answers_with_them_and_python_functions(tools):
    def double(x: int) -> int:
        """Doubles."""
        return 2 * x

    @sgl.function
    def asks(s):
        s += sgl.user("2 + 3, doubled?")
        return sgl.use_tools(s, [tools["add"], double])

    answers = iter(
        [
            '{"tool": "add", "arguments": {"a": 2}}',
            '{"tool": "double", "arguments": {"x": 5}}',
            '{"answer": "10"}',
        ]
    )
    state = asks.run(backend=sgl.ScriptedBackend(lambda _: next(answers)))
    assert state.ret_value == "10"
    assert 'Result of add: {"result": 5}' in state.text()


def test_a_failure_of_a_tool_is_its_result(tools):
    assert tools["fails"](why="no reason").startswith("Error: ")


def test_a_result_that_is_too_long_is_an_error(tools):
    with pytest.raises(sgl.ToolError, match="long gave 3,000,0"):
        tools["long"]()
    # not by a pipe, where the SDK takes 20 s
    with sgl.mcp(server, tools=["long", "add"]) as (long, add):
        with pytest.raises(sgl.ToolError, match="long gave 50,000,0"):
            long(size=50_000_000)
        assert add(a=1) == {"result": 4}


def test_a_server_that_dies_in_a_call_fails_that_call_and_the_next():
    with sgl.mcp(COMMAND, tools=["dies", "add"]) as (dies, add):
        for tool, arguments in ((dies, {}), (add, {"a": 1})):
            with pytest.raises(sgl.ToolError, match="failed in") as refused:
                tool(**arguments)
            assert refused.value.hint == "Connect again with sgl.mcp."


def test_a_call_that_takes_too_long_is_given_up():
    with (
        sgl.mcp(server, tools=["waits"], timeout=0.3) as (waits,),
        pytest.raises(sgl.ToolError, match=r"did not answer waits within 0\.3 s"),
    ):
        waits()


def test_a_command_that_never_answers_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.05)
    command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 47"]
    with pytest.raises(sgl.ToolError, match=r"did not answer within 0\.5 s"):
        sgl.mcp(command, timeout=0.5)
    process = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{process}").exists()


def test_a_tool_keeps_its_connection():
    (add,) = [tool for tool in sgl.mcp(server) if tool.__name__ == "add"]
    gc.collect()
    assert add(a=1) == {"result": 4}


def test_a_name_of_an_argument_may_be_any():
    schema = {"properties": {"self": {"type": "integer"}}}
    assert SchemaTool("t", "", schema, dict)(self=3) == {"self": 3}


def test_a_schema_may_name_its_members_in_branches():
    schema = {"type": "object", "anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}]}
    assert SchemaTool("t", "", schema, dict).validate_json('{"a": 1}') == {"a": 1}


def test_threads_may_call_at_once():
    with sgl.mcp(server) as (add, *_):
        sums: list[object] = [None] * 16
        threads = [
            threading.Thread(target=lambda i=i: sums.__setitem__(i, add(a=i, b=i)))
            for i in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sums == [{"result": 2 * i} for i in range(16)]


def test_a_connection_ends_once_nobody_uses_its_tools():
    def connections():
        return sum(thread.name == "sglang_lite-mcp" for thread in threading.enumerate())

    before = connections()
    found = sgl.mcp(server)
    assert connections() == before + 1
    assert repr(found) == "McpTools('demo': add, count, fails, dies, long, waits)"
    del found
    gc.collect()
    assert connections() == before
    with sgl.mcp(server) as tools:
        pass
    with pytest.raises(sgl.ToolError, match="is disconnected"):
        tools[0](a=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"server": "there-is-no-such-command x"},
            "there-is-no-such-command x can't be started: No such file",
        ),
        (
            {"server": [sys.executable, "-c", "raise SystemExit(3)"]},
            "can't be used: Connection closed.",
        ),
        ({"server": "http://127.0.0.1:9/mcp"}, "http://127.0.0.1:9/mcp can't be used: "),
        ({"server": ""}, "server: [] is no command."),
        ({"server": server, "tools": ["nd"]}, "demo has no tool 'nd'; it has: add, count"),
        ({"server": server, "env": {"A": "b"}}, "only a command has environment variables"),
        ({"server": server, "timeout": 0}, "timeout: 0 is not a number of seconds above 0"),
        ({"server": server, "timeout": 1e30}, "timeout: 1e+30 s is too long."),
        ({"server": None}, "server: None is no server."),
        ({"server": 5}, "server: 5 is no server."),
        ({"server": Path("/there/is/no/such")}, "/there/is/no/such can't be started"),
        ({"server": "ls 'a"}, "can't be split into words: No closing quotation."),
        ({"server": "ls a\0b"}, "is no command."),
        ({"server": ["ls"], "env": {"A": 3}}, "env: 'A' or its value is no text."),
        ({"server": ["ls"], "env": "A=3"}, "env: 'A=3' is no dict."),
        ({"server": server, "tools": "add"}, "tools: 'add' is no list of names."),
        ({"server": server, "tools": 3}, "tools: 3 is no list of names."),
        ({"server": server, "tools": [3]}, "tools: 3 is no name of a tool."),
        ({"server": server, "tools": ["add", "add"]}, "tools: 'add' is listed twice."),
    ],
)
def test_what_can_not_be_connected_is_an_error(given, said):
    with pytest.raises(sgl.SglError) as refused:
        sgl.mcp(**given)
    assert said in str(refused.value)


def test_tools_may_be_selected_by_a_generator():
    with sgl.mcp(server, tools=(name for name in ["count", "add"])) as tools:
        assert [tool.__name__ for tool in tools] == ["count", "add"]


def test_secrets_in_a_url_are_not_shown():
    with pytest.raises(sgl.ToolError) as refused:
        sgl.mcp("http://me:hush@127.0.0.1:9/mcp?api_key=hush#hush")
    assert "http://127.0.0.1:9/mcp can't be used" in str(refused.value)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string"}, "t: its schema is not that of an object"),
        ({"type": "object", "properties": {"x": {"type": "int"}}}, "t: its schema can't be used: "),
        (
            {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}},
            "t: its schema can't be used: json_schema: the reference '#/$defs/none' leads to nothing",
        ),
    ],
)
def test_a_schema_that_can_not_be_used_names_its_tool(schema, said):
    with pytest.raises(sgl.ParameterError) as refused:
        SchemaTool("t", "", schema, dict)
    assert said in str(refused.value)


def test_programs_are_tools_of_a_server():
    @sgl.function
    def greets(s, name: str, often: int = 1):
        """Greets somebody."""
        s += f"Greet {name}: " + sgl.gen("greeting", max_tokens=5)
        if name == "nobody":
            raise ValueError("there is nobody")
        return [s["greeting"]] * often

    made = build_mcp_server(
        "programs", {"greets": greets}, sgl.ScriptedBackend({"Ann": "Hello Ann"})
    )
    with sgl.mcp(made) as (tool,):
        assert (tool.__name__, tool.__doc__) == ("greets", "Greets somebody.")
        assert tool.parameters == "(name: string, often?: integer)"
        assert json.loads(tool(name="Ann", often=2)["result"]) == {
            "greeting": "Hello Ann",
            "return": ["Hello Ann"] * 2,
        }
        assert "there is nobody" in tool(name="nobody")


@pytest.mark.parametrize(("mode", "version"), [("auto", "2026-07-28"), ("legacy", "2025-11-25")])
def test_the_command_serves_programs_to_the_official_client(mode, version, tmp_path, caplog):
    file = tmp_path / "served_file.py"
    file.write_text(
        "import sglang_lite as sgl\nprint('imported')\nsgl.set_default_backend(sgl.ScriptedBackend({'': 'yes'}))\n"
        "@sgl.function\ndef asks(s, question: str):\n    print('runs')\n    s += question + sgl.gen('answer')\n"
    )
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "sglang_lite.cli", "mcp", str(file)]
    )

    async def ask():
        async with Client(command, mode=mode) as client:
            assert client.protocol_version == version
            return await client.call_tool("asks", {"question": "Is it so?"})

    answer = asyncio.run(ask())
    assert json.loads(answer.content[0].text) == {"answer": "yes"}
    # the client tells of lines that are no messages, such as what a body prints
    assert not caplog.records


INSPECTOR = os.environ.get("MCP_INSPECTOR", "mcp-inspector")


@pytest.mark.skipif(
    shutil.which(INSPECTOR) is None,
    reason="no mcp-inspector: npm install @modelcontextprotocol/inspector@2",
)
def test_the_inspector_lists_and_calls_what_the_command_serves(tmp_path):
    file = tmp_path / "served_file.py"
    file.write_text(
        "import sglang_lite as sgl\nsgl.set_default_backend(sgl.ScriptedBackend({'': 'yes'}))\n"
        "@sgl.function\ndef asks(s, question: str, often: int = 1):\n    '''Asks.'''\n"
        "    s += question + sgl.gen('answer')\n    if often > 3:\n        raise ValueError('too often')\n"
    )
    served = [sys.executable, "-m", "sglang_lite.cli", "mcp", str(file)]

    def inspected(*method):
        command = [INSPECTOR, "--cli", "--connect-timeout", "300000", *served, "--method", *method]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    (tool,) = inspected("tools/list")["tools"]
    assert (tool["name"], tool["description"], tool["inputSchema"]["required"]) == (
        "asks",
        "Asks.",
        ["question"],
    )
    call = ["tools/call", "--tool-name", "asks", "--tool-arg", "question=Is it so?"]
    assert json.loads(inspected(*call)["content"][0]["text"]) == {"answer": "yes"}
    failed = inspected(*call, "often=4")
    assert (failed["isError"], "too often" in failed["content"][0]["text"]) == (True, True)


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize("old", [False, True])
def test_the_official_client_lists_and_calls_bound_programs_with_enums(old):
    @sgl.function
    def paints(s, kind: str, colour: Colour, often: int = 1):
        return [kind, colour] * often

    made = build_mcp_server(
        "programs", {"paints": paints.bind(kind="wall")}, sgl.ScriptedBackend({})
    )

    async def ask():
        async with Client(made, mode="legacy" if old else "auto") as client:
            (tool,) = (await client.list_tools()).tools
            return tool.input_schema, await client.call_tool(
                "paints", {"colour": "red", "often": 2}
            )

    schema, answer = asyncio.run(ask())
    assert [*schema["properties"]] == ["colour", "often"]
    assert schema["required"] == ["colour"]
    assert json.loads(answer.content[0].text) == {"return": ["wall", "red"] * 2}


def test_a_server_that_lies_about_its_schemas_answers_the_rest():
    command = [sys.executable, str(Path(__file__).with_name("mcp_odd_server.py"))]
    with warnings.catch_warnings(record=True, action="always") as told:
        tools = sgl.mcp(command)
    with tools as (good, lies):
        with pytest.raises(
            sgl.ToolError, match=r"failed in lies: .* 'three' is not of type 'integer'"
        ) as refused:
            lies()
        assert "\n" not in str(refused.value)
        assert good(x=3) == "3"
    said = "".join(str(each.message) for each in told)
    assert "the tool refused is left out: its schema can't be used: inputSchema.type: " in said
    assert "the tool unheld is left out: its schema can't be used: " in said
    assert "it lists the tool good twice; the first one is used." in said
    for name in ("refused", "unheld"):
        with pytest.raises(sgl.ParameterError, match=f"{name}: its schema can't be used"):
            sgl.mcp(command, tools=[name])
    with pytest.raises(sgl.ParameterError, match="has no tool 'other'"):
        sgl.mcp(command, tools=["other"])
