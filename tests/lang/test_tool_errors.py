"""Failures of tools: what the model reads of them, and what ends the program instead."""

import copy
import json
import pickle
from typing import Annotated

import pytest
from pydantic import AfterValidator

import sglang_lite as sgl
from sglang_lite.lang.failure_text import describe_failure, redact
from sglang_lite.testing import Say, ToolCall
from tests.lang.test_tools import Native, answer, call, qwen


def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


def broken(a: int = 0) -> int:
    """Never works."""
    raise LookupError(f"no row {a} in /var/lib/rows/main.db")


@sgl.function
def agent(s, /, tools, **options):
    s += sgl.user("2+3?")
    return sgl.use_tools(s, tools, **options)


def run(texts, tools, backend=sgl.ScriptedBackend, **options):
    """A run in which the model writes these texts."""
    left = iter(texts)
    return agent.run(tools, backend=backend(lambda _: next(left)), **options)


def results(state):
    return [m["content"] for m in state.messages() if m["role"] == "user"][1:]


# ------------------------------------------------------------------------------ shown to the model


def test_what_a_tool_raises_is_its_result():
    state = run([call("broken", a=3), call("add", a=2, b=3), answer("5")], [broken, add])
    assert state.ret_value == "5"
    assert results(state) == [
        "Result of broken: Error: LookupError: no row 3 in …/main.db",
        "Result of add: 5",
    ]


def test_an_error_for_the_model_is_shown_as_it_is():
    def read(path: str) -> str:
        raise sgl.ToolError(f"{path} is not one of /data/a.txt and /data/b.txt.")

    state = run([call("read", path="/etc/x"), answer("no")], [read])
    assert results(state) == [
        "Result of read: Error: /etc/x is not one of /data/a.txt and /data/b.txt."
    ]


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError("no text")


class _Opaque:
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def raises_what_has_no_text() -> int:
    raise UnreadableError


def returns_what_has_no_text() -> object:
    return {"key": _Opaque()}


def returns_keys_without_text() -> object:
    return {_Opaque(): 1}


def returns_a_generator() -> object:
    return (each for each in "ab")


def stops() -> None:
    raise StopIteration


def recurses() -> None:
    recurses()


def asserts() -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("tool", "shown"),
    [
        (raises_what_has_no_text, "UnreadableError"),
        (returns_what_has_no_text, "a value of type dict, which could not be written as text"),
        (returns_keys_without_text, "a value of type dict, which could not be written as text"),
        (returns_a_generator, "returns_a_generator returned a generator, which has no text"),
        (stops, "StopIteration"),
        (recurses, "RecursionError: maximum recursion depth exceeded"),
        (asserts, "AssertionError"),
    ],
)
def test_whatever_a_tool_does_the_model_reads_of_it(tool, shown):
    state = run([call(tool.__name__), answer("ok")], [tool])
    assert state.ret_value == "ok"
    (result,) = results(state)
    assert result.startswith(f"Result of {tool.__name__}: Error: ")
    assert shown in result


def test_half_a_character_is_not_sent():
    def halves() -> str:
        return "a\ud800b"

    assert results(run([call("halves"), answer("ok")], [halves])) == ['Result of halves: "a?b"']


def test_an_unknown_tool_and_invalid_arguments_are_told_to_the_model():
    def even(number: Annotated[int, AfterValidator(_check_even)]) -> int:
        return number // 2

    texts = [qwen("even", number=3), qwen("even", number=4), "It is 2."]
    state = run(texts, [even], Native)
    assert state.ret_value == "It is 2."
    assert results(state) == [
        "Result of even: Error: the arguments of even are not valid: number: Value error, 3 is odd",
        "Result of even: 2",
    ]
    assert state["answer_call_0"].arguments == {"number": 3}


