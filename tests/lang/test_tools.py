"""Tools: what the model may write, what a call is made of, and going round until there is an
answer.
"""

# mypy: disable-error-code="empty-body"
# Tools that are only described have no body.

import asyncio
import datetime
import enum
import gc
import json
import weakref
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.agent import describe
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.tools import tool_schemas
from tests.constraints.test_generation import random_model


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = "k"


class Place(BaseModel):
    name: str


@dataclass
class Range:
    low: int
    high: int


class Filter(TypedDict):
    field: str


def weather(place: Place, unit: Unit = Unit.CELSIUS, day: datetime.date | None = None) -> str:
    """Tells the weather.

    More about it.
    """
    return f"{place.name} {unit.value} {day}"


def add(a: int, b: Annotated[int, Field(ge=0)] = 1) -> int:
    """Adds."""
    return a + b


def call(name, **arguments):
    return json.dumps({"tool": name, "arguments": arguments})


def answer(text):
    return json.dumps({"answer": text})


def generated(text, *tools, **options):
    """The value of a node with these tools that generates `text`."""
    script = sgl.ScriptedBackend(lambda call: text)
    return sgl.function(lambda s: s.__iadd__(sgl.gen("x", tools=tools, **options))).run(
        backend=script
    )["x"]


def test_a_call_has_the_name_and_arguments_of_the_signatures_types():
    wanted = generated(
        call("weather", place={"name": "Rome"}, unit="k", day="2024-02-29"), weather, add
    )
    assert wanted == sgl.ToolCall("weather", wanted.arguments, weather)
    assert wanted.arguments == {
        "place": Place(name="Rome"),
        "unit": Unit.KELVIN,
        "day": datetime.date(2024, 2, 29),
    }
    assert wanted.run() == "Rome k 2024-02-29"


def test_what_is_not_given_has_the_functions_defaults():
    wanted = generated(call("weather", place={"name": "Rome"}), weather)
    assert wanted.arguments == {"place": Place(name="Rome"), "unit": Unit.CELSIUS, "day": None}
    assert generated(call("add", a=2), add).run() == 3


def test_an_answer_is_its_text():
    assert generated(answer("42, I think"), add) == "42, I think"


def test_a_tool_called_answer_is_a_tool_all_the_same():
    def answer(question: str) -> str:
        return question

    assert generated(call("answer", question="why"), answer).arguments == {"question": "why"}


@pytest.mark.parametrize(
    "text",
    [
        call("subtract", a=1),
        call("add"),
        call("add", a="one"),
        call("add", a=1, c=2),
        call("add", a=1, b=-1),
        '{"tool": "add"}',
        '{"answer": 3}',
        '{"answer": "x", "more": 1}',
        "[]",
        "null",
    ],
)
def test_anything_else_could_not_have_been_generated(text):
    with pytest.raises(sgl.BackendError, match="does not satisfy"):
        generated(text, add)


def test_a_call_that_is_cut_short_carries_its_text():
    with pytest.raises(
        sgl.ValueValidationError, match="neither a tool call nor an answer"
    ) as caught:
        generated(call("add", a=1), add, max_tokens=2)
    assert caught.value.text == '{"tool": "add",'


def test_types_of_several_tools_do_not_get_into_each_others_way():
    def first(place: Place, more: list[Place]) -> str:
        return place.name

    def second(
        place: Annotated[Place, Field(description="where")], range: Range, by: Filter
    ) -> str:
        return f"{range.low}-{range.high} {by['field']}"

    one = {"name": "a"}
    assert generated(call("first", place=one, more=[one]), first, second).run() == "a"
    wanted = generated(
        call("second", place=one, range={"low": 1, "high": 2}, by={"field": "f"}), first, second
    )
    assert wanted.run() == "1-2 f"
    with pytest.raises(sgl.BackendError):
        generated(call("first", place={"title": "a"}, more=[]), first, second)


def test_parameters_may_have_any_name():
    def awkward(json: str, copy: bool, _hidden: int, model_config: Literal["a"] = "a") -> str:
        return f"{json}{copy}{_hidden}{model_config}"

    assert generated(call("awkward", json="x", copy=True, _hidden=3), awkward).run() == "xTrue3a"


def test_methods_are_tools_too():
    class Shop:
        def price(self, item: str) -> float:
            return len(item) / 2

    assert generated(call("price", item="abc"), Shop().price).run() == 1.5


def test_a_tool_without_parameters():
    def now() -> str:
        return "noon"

    assert generated(call("now"), now).run() == "noon"


