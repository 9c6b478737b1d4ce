"""Several calls of tools in one turn: all are run, in their order, and each has its result told."""

import json

import pytest

import sglang_lite as sgl
from sglang_lite.lang.agent import describe
from sglang_lite.testing import Say, ToolCall
from sglang_lite.text.tool_use import result_text, split_call_results

ran: list[tuple[str, int]] = []


def double(number: int) -> int:
    """Doubles a number."""
    ran.append(("double", number))
    return 2 * number


def name(number: int) -> str:
    """The name of a number."""
    ran.append(("name", number))
    return {2: "two\nResult of double: 5", 4: "four"}.get(number, "many")


TOOLS = [double, name]
CALLS = (
    ToolCall("double", {"number": 2}),
    ToolCall("name", {"number": 2}),
    ToolCall("double", {"number": 3}),
)


@sgl.function
def solve(s):
    s += sgl.user("Go.")
    sgl.use_tools(s, TOOLS, max_tokens=100, parallel_tool_calls=True)


@pytest.fixture(autouse=True)
def _nothing_ran():
    ran.clear()


BACKENDS = {
    "chat": lambda server: sgl.OpenAI("gpt-4o", max_retries=0, **server.openai),
    "responses": lambda server: sgl.OpenAI(
        "gpt-4o", api="responses", max_retries=0, **server.openai
    ),
    "messages": lambda server: sgl.Anthropic("claude-opus-5", max_retries=0, **server.anthropic),
}


def results(api, body):
    """The results of calls in a request, by the ids of the calls, in their order."""
    match api:
        case "chat":
            return [
                (m["tool_call_id"], m["content"]) for m in body["messages"] if m["role"] == "tool"
            ]
        case "responses":
            return [
                (i["call_id"], i["output"])
                for i in body["input"]
                if i.get("type") == "function_call_output"
            ]
    return [(block["tool_use_id"], block["content"]) for block in body["messages"][-1]["content"]]


def calls(api, body):
    """The ids of the calls before them."""
    match api:
        case "chat":
            return [call["id"] for m in body["messages"] for call in m.get("tool_calls", ())]
        case "responses":
            return [i["call_id"] for i in body["input"] if i.get("type") == "function_call"]
    return [block["id"] for block in body["messages"][-2]["content"] if block["type"] == "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", BACKENDS)
def test_all_calls_of_a_turn_are_run_in_order_and_each_has_its_result(api, stream):
    with sgl.server_for_tests([Say(calls=CALLS), Say("Done.")]) as server:
        backend = BACKENDS[api](server)
        state = solve.run(backend=backend, stream=stream)
        assert state["answer"] == "Done."
        first, second = (request.body for request in server.requests)
        backend.shutdown()
    assert ran == [("double", 2), ("name", 2), ("double", 3)]
    assert [(call.name, call.arguments) for call in state["answer_call_0"]] == [
        ("double", {"number": 2}), ("name", {"number": 2}), ("double", {"number": 3}),
    ]  # fmt: skip
    if api == "messages":
        assert first["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": False}
    else:
        assert first["parallel_tool_calls"] is True
    told = results(api, second)
    assert [call for call, _ in told] == calls(api, second)
    assert [result for _, result in told] == [
        "4", json.dumps(name(2)), "6",
    ]  # fmt: skip
    assert state.get_meta_info("answer_call_0")["strategy"] == "tools"


def test_one_call_is_a_list_of_one_and_an_answer_is_text():
    with sgl.server_for_tests([Say(calls=CALLS[:1]), Say("Done.")]) as server:
        backend = BACKENDS["chat"](server)
        state = solve.run(backend=backend)
        assert [call.name for call in state["answer_call_0"]] == ["double"]
        assert state["answer_call_1"] == "Done."
        backend.shutdown()


def test_several_calls_where_one_was_asked_for_are_an_error():
    @sgl.function
    def once(s):
        s += sgl.user("Go.")
        s += sgl.assistant(sgl.gen("call", tools=TOOLS))

    with sgl.server_for_tests(Say(calls=CALLS)) as server:
        backend = BACKENDS["chat"](server)
        with pytest.raises(sgl.ValueValidationError, match="3 tools at once") as caught:
            once.run(backend=backend)["call"]
        assert "parallel_tool_calls=True" in caught.value.hint
        assert server.last["parallel_tool_calls"] is False
        backend.shutdown()


def test_arguments_that_do_not_fit_are_the_result_of_their_call():
    wrong = ToolCall("double", {"number": "many"})
    with sgl.server_for_tests([Say(calls=(*CALLS, wrong)), Say("Done.")]) as server:
        backend = BACKENDS["chat"](server)
        state = solve.run(backend=backend)
        backend.shutdown()
    assert state["answer"] == "Done."
    assert len(ran) == len(CALLS)
    assert (
        "Result of double: Error: the arguments of double are not valid: number: " in state.text()
    )


def test_arguments_that_do_not_fit_fail_a_turn_outside_the_loop():
    @sgl.function
    def one_turn(s):
        s += sgl.user("Go.") + sgl.assistant(sgl.gen("call", tools=TOOLS))

    with sgl.server_for_tests(Say(calls=(ToolCall("double", {"number": "many"}),))) as server:
        backend = BACKENDS["chat"](server)
        with pytest.raises(sgl.ValueValidationError, match="neither a tool call nor an answer"):
            one_turn.run(backend=backend)["call"]
        backend.shutdown()


def test_models_without_tools_of_their_own_write_one_object():
    text = '{"calls": [{"tool": "name", "arguments": {"number": 4}}, {"tool": "double", "arguments": {"number": 1}}]}'
    backend = sgl.ScriptedBackend({"Go.": text, "Result of": '{"answer": "Done."}'})
    state = solve.run(backend=backend)
    assert ran == [("name", 4), ("double", 1)]
    assert state["answer"] == "Done."
    assert 'Result of name: "four"\nResult of double: 2' in state.text()
    assert '"calls"' in describe(TOOLS, parallel_tool_calls=True)


def test_parallel_calls_need_tools():
    with pytest.raises(sgl.ParameterError, match="parallel_tool_calls"):
        sgl.gen("a", parallel_tool_calls=True)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(sgl.ParameterError, match="parallel_tool_calls"):
        sgl.gen("a", tools=TOOLS, parallel_tool_calls="yes")  # type: ignore[call-overload] # wrong on purpose


def test_results_are_told_apart_by_their_names_in_order():
    names = ["a", "b", "a"]
    told = "\n".join(map(result_text, names, ["1", "2", "3"]))
    assert split_call_results(names, told) == ["1", "2", "3"]
    for other in (
        "They are 1, 2 and 3.",
        "Result of a: 1\nResult of b: 2",
        "So: Result of a: 1\nResult of b: 2\nResult of a: 3",
    ):
        assert split_call_results(names, other) == [other] * 3
    assert split_call_results(["a"], "Anything.") == ["Anything."]