def _check_even(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value


def test_calls_of_a_provider_that_can_not_be_made_are_told_to_the_model():
    calls = [
        ToolCall("subtract", {"a": 1}),
        ToolCall("add", {"a": "two"}),
        ToolCall("add", {"a": 2, "b": 3}),
    ]
    says = [Say(calls=(each,)) for each in calls]
    with sgl.server_for_tests([*says, Say("It is 5.")]) as server:
        backend = sgl.OpenAI("gpt-4o", max_retries=0, **server.openai)
        state = agent.run([add], backend=backend)
        backend.shutdown()
    assert state.ret_value == "It is 5."
    unknown, invalid, good = results(state)
    assert "there is no tool 'subtract'. The tools are: add." in unknown
    assert "the arguments of add are not valid: a: Input should be a valid integer" in invalid
    assert good == "Result of add: 5"


def test_a_failure_is_told_for_its_own_call_of_several():
    calls = json.dumps(
        {
            "calls": [
                {"tool": "broken", "arguments": {"a": 1}},
                {"tool": "add", "arguments": {"a": 1, "b": 1}},
            ]
        }
    )
    state = run([calls, answer("2")], [broken, add], parallel_tool_calls=True)
    assert results(state) == [
        "Result of broken: Error: LookupError: no row 1 in …/main.db\nResult of add: 2"
    ]


def test_a_function_may_say_what_the_model_reads():
    seen = []

    def explain(failed, error):
        seen.append((failed, error))
        return "Try add."

    state = run([call("broken", a=1), answer("5")], [broken], on_tool_error=explain)
    assert results(state) == ["Result of broken: Try add."]
    ((failed, error),) = seen
    assert (failed, type(error)) == (sgl.ToolCall("broken", {"a": 1}, broken), LookupError)


def test_a_function_that_says_nothing_is_refused():
    with pytest.raises(sgl.ParameterError, match="on_tool_error: the function returned NoneType"):
        run([call("broken")], [broken], on_tool_error=lambda *_: None)


def test_what_the_function_raises_ends_the_program():
    def explain(failed, error):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run([call("broken")], [broken], on_tool_error=explain)


# ----------------------------------------------------------------------------- what is never shown


@pytest.mark.parametrize("policy", ["show", "raise", lambda *_: "hidden"])
@pytest.mark.parametrize(
    "error",
    [
        sgl.BudgetError("max_cost", "all is spent."),
        sgl.RequestAbortedError("cancelled."),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_some_errors_are_no_business_of_a_model(error, policy):
    def ends() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run([call("ends")], [ends], on_tool_error=policy)
    assert not isinstance(caught.value, sgl.ToolError)


def test_the_budget_of_a_tools_own_program_is_not_shown():
    @sgl.function
    def inner(s):
        s += "x" * 900 + sgl.gen("a", max_tokens=500)

    def asks() -> str:
        return inner.run(max_total_tokens=10).text()

    with pytest.raises(sgl.BudgetError, match="max_total_tokens"):
        run([call("asks")], [asks])


def test_an_error_of_the_programs_own_node_is_not_shown():
    @sgl.function
    def reads(s):
        def look() -> object:
            s.set_var("seen", 1)
            return fork["x"]

        fork = s.fork(1)[0]
        s += sgl.user("?")
        return sgl.use_tools(s, [look], max_tokens=50)

    with pytest.raises(sgl.SglError):
        reads.run(backend=sgl.ScriptedBackend(lambda _: call("unknown"))).text()


# ------------------------------------------------------------------- when failures end the program


def test_a_tool_that_keeps_failing_ends_the_loop_with_its_state():
    with pytest.raises(
        sgl.ToolError, match=r"the tool broken failed 2 times in a row; at last: .* LookupError"
    ) as caught:
        run([call("broken", a=each) for each in range(9)], [broken], max_failures=2)
    error = caught.value
    assert (error.tool, error.limit) == ("broken", "max_failures")
    assert isinstance(error.__cause__, LookupError)
    assert error.where.line == agent.func.__code__.co_firstlineno + 3
    assert error.state["answer_call_1"].arguments == {"a": 1}
    assert "no row 1" in results(error.state)[-1]
    assert error.state.usage().completion_tokens > 0
    assert copy.copy(error).state is error.state
    assert pickle.loads(pickle.dumps(error)).state is None


def test_failures_count_in_a_row_and_for_each_tool():
    bad, good = call("broken"), call("add", a=1)
    assert run([bad, good, bad, answer("x")], [broken, add], max_failures=3).ret_value == "x"
    fails = iter([True, True, False, True, True, False])

    def flaky() -> int:
        if next(fails):
            raise OSError
        return 1

    texts = [*[call("flaky")] * 6, answer("done")]
    assert run(texts, [flaky], max_failures=3).ret_value == "done"


def test_there_may_be_no_limit():
    texts = [*[call("broken")] * 20, answer("done")]
    assert run(texts, [broken], max_failures=None, max_steps=20).ret_value == "done"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{"max_steps": 1}, {"on_tool_error": "raise"}])
def test_every_end_without_an_answer_carries_the_state(options, stream):
    texts = [call("add", a=1), call("broken")]
    with pytest.raises(sgl.ToolError) as caught:
        run(texts, [broken, add], stream=stream, **options).text()
    state = caught.value.state
    assert state["answer_call_0"].run() == 2
    assert "Result of add: 2" in state.so_far().text


# -------------------------------------------------------------------------------- what is taken out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("No such file: '/home/me/x/notes.txt'", "No such file: '…/notes.txt'"),
        (r"C:\Users\me\notes.txt is gone", "…/notes.txt is gone"),
        ("connect to https://me:pw@host.example/a?key=1 failed", "connect to (address) failed"),
        ("10.0.0.17:5432 and localhost:80 refused", "(address) and (address) refused"),
        ("db.internal.example:5432 refused", "(address) refused"),
        ("<Row at 0x7f12345678aa>", "<Row at (address)>"),
        ("ask me@example.org", "ask (address)"),
        ("api_key=abc is wrong", "api_key=(secret) is wrong"),
        ("{'password': 'hunter2', 'user': 'me'}", "{'password': (secret), 'user': 'me'}"),
        ("Authorization: Bearer abcdefgh.123", "Authorization: (secret)"),
        ("sk-proj-abcdefgh1234 was refused", "(secret) was refused"),
        ("d41d8cd98f00b204e9800998ecf8427e", "(secret)"),
        ("key 'city' is missing", "key 'city' is missing"),
        ("invalid literal for int(): '1/2'", "invalid literal for int(): '1/2'"),
        ("reports/2024/final_v2.txt, line 3", "reports/2024/final_v2.txt, line 3"),
        ("at 12:30:45 on 2024-01-02", "at 12:30:45 on 2024-01-02"),
        ("x" * 3000, "x" * 2000 + " …"),
    ],
)
def test_paths_addresses_and_keys_are_taken_out(text, shown):
    assert redact(text) == shown


def test_an_exception_without_words_is_its_class():
    assert describe_failure(ValueError()) == "ValueError"
    assert describe_failure(ValueError("x")) == "ValueError: x"


# ------------------------------------------------------------------------------- what is refused


def yields(a: int) -> object:
    yield a


async def yields_later(a: int) -> object:
    yield a


@pytest.mark.parametrize(
    ("tools", "options", "said"),
    [
        ([yields], {}, "tools: yields is a generator, so a call has no result. Return a list"),
        ([yields_later], {}, "tools: yields_later is a generator"),
        ([add], {"on_tool_error": "hide"}, "on_tool_error: 'hide' is not 'show', 'raise' or a"),
        ([add], {"on_tool_error": None}, "on_tool_error: None is not 'show', 'raise' or a"),
        ([add], {"max_failures": 0}, "max_failures: "),
        ([add], {"max_failures": "3"}, "max_failures: "),
        ([add], {"on_tool_errors": "show"}, "Did you mean"),
    ],
)
def test_what_is_wrong_is_told_at_the_call(tools, options, said):
    with pytest.raises(sgl.ParameterError) as refused:
        run([], tools, **options)
    assert said in str(refused.value)
    assert refused.value.where.line == agent.func.__code__.co_firstlineno + 3