class Foreign:
    pass


def untyped(x) -> int: ...
def positional(x: int, /) -> int: ...
def starred(*x: int) -> int: ...
def keywords(**x: int) -> int: ...
def foreign(x: Foreign) -> int: ...
def nowhere(x: "Nowhere") -> int: ...  # type: ignore[name-defined] # noqa: F821 # on purpose
def no_type(x: 3) -> int: ...  # type: ignore[valid-type]  # wrong on purpose
def function(x: type(len)) -> int: ...  # type: ignore[valid-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], r"the list is empty\. Give at least one function"),
        ([add, add], "two tools are called 'add'"),
        ([3], "3 is not a named function"),
        ([untyped], "untyped: the parameter x has no type. Annotate it, e.g. x: str"),
        ([positional], "positional: the parameter x: int can't be given by name"),
        ([starred], r"starred: the parameter \*x: int can't be given by name"),
        ([keywords], r"keywords: the parameter \*\*x: int can't be given by name"),
        ([foreign], "foreign: a parameter's type can't be written as JSON"),
        ([nowhere], "nowhere: a parameter's type can't be written as JSON: name 'Nowhere'"),
        ([no_type], "no_type: a parameter's type can't be written as JSON"),
        ([function], "function: a parameter's type can't be written as JSON"),
    ],
)
def test_what_can_not_be_a_tool_is_refused_where_it_is_written(tools, message):
    with pytest.raises(sgl.ParameterError, match=f"tools: {message}"):
        sgl.gen("x", tools=tools)


def test_tools_are_a_constraint_like_any_other():
    with pytest.raises(sgl.ParameterError, match="tools: can't be combined with regex"):
        sgl.gen("x", regex="a", tools=[add])  # type: ignore[call-overload]  # wrong on purpose


def test_a_raising_tool_is_a_tool_error_with_its_cause():
    def broken(x: int) -> int:
        raise LookupError(f"no {x}")

    wanted = generated(call("broken", x=3), broken)
    with pytest.raises(sgl.ToolError, match="the tool broken raised LookupError: no 3") as caught:
        wanted.run()
    assert isinstance(caught.value.__cause__, LookupError)


def test_tools_can_be_described_to_the_model():
    def bare(x: int) -> int: ...

    text = describe([weather, bare])
    assert "- weather(place: " in text
    assert ": Tells the weather.\n" in text
    assert "- bare(x: int) -> int: no description" in text
    assert '{"answer": text}' in text


# ------------------------------------------------------------------ which tool, and in which format


class Native(sgl.ScriptedBackend):
    """A scripted model that was trained with a format of its own."""

    def tool_family(self):
        return "qwen"


def native(text, *tools, **options):
    body = sgl.function(lambda s: s.__iadd__(sgl.gen("x", tools=tools, **options)))
    return body.run(backend=Native(lambda _: text))


