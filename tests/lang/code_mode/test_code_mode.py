"""`gen(code=…)`: programs in plain and async bodies, their errors, limits, records and refusals."""

import asyncio
import dataclasses
import re
from typing import Any, NamedTuple

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Lark

POPULATIONS = {"Rome": 2_800, "Oslo": 720}


def look_up(city: str) -> int:
    """Population of a city."""
    return POPULATIONS[city]


async def look_up_later(city: str) -> int:
    """Population of a city."""
    await asyncio.sleep(0)
    return POPULATIONS[city]


class Free(sgl.ScriptedBackend):
    """A model of an API that takes no grammar."""

    capabilities = dataclasses.replace(
        sgl.ScriptedBackend.capabilities,
        constraints=sgl.ScriptedBackend.capabilities.constraints - {Lark},
    )


def play(*texts, backend=Free):
    left = iter(texts)
    return backend(lambda _: next(left))


@sgl.function
def ask(s, tools=(look_up,), options=None):
    s += sgl.user("How many?")
    s += sgl.assistant(sgl.gen("value", code=tools, **(options or {})))
    return s["value"]


@sgl.function
async def ask_async(s, tools=(look_up,)):
    s += sgl.user("How many?")
    s += sgl.assistant(sgl.gen("value", code=tools))
    return await s.get("value")


SUM = 'total = 0\nfor city in ["Rome", "Oslo"]:\n    total += look_up(city)\nreturn total'


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("backend", [sgl.ScriptedBackend, Free])
def test_the_value_is_what_the_program_returns(backend):
    state = ask.run(backend=play(SUM, backend=backend))
    assert state["value"] == 3520
    assert state.raw("value") == SUM
    calls = state.get_meta_info("value")["code_calls"]
    assert [(call["tool"], call["line"], call["result"]) for call in calls] == [
        ("look_up", 3, 2800),
        ("look_up", 3, 720),
    ]


def test_a_fence_is_left_out():
    assert ask.run(backend=play(f"```python\n{SUM}\n```")).ret_value == 3520


@pytest.mark.parametrize("tool", [look_up, look_up_later])
def test_async_bodies_and_async_tools(tool):
    text = f'return {tool.__name__}("Rome")'
    state = asyncio.run(ask_async.arun(tools=[tool], backend=play(text)))
    assert state.ret_value == 2800


def test_branches_and_batches_have_their_own_programs():
    @sgl.function
    def forks(s):
        s += sgl.user("How many?")
        for branch in (group := s.fork(2)):
            branch += sgl.assistant(sgl.gen("value", code=[look_up]))
        return [branch["value"] for branch in group]

    backend = Free(default='return look_up("Rome")')
    assert forks.run(backend=backend).ret_value == [2800, 2800]
    states = ask.run_batch([{}, {}, {}], backend=backend)
    assert [state["value"] for state in states] == [2800] * 3


def test_a_stream_has_the_program_and_the_calls():
    state = ask.run(backend=play(SUM), stream=True)
    assert "".join(state.text_iter("value")) == SUM
    events = [(event.kind, event.call.name, event.text) for event in state.events()]
    assert events == [
        ("call", "look_up", ""), ("result", "look_up", "2800"),
        ("call", "look_up", ""), ("result", "look_up", "720"),
    ]  # fmt: skip


class City(NamedTuple):
    name: str
    population: int


def test_objects_are_read_by_their_fields_and_passed_on():
    seen = []

    def find(name: str) -> City:
        return City(name, POPULATIONS[name])

    def visit(city: City, times: int = 1) -> None:
        seen.append((city, times))

    text = 'city = find("Rome")\nvisit(city, times=2)\nreturn [city.name, city.population, city]'
    value = ask.run([find, visit], backend=play(text)).ret_value
    assert value == ["Rome", 2800, City("Rome", 2800)]
    assert seen == [(City("Rome", 2800), 2)]