def qwen(name, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_a_model_writes_calls_in_its_own_format_and_text_as_text():
    state = native("I'll add. " + qwen("add", a=2), add, weather)
    assert state["x"] == sgl.ToolCall("add", {"a": 2, "b": 1}, add)
    assert state["x"].run() == 3
    assert state.raw("x") == state.text() == "I'll add. " + qwen("add", a=2)
    assert native("It is 3 < 4.", add)["x"] == "It is 3 < 4."
    wanted = native(qwen("weather", place={"name": "Rome"}, unit="k"), add, weather)["x"]
    assert wanted.arguments == {"place": Place(name="Rome"), "unit": Unit.KELVIN, "day": None}


@pytest.mark.parametrize(
    "text",
    [
        qwen("subtract", a=1),
        qwen("add", a="x"),
        qwen("add", a=1, b=-1),
        qwen("add", a=1) + "and more",
        qwen("add", a=1) + qwen("add", a=1),
        "<tool_call>",
    ],
)
def test_nothing_else_is_written_in_that_format_either(text):
    with pytest.raises(sgl.BackendError, match="does not satisfy"):
        native(text, add)["x"]


def test_a_call_in_that_format_that_is_cut_short_carries_its_text():
    with pytest.raises(
        sgl.ValueValidationError, match="ends in the middle of a tool call"
    ) as caught:
        native(qwen("add", a=1), add, max_tokens=3)["x"]
    assert caught.value.text == '<tool_call>\n{"name": "add",'


BARE = '{\n  "name": "add",\n  "arguments": {"a": 2}\n}'


def test_a_call_without_the_formats_marks_is_one_if_it_names_a_tool():
    wanted = sgl.ToolCall("add", {"a": 2, "b": 1}, add)
    for text in (BARE, f"```json\n{BARE}\n```", f"So:\n```json\n{BARE}\n```\nThat is it."):
        assert native(text, add, weather)["x"] == wanted
        assert native(f"{text}\n{BARE}", add, weather)["x"] == wanted
        assert native(f"{text}\n{BARE}", add, parallel_tool_calls=True)["x"] == [wanted, wanted]
        assert native(text, weather)["x"] == text
        assert native(text.replace("add", "Alice"), add)["x"] == text.replace("add", "Alice")
    string = BARE.replace('{"a": 2}', json.dumps('{"a": 2}'))
    assert native(string, add)["x"] == wanted


def test_a_call_without_marks_that_does_not_fit_its_tool_is_an_error_that_may_be_retried():
    with pytest.raises(sgl.ValueValidationError, match="neither a tool call nor an answer"):
        native(BARE.replace("2", '"x"'), add)["x"]
    texts = iter([BARE.replace("2", '"x"'), BARE])
    body = sgl.function(lambda s: s.__iadd__(sgl.gen("x", tools=[add], retries=1)))
    assert body.run(backend=Native(lambda _: next(texts)))["x"].run() == 3


def test_a_call_without_marks_that_is_cut_short_is_no_answer():
    for cut in ('"add",', '{"a"', '{"a": 2}'):
        text = BARE[: BARE.index(cut) + len(cut)]
        with pytest.raises(sgl.ValueValidationError, match="ends in the middle of a tool call"):
            native(f"```json\n{text}", add)["x"]


@pytest.mark.parametrize("choice", ["required", "add", add])
def test_a_call_can_be_demanded(choice):
    assert native(qwen("add", a=1), add, weather, tool_choice=choice)["x"].name == "add"
    assert generated(call("add", a=1), add, weather, tool_choice=choice).name == "add"
    for text, run in (("No.", native), (answer("No."), generated)):
        with pytest.raises(sgl.BackendError, match="does not satisfy"):
            run(text, add, weather, tool_choice=choice)["x"]
    other = qwen("weather", place={"name": "Rome"})
    if choice != "required":
        with pytest.raises(sgl.BackendError, match="does not satisfy"):
            native(other, add, weather, tool_choice=choice)["x"]


@pytest.mark.parametrize(("choice", "most"), [("required", 2), ("add", 1), (add, 1)])
def test_a_tool_that_is_named_is_called_once_where_a_turn_may_have_several_calls(choice, most):
    options = {"tool_choice": choice, "parallel_tool_calls": True}
    for count in (1, 2):
        calls = [{"tool": "add", "arguments": {"a": n, "b": 1}} for n in range(count)]
        written = {
            native: "\n".join(qwen("add", a=n) for n in range(count)),
            generated: json.dumps({"calls": calls}),
        }
        for run, text in written.items():
            if count <= most:
                state = run(text, add, **options)
                assert len(state["x"] if run == native else state) == count
            else:
                with pytest.raises(sgl.BackendError, match="does not satisfy"):
                    run(text, add, **options)["x"]


def test_a_choice_that_is_none_is_refused():
    for choice in ("subtract", weather, "never", 3):
        with pytest.raises(
            sgl.ParameterError, match=r"tool_choice: .* is not 'auto', 'required', 'none' or one"
        ):
            sgl.gen("x", tools=[add], tool_choice=choice)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(sgl.ParameterError, match=r"tool_choice: .* is given without tools"):
        sgl.gen("x", tool_choice="auto")  # type: ignore[call-overload]  # wrong on purpose


@pytest.mark.parametrize("thought", ["", "<think>add <tool_call>?</think>\n\n"])
def test_reasoning_comes_before_a_call_and_before_any_constrained_value(thought):
    state = native(thought + qwen("add", a=1), add, reasoning="qwen3")
    assert state["x"].arguments == {"a": 1, "b": 1}
    assert state["x_reasoning_content"] == ("add <tool_call>?" if thought else "")
    typed = sgl.function(lambda s: s.__iadd__(sgl.gen("x", type=int, reasoning="qwen3")))
    assert typed.run(backend=Native(lambda _: thought + "42"))["x"] == 42
    with pytest.raises(sgl.BackendError, match="does not satisfy"):
        typed.run(backend=Native(lambda _: thought + "many"))["x"]


def test_marks_of_reasoning_in_a_value_are_part_of_it():
    body = sgl.function(lambda s: s.__iadd__(sgl.gen("x", type=list[str], reasoning="qwen3")))
    assert body.run(backend=Native(lambda _: '<think>a</think>["<think>", "</think>"]'))["x"] == [
        "<think>",
        "</think>",
    ]


class Coder(Native):
    def tool_family(self):
        return "qwen3_coder"


def test_arguments_between_tags_have_the_types_of_the_signature():
    def find(text: str, place: Place, most: int = 3, day: datetime.date | None = None) -> str:
        """Finds."""
        return f"{text} {place.name} {most} {day}"

    told = sgl.function(lambda s: describe([find], s)).run(backend=Coder()).ret_value
    assert "<function=…>\n<parameter=…>\n…\n</parameter>\n</function>" in told
    body = sgl.function(lambda s: s.__iadd__(sgl.gen("x", tools=[find])))
    parameters = {
        "text": "12",
        "place": '{"name": "</parameter>"}',
        "most": "7",
        "day": "2024-05-01",
    }
    said = "".join(
        f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters.items()
    )
    text = f"I look.\n<tool_call>\n<function=find>\n{said}</function>\n</tool_call>"
    assert body.run(backend=Coder(lambda _: text))["x"].run() == "12 </parameter> 7 2024-05-01"
    with pytest.raises(sgl.BackendError, match="does not satisfy"):
        body.run(backend=Coder(lambda _: text.replace("7", "seven")))["x"]


def test_how_to_call_is_described_in_the_models_format():
    def body(s):
        return describe([add], s)

    told = [
        sgl.function(body).run(backend=backend()).ret_value
        for backend in (Native, sgl.ScriptedBackend)
    ]
    assert '<tool_call>\n{"name": "…", "arguments": {"…": "…"}}\n</tool_call>' in told[0]
    assert '{"answer": text}' in told[1]


QWEN = "{{ messages[0].content }}{# '<tool_call>\\n' + '\", \"arguments\": ' #}"


def test_an_engine_knows_the_format_by_its_chat_template():
    with Engine.of(random_model(), chat_template=QWEN) as engine:
        assert LocalBackend(engine).tool_family() == "qwen"

        def body(s):
            s += "x" + sgl.gen("x", tools=[add, weather], tool_choice="required", max_tokens=200)

        values = [sgl.function(body).run(backend=engine, seed=seed) for seed in range(16)]
        calls = [
            state["x"]
            for state in values
            if state.get_meta_info("x")["finish_reason"]["type"] == "stop"
        ]
        assert {call.name for call in calls} == {"add", "weather"}
        assert all(call.arguments["b"] >= 0 for call in calls if call.name == "add")
        assert values[0].text().startswith('x<tool_call>\n{"name": "')
    with Engine.of(random_model(), chat_template="{{ messages[0].content }}") as engine:
        assert LocalBackend(engine).tool_family() is None


# -------------------------------------------------------------------------------------- going round


@sgl.function
def agent(s, /, tools, **options):
    s += sgl.user("2+3+4?")
    return sgl.use_tools(s, tools, "sum", **options)


def test_tools_are_run_until_there_is_an_answer():
    script = sgl.ScriptedBackend(
        {
            "2+3+4?": call("add", a=2, b=3),
            "Result of add: 5": call("add", a=5, b=4),
            "Result of add: 9": answer("9"),
        }
    )
    state = agent.run([add], backend=script)
    assert state.ret_value == state["sum"] == "9"
    assert (state["sum_call_0"].arguments, state["sum_call_1"].arguments) == (
        {"a": 2, "b": 3},
        {"a": 5, "b": 4},
    )
    assert [(m["role"], m["content"]) for m in state.messages()][1:] == [
        ("assistant", call("add", a=2, b=3)),
        ("user", "Result of add: 5"),
        ("assistant", call("add", a=5, b=4)),
        ("user", "Result of add: 9"),
        ("assistant", answer("9")),
    ]


def test_an_answer_at_once_needs_no_tool():
    script = sgl.ScriptedBackend(lambda call: answer("9"))
    assert agent.run([add], max_steps=0, backend=script).ret_value == "9"
    assert len(script.calls) == 1


def test_options_go_to_every_generation():
    script = sgl.ScriptedBackend({"?": call("add", a=1), "Result": answer("2")})
    agent.run([add], max_tokens=77, temperature=0, backend=script)
    assert [(c.params.max_tokens, c.params.temperature) for c in script.calls] == [(77, 0)] * 2


def test_the_steps_are_limited():
    script = sgl.ScriptedBackend(lambda _: call("add", a=1))
    with pytest.raises(sgl.ToolError, match="no answer within 2 tool calls") as caught:
        agent.run([add], max_steps=2, backend=script)
    assert len(script.calls) == 3
    assert caught.value.where.line == agent.func.__code__.co_firstlineno + 3


@pytest.mark.parametrize("steps", [-1, 1.5, True, "2"])
def test_the_number_of_steps_is_checked(steps):
    with pytest.raises(sgl.ParameterError, match="max_steps"):
        agent.run([add], max_steps=steps, backend=sgl.ScriptedBackend())


def test_a_raising_tool_may_end_the_round_at_the_users_line():
    def broken(a: int) -> int:
        raise OSError("down")

    script = sgl.ScriptedBackend(lambda _: call("broken", a=1))
    with pytest.raises(sgl.ToolError, match=r"^the tool broken raised OSError: down") as caught:
        agent.run([broken], on_tool_error="raise", backend=script)
    assert len(script.calls) == 1
    assert caught.value.where.line == agent.func.__code__.co_firstlineno + 3
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"a": [1, None]}, '{"a": [1, null]}'),
        ("über", '"über"'),
        (datetime.date(2024, 1, 2), '"2024-01-02"'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
    ],
)
def test_any_result_is_shown_to_the_model(result, shown):
    def tool() -> object:
        return result

    script = sgl.ScriptedBackend({"?": call("tool"), "Result": answer("ok")})
    assert agent.run([tool], backend=script).messages()[2]["content"] == f"Result of tool: {shown}"