@pytest.mark.parametrize(
    "inside", ["return x", "if x:\n        return 1\n    else:\n        return 2"]
)
def test_a_loop_that_has_one_round_at_most_is_refused(inside):
    with pytest.raises(sgl.CodeError, match="line 1: the loop always returns in its first round"):
        sgl.CodeTools([look_up]).parse(f"for x in [1, 2]:\n    {inside}\nreturn 3")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("for x in [1, 2]:\n    if x > 1:\n        return x\nreturn 3", 2),
        ('return max(["Oslo", "Rome"], key=look_up)', "Rome"),
        ('return min(["Oslo", "Rome"], key=lambda city: look_up(city))', "Oslo"),
        ('d = {"a": 1, "b": 2}\nreturn sorted(d.items(), key=lambda pair: -pair[1])[0][0]', "b"),
        ('return sorted(["Oslo", "Rome"], key=look_up, reverse=True)', ["Rome", "Oslo"]),
        ("n = 2\nreturn sorted(range(4), key=lambda i: i % n)", [0, 2, 1, 3]),
    ],
)
def test_programs_return_what_python_returns(text, value):
    assert ask.run(backend=play(text)).ret_value == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('return max(["Rome"], key=lookup)', "there is no function 'lookup'"),
        ('return max(["Rome"], key=lambda: 1)', "one parameter"),
        ('return max(["Rome"], key=lambda x=1: 1)', "one parameter"),
        ('return max(["Rome"], key=lambda *x: 1)', "one parameter"),
        ('return max(["Rome"], key=lambda __x: 1)', "'__x' can't be used"),
        ('return max(["Rome"], key=lambda len: 1)', "'len' is a function"),
        ('return max(["Rome"], key=lambda x: x.__class__)', "'__class__' can't be read"),
        ("x = lambda y: y\nreturn 1", "a lambda is the key="),
        ("return look_up(city=lambda y: y)", "a lambda is the key="),
        ("return look_up(key=look_up)", "no parameter 'key'"),
        ('return max(["Rome"], key="a")', "the key is no function"),
        ('return max("a", "b", key=look_up)', "takes one list, and key by name"),
        ('return max(["Rome"], reverse=True)', "takes one list, and key by name"),
        ('return sorted(["Rome"], reverse="a")', "reverse is True or False"),
        ("return max([1], key=look_up)", "takes str, not 1"),
        ("return max([1], key=lambda x: [x])", "compares numbers, or texts"),
        ("return max([1], key=lambda x: y)", "'y' is not set"),
    ],
)
def test_other_keys_are_refused_before_anything_runs(text, problem):
    with pytest.raises(sgl.CodeError, match=re.escape(problem)) as caught:
        sgl.CodeTools([look_up]).parse(text)
    assert caught.value.kind in ("syntax", "type")


def test_describe_shows_functions_and_fields_as_python():
    def find(name: str) -> City:
        """Finds a city.

        Args:
            name: its name.
        """
        return City(name, 1)

    def bare() -> None:
        pass

    _, shown, _, example, _ = sgl.CodeTools([find, bare]).describe().split("```")
    expected = '''python
class City:
    name: str
    population: int

def find(name: str) -> City:
    """Finds a city.

    Args:
        name: its name.
    """

def bare() -> None: ...
'''
    assert shown == expected
    value = ask.run([find], backend=play(f"```{example}```")).ret_value
    assert value == 2  # numbers above 4, of 3, 8 and 5


# ------------------------------------------------------------------------------------------ errors


def test_an_error_is_shown_to_the_model_which_writes_again():
    prompts = []
    texts = iter(['return look_up("Rome") + lookup("Oslo")', "return look_up(1)", SUM])

    def write(request):
        prompts.append(request.prompt.text)
        return next(texts)

    state = ask.run(backend=Free(write))
    assert state.ret_value == 3520
    assert "line 1: there is no function 'lookup'. The functions are look_up" in prompts[1]
    assert "line 1: look_up(city=…) takes str, not 1." in prompts[2]
    assert state.text().count("return") == 1


def test_a_failing_function_is_shown_without_paths():
    def read(name: str) -> str:
        raise OSError(f"no {name} in /var/lib/data/x.db")

    with pytest.raises(sgl.CodeError) as caught:
        ask.run([read], {"retries": 0}, backend=play('a = 1\nreturn read("a")'))["value"]
    assert (caught.value.line, caught.value.kind) == (2, "tool")
    assert caught.value.message == "line 2: read() failed: OSError: no a in …/x.db"
    assert "1 calls were made already (read)" in caught.value.hint


def test_after_the_retries_the_error_is_raised_with_text_and_line():
    with pytest.raises(sgl.CodeError) as caught:
        ask.run(backend=play("x = 1", "x = 1", "y = 2\nx = 1"))
    assert caught.value.text == "y = 2\nx = 1"
    assert (caught.value.line, caught.value.kind) == (2, "type")


def test_on_tool_error_raise_ends_the_program_at_once():
    tools = sgl.CodeTools([look_up], on_tool_error="raise")
    with pytest.raises(sgl.ToolError, match="the tool look_up raised KeyError: 'Roma'"):
        ask.run(tools, backend=play('return look_up("Roma")'))


def test_on_tool_error_may_be_a_function():
    tools = sgl.CodeTools(
        [look_up], on_tool_error=lambda call, error: f"ask for Rome, not {call.arguments['city']}"
    )
    with pytest.raises(sgl.CodeError, match="ask for Rome, not Roma"):
        ask.run(tools, {"retries": 0}, backend=play('return look_up("Roma")'))["value"]


def test_a_budget_error_of_a_function_is_never_shown():
    def spend() -> int:
        raise sgl.BudgetError("max_cost", "too much")

    with pytest.raises(sgl.BudgetError):
        ask.run([spend], backend=play("return spend()", "return 1"))


# ------------------------------------------------------------------------------------------ limits


def endless() -> list[int]:
    return list(range(1000))