def test_a_result_inside_itself_is_shown_too():
    circle = []
    circle.append(circle)

    def tool() -> list:
        return circle

    script = sgl.ScriptedBackend({"?": call("tool"), "Result": answer("ok")})
    assert agent.run([tool], backend=script).messages()[2]["content"] == "Result of tool: [[...]]"


async def fetch(page: str) -> str:
    return f"<{page}>"


def test_async_tools_may_be_awaited_by_the_program_itself():
    @sgl.function
    async def program(s):
        s += sgl.gen("x", tools=[fetch])
        return await (await s.get("x")).run()

    script = sgl.ScriptedBackend(lambda _: call("fetch", page="home"))
    assert asyncio.run(program.arun(backend=script)).ret_value == "<home>"


def test_use_tools_refuses_what_it_has_no_use_for():
    uses = sgl.function(lambda s, **options: sgl.use_tools(s, [add], **options))
    with pytest.raises(
        sgl.ParameterError, match=r"max_turns: use_tools has no such argument\. Use max_steps= here"
    ):
        uses.run(backend=sgl.ScriptedBackend(default="1"), max_turns=3).text()


def test_a_call_that_is_required_each_time_is_told_as_why_no_answer_comes():
    script = sgl.ScriptedBackend(lambda _: call("add", a=1, b=2))
    with pytest.raises(
        sgl.ToolError,
        match=r"within 2 tool calls. tool_choice='required' forces a call in each turn. Leave it out",
    ):
        agent.run([add], max_steps=2, tool_choice="required", backend=script)


def test_a_tool_is_shown_with_the_definitions_that_it_uses_and_no_others():
    class Leg(BaseModel):
        start: Place

    def drive(leg: Leg) -> str: ...

    def count(low: int) -> str: ...

    def visit(place: Place) -> str: ...

    shown = {
        each["function"]["name"]: each["function"]["parameters"]
        for each in tool_schemas([drive, count, visit])
    }
    used = {name: sorted(schema.get("$defs", {})) for name, schema in shown.items()}
    assert used == {"drive": ["Leg", "Place"], "count": [], "visit": ["Place"]}


def test_tools_are_described_once_and_not_kept():
    def tool(place: Place) -> str: ...

    first = tool_schemas([tool])
    # what a caller changes is the caller's
    first[0]["function"]["parameters"]["properties"].clear()
    assert "place" in tool_schemas([tool])[0]["function"]["parameters"]["properties"]
    tool.__doc__ = "Goes there."
    assert tool_schemas([tool])[0]["function"]["description"] == "Goes there."
    seen = weakref.ref(tool)
    del tool
    gc.collect()
    assert seen() is None


def test_tools_that_live_for_a_moment_are_described_too():
    class Robot:
        def go(self, place: Place) -> str: ...

        def say(self, words: str) -> str: ...

    robot = Robot()
    for _ in range(2):
        names = [each["function"]["name"] for each in tool_schemas([robot.go, robot.say])]
        assert names == ["go", "say"]