LIMITS = {
    "max_steps": "total = 0\nfor i in range(9000000):\n    total += i\nreturn total",
    "max_memory": 'text = "a"\nfor i in range(40):\n    text += text\nreturn text',
    "max_calls": "for i in range(101):\n    x = endless()\nreturn 1",
    "max_result": "x = 1\nx = endless()\nreturn x",
    "bits": "x = 10\nfor i in range(20):\n    x = x * x\nreturn x",
    "nested": "x = []\ny = []\nfor i in range(100):\n    y = [x, x]\n    x = y\nreturn x",
}


@pytest.mark.parametrize("limit", LIMITS)
def test_each_limit_is_one_error_with_line_and_cure(limit):
    tools = sgl.CodeTools([endless], max_result=500 if limit == "max_result" else 100_000)
    with pytest.raises(sgl.CodeError) as caught:
        ask.run(tools, {"retries": 0}, backend=play(LIMITS[limit]))["value"]
    error = caught.value
    assert (error.kind, bool(error.hint)) == ("limit", True)
    assert error.message.startswith(f"line {error.line}: ")
    assert limit in error.message
    assert error.line in range(2, 7)


def test_a_call_that_takes_too_long_is_a_failure():
    async def wait() -> int:
        await asyncio.Event().wait()
        return 1

    tools = sgl.CodeTools([wait], tool_timeout=0.01)
    with pytest.raises(sgl.CodeError, match=r"wait\(\) failed: it did not end within 0.01 s"):
        ask.run(tools, {"retries": 0}, backend=play("return wait()"))["value"]


def test_a_nodes_timeout_stops_the_program():
    text = "total = 0\nfor i in range(9000000):\n    total += 1\nreturn total"
    tools = sgl.CodeTools([look_up], max_steps=10**9)
    with pytest.raises(sgl.RequestTimeoutError):
        ask.run(tools, {"retries": 0, "timeout": 0.05}, backend=play(text))["value"]


# ---------------------------------------------------------------------------------------- refusals


def with_args(*cities: str) -> int:
    return len(cities)


def no_schema(work: type[int]) -> int:
    return 1


def generator(count: int):
    yield count


def untyped(x):
    return x


@pytest.mark.parametrize("tool", [with_args, no_schema, generator, untyped])
def test_functions_that_no_program_can_call_are_refused(tool):
    with pytest.raises(sgl.ParameterError) as caught:
        sgl.gen("x", code=[tool])
    error = caught.value
    assert tool.__name__ in error.message
    assert error.hint
    assert f"test_code_mode.py:{tool.__code__.co_firstlineno}" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("regex", "a"), ("json_schema", {}), ("choices", ["a"]), ("type", int), ("dtype", int), ("tools", [look_up]),
     ("constraint", sgl.Regex("a"))],
)  # fmt: skip
def test_code_is_a_constraint_of_its_own(name, value):
    with pytest.raises(sgl.ParameterError, match="can't be combined with"):
        sgl.gen("x", code=[look_up], **{name: value})


@pytest.mark.parametrize(
    "options", [{"max_steps": 0}, {"max_calls": 1.5}, {"tool_timeout": -1}, {"on_tool_error": "x"}]
)
def test_wrong_limits_are_refused(options):
    with pytest.raises(sgl.ParameterError, match=next(iter(options))):
        sgl.CodeTools([look_up], **options)


def test_several_samples_are_refused():
    with pytest.raises(sgl.ParameterError, match="one sample"):
        options: dict[str, Any] = {"code": [look_up], "n": 2}
        sgl.gen("x", **options)


# ----------------------------------------------------------------------------------------- records


def test_calls_are_nodes_of_the_trace():
    state = ask.run(backend=play('x = look_up("Rome")\nreturn lookup(x)', SUM))
    calls = [node for node in state.trace().nodes if node.kind == "call"]
    assert [(node.name, node.call) for node in calls] == [
        ("look_up", "look_up(city='Rome') = 2800"),
        ("look_up", "look_up(city='Oslo') = 720"),
    ]


def test_a_rerun_makes_no_call_again():
    count = 0

    def counted(city: str) -> int:
        nonlocal count
        count += 1
        return POPULATIONS[city]

    @sgl.function
    def program(s):
        s += sgl.user("How many?")
        s += sgl.assistant(sgl.gen("value", code=[counted]))
        s += sgl.user("Really?")
        s += sgl.assistant(sgl.gen("sure"))

    texts = iter(['return counted("Rome")', "yes", "no"])
    state = program.run(backend=Free(lambda _: next(texts)))
    assert (state["value"], count) == (2800, 1)
    again = state.rerun("sure")
    assert (again["value"], again["sure"], count) == (2800, "no", 1)


def test_lint_and_tracing_know_the_functions():
    traced = ask.trace(tools=[look_up], options=None)
    (node,) = [each for each in traced.graph().nodes if each.tools]
    assert node.tools == ("look_up",)
