"""Right calls, with the types of their results: no type checker finds fault with any
(test_type_checkers.py), none of the types has an `Any`, and they are the values' types.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal, TypedDict, assert_type

from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.compat.sglang.answers import Answer
from sglang_lite.protocol import ChoiceScore
from sglang_lite.server.sglang.labels import ScoreResult


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Point:
    x: int
    y: int


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Row(TypedDict):
    key: str


PERSON = '{"name": "Ada", "age": 36}'
ANSWERS = {
    "Person": PERSON, "People": f"[{PERSON}]", "Point": '{"x": 1, "y": 2}', "Row": '{"key": "a"}', "Colour": "red",
    "Number": "7", "Maybe": "null", "Sure": "true", "Word": "b", "Text": "some text", "Adult": "adult", "Tags": "a",
    "Pick": "x", "Why": "some text",
}  # fmt: skip
BACKEND = sgl.ScriptedBackend(ANSWERS)

person = sgl.gen("person", type=Person, temperature=0)
people = sgl.gen("people", type=list[Person], check=lambda found: len(found) < 5, retries=1)
point = sgl.gen("point", 64, type=Point)
row = sgl.gen("row", type=Row)
colour = sgl.gen("colour", type=Colour)
number = sgl.gen("number", type=int, check=lambda value: value > 3)
bounded = sgl.gen("bounded", type=Annotated[int, Field(ge=0)])
maybe = sgl.gen("maybe", type=int | None)
sure = sgl.gen("sure", type=bool)
word = sgl.gen("word", type=Literal["a", "b"])
free = sgl.gen("free", max_tokens=16, stop=["\n"], top_p=0.9, seed=3)
several = sgl.gen("several", n=2)
numbers = sgl.gen("numbers", type=int, n=2)
digits = sgl.gen("digits", regex="[a-z ]+")
integer = sgl.gen_int("integer", 4)
group = sgl.select("group", ["adult", "child"], temperature=0.0)
tags = sgl.select("tags", ["a", "b"], multi=True)
picked = sgl.gen("picked", choices=("x", "y"))


@sgl.function
def profile(s: sgl.ProgramState, text: str, times: int = 1) -> int:
    s += sgl.user(f"Person: {text}") + sgl.assistant(person)
    s += sgl.user("Adult?") + sgl.assistant(group)
    return times


@sgl.function(num_api_spec_tokens=64)
def everything(s: sgl.ProgramState, *, topic: str) -> None:
    s += sgl.system("Answer.") + s.user(topic)
    s += "People " + people + "Point " + point + "Row " + row + "Colour " + colour
    s += (
        "Number "
        + number
        + " Number "
        + bounded
        + " Maybe "
        + maybe
        + "Sure "
        + sure
        + "Word "
        + word
    )
    s += (
        "Text "
        + free
        + "Text "
        + several
        + "Number "
        + numbers
        + "Text "
        + digits
        + "Number "
        + integer
    )
    s += "Tags " + tags + "Pick " + picked


@sgl.function(num_api_spec_tokens=8)
async def shouted(s: sgl.ProgramState, text: str) -> str:
    return text.upper()


@sgl.function
async def later(s: sgl.ProgramState, question: str) -> str:
    with s.user():
        s += f"Person: {question}"
    s += sgl.assistant(person)
    found = await s.get(person)
    assert_type(found, Person)
    again = s.call(shouted, found.name)
    assert_type(again, Awaitable[sgl.ProgramState[str]])
    assert_type((await again).ret_value, str)
    return found.name


@sgl.function
def open_ended(s: sgl.ProgramState, /, **texts: str) -> None:
    for text in texts.values():
        s += text


@sgl.function
def outer(s: sgl.ProgramState, text: str) -> None:
    s += profile(text)
    assert_type(s[person], Person)
    alone = profile(text, times=2)
    assert_type(alone[group], str)
    assert_type(alone.ret_value, int)
    assert_type(s.call(profile, text, temperature=0), sgl.ProgramState[int])
    s += alone.run(temperature=0.5, max_new_tokens=64)[person].name
    branches = s.fork(2)
    branches += sgl.user("Person:") + sgl.assistant(person)
    branches.join()
    assert_type(branches[0][person], Person)


class Asker:
    style = "short"

    @sgl.function
    def ask(self, s: sgl.ProgramState, question: str) -> None:
        s += f"{self.style} {question}" + free


def wrapped(program: sgl.SglFunction[[str]], text: str) -> sgl.ProgramState:
    return program(text).run(backend=BACKEND)


def test_a_call_takes_the_programs_arguments_and_runs_with_options() -> None:
    state = profile("Ada", times=2).run(
        backend=BACKEND, temperature=0, seed=7, timeout=60.0, stream=False
    )
    assert_type(state, sgl.ProgramState[int])
    assert_type(state[person], Person)
    assert_type(state[group], str)
    assert state[person] == Person(name="Ada", age=36)
    assert_type(state.ret_value, int)
    assert state.ret_value == 2
    assert profile(text="Ada").run(backend=BACKEND, max_total_tokens=10_000)[person].age == 36
    assert (
        everything(topic="All").run(backend=BACKEND, push_down=False, use_thread=False).error()
        is None
    )
    assert open_ended(a="1", b="2").run(backend=BACKEND).text() == "12"
    assert Asker().ask("Why?").run(backend=BACKEND)[free] == "some text"
    assert wrapped(outer, "Ada").value("person", list[Person])[1].name == "Ada"


def test_a_bound_program_runs_with_options() -> None:
    bound = profile.bind("Ada", times=3)
    assert_type(bound.run(backend=BACKEND, retries=1), sgl.ProgramState[int])
    assert bound.bind().run(backend=BACKEND).ret_value == 3
    assert bound().run(backend=BACKEND)[person].name == "Ada"
    twice = functools.partial(profile, times=2)
    assert_type(twice("Ada").run(backend=BACKEND)[person], Person)
    assert everything.bind(topic="All").run(backend=BACKEND)[free] == "some text"


def test_run_takes_both_without_telling_them_apart() -> None:
    assert_type(profile.run("Ada", backend=BACKEND), sgl.ProgramState[int])
    assert profile.run(text="Ada", times=4, temperature=0.3, backend=BACKEND).ret_value == 4
    assert Asker().ask.run("Why?", backend=BACKEND).text() == "short Why?some text"
    assert_type(profile.trace(text="Ada").graph(), sgl.Graph)


def test_values_have_the_types_of_their_generations() -> None:
    state = everything(topic="All").run(backend=BACKEND)
    assert_type(state[people], list[Person])
    assert_type(state[point], Point)
    assert_type(state[row], Row)
    assert_type(state[colour], Colour)
    assert_type(state[number], int)
    assert_type(state[bounded], int)
    assert_type(state[maybe], int | None)
    assert_type(state[sure], bool)
    assert_type(state[word], Literal["a", "b"])
    assert_type(state[free], str)
    assert_type(state[several], list[str])
    assert_type(state[numbers], list[int])
    assert_type(state[digits], str)
    assert_type(state[integer], str)
    assert_type(state[tags], list[str])
    assert_type(state[picked], str)
    assert_type(state.get_var(point), Point)
    assert (state[people][0].name, state[point].x, state[row]["key"], state[colour]) == (
        "Ada",
        1,
        "a",
        Colour.RED,
    )
    assert (state[number], state[bounded], state[maybe], state[sure], state[word]) == (
        7,
        7,
        None,
        True,
        "b",
    )
    assert (state[several], state[numbers], state[integer]) == (["some text"] * 2, [7, 7], "7")
    assert state.selection(picked).picked == "x"
    assert state.get_meta_info(free) is not None
    assert state.usage(free).completion_tokens > 0


def test_a_value_is_read_with_a_type() -> None:
    state = everything(topic="All").run(backend=BACKEND)
    assert_type(state.value("point", Point), Point)
    assert_type(state.value("people", list[Person]), list[Person])
    assert_type(state.value("word", Literal["a", "b"]), Literal["a", "b"])
    assert_type(state.value("maybe", int | None), int | None)
    assert_type(state.value("free", str), str)
    assert_type(state.value("row", Row), Row)
    assert state.value("number", int) + 1 == 8


def test_batches_have_the_type_that_on_error_and_the_iteration_ask_for() -> None:
    items = [{"text": "Ada"}, {"text": "Ada"}]
    states = profile.run_batch(items, backend=BACKEND, num_threads=2, temperature=0)
    assert_type(states, list[sgl.ProgramState[int]])
    assert_type(states[0][person], Person)
    assert_type(
        profile.run_batch(items, backend=BACKEND, on_error="skip"), list[sgl.ProgramState[int]]
    )
    returned = profile.run_batch(items, backend=BACKEND, on_error="return")
    assert_type(returned, list[sgl.ProgramState[int] | Exception])
    assert [state[person].age for state in returned if not isinstance(state, Exception)] == [36] * 2
    iterated = profile.run_batch(items, backend=BACKEND, generator_style=True)
    assert_type(iterated, Iterator[sgl.ProgramState[int]])
    assert [state[person].age for state in iterated] == [36] * 2
    unordered = profile.run_batch(items, backend=BACKEND, ordered=False, on_error="return")
    assert_type(unordered, Iterator[tuple[int, sgl.ProgramState[int] | Exception]])
    assert {index for index, _ in unordered} == {0, 1}
    in_order = profile.run_batch([("Ada",), ("Ada", 2)], backend=BACKEND)
    assert [state.ret_value for state in in_order] == [1, 2]


def test_streams_have_the_types_of_their_values() -> None:
    state = profile("Ada").run(backend=BACKEND, stream=True)
    assert_type(state.text_iter(), Iterator[str])
    partial = state.partial_iter(person)
    assert_type(partial, Iterator[Person])
    assert [*partial][-1] == Person(name="Ada", age=36)
    assert "".join(state.text_iter(person)) == PERSON


async def awaited() -> None:
    state = await later("Ada").arun(backend=BACKEND, stream=True)
    assert_type(state, sgl.ProgramState[str])
    assert_type(await state.get(person), Person)
    assert_type(state.text_async_iter(), AsyncIterator[str])
    partial = state.partial_async_iter(person)
    assert_type(partial, AsyncIterator[Person])
    assert [each async for each in partial][-1].name == "Ada"
    states = await later.arun_batch([("Ada",)], backend=BACKEND)
    assert_type(states, list[sgl.ProgramState[str]])
    iterated = await later.arun_batch([("Ada",)], backend=BACKEND, generator_style=True)
    assert_type(iterated, AsyncIterator[sgl.ProgramState[str]])
    assert [each.ret_value async for each in iterated] == ["Ada"]
    assert (await later.bind("Ada").arun(backend=BACKEND)).ret_value == "Ada"


def test_coroutines_have_the_same_types() -> None:
    asyncio.run(awaited())


def test_backends_and_settings_have_names() -> None:
    sgl.set_default_backend(sgl.ScriptedBackend({"a": ["b", "c"]}, default="d"))
    limit = sgl.RateLimit(requests_per_minute=60)
    first = sgl.OpenAI("gpt-4o-mini", api_key="key", rate_limit=limit)
    fallback = sgl.Fallback([first, BACKEND])
    assert_type(fallback, sgl.Fallback)
    assert sgl.SamplingParams(temperature=0.5, max_tokens=3).temperature == 0.5
    assert sgl.EngineConfig(model="m", dtype="float32").dtype == "float32"


async def generated(engine: sgl.Engine, prompt: str, params: dict[str, object]) -> None:
    assert_type(engine.generate(prompt), Answer)
    assert_type(engine.generate(prompt, {"temperature": 0, "max_new_tokens": 4})["text"], str)
    assert_type(
        engine.generate([prompt], params, return_logprob=True)[0]["meta_info"]["prompt_tokens"], int
    )
    assert_type(
        engine.generate(input_ids=[1, 2], sampling_params={"stop": ["."]})["output_ids"], list[int]
    )
    assert_type(engine.generate(input_ids=[[1], [2]]), list[Answer])
    assert_type(engine.generate(prompt, {"n": 2}), Answer | list[Answer])
    assert_type(engine.generate(prompt, params), Answer | list[Answer])
    assert_type([each["text"] for each in engine.generate(prompt, stream=True)], list[str])
    assert_type(await engine.async_generate(prompt), Answer)
    assert_type(await engine.async_generate([prompt]), list[Answer])
    assert_type(
        [each["text"] async for each in await engine.async_generate(prompt, stream=True)], list[str]
    )


def numbers_of_texts(engine: sgl.Engine, text: str) -> None:
    assert_type(engine.encode(text)["embedding"], list[float])
    assert_type(engine.encode([1, 2])["embedding"], list[float])
    assert_type([each["embedding"] for each in engine.encode([text])], list[list[float]])
    assert_type(engine.classify(text)["probs"], dict[str, float])
    assert_type([each["label"] for each in engine.classify([[1], [2]])], list[str])
    assert_type(engine.reward(text), float | list[float])
    assert_type(engine.reward([text]), list[float] | list[list[float]])
    assert_type(
        engine.score(text, ["a"], label_token_ids=[1]), ScoreResult | tuple[ChoiceScore, ...]
    )


def look_up(order: int) -> str:
    return str(order)


def refund(order: int, amount: float) -> str:
    return f"{order}: {amount}"


def agrees(call: object) -> bool:
    return call is not None


def approval_by_tool(s: sgl.ProgramState) -> None:
    by_name: dict[str, Literal["ask"]] = {"refund": "ask"}
    functions_by_name: dict[str, Callable[[object], bool]] = {"refund": agrees}
    by_tool: dict[Callable[[int], str], Literal["ask"]] = {look_up: "ask"}
    by_either: dict[str | Callable[..., str], Callable[[object], bool]] = {refund: agrees}
    sgl.use_tools(s, [look_up], approve=by_name)
    sgl.use_tools(s, [look_up], approve=functions_by_name)
    sgl.use_tools(s, [look_up], approve=by_tool)
    sgl.use_tools(s, [look_up], approve=by_either)
    sgl.use_tools(s, [look_up], approve={look_up: "ask"})
    sgl.use_tools(s, [look_up], approve={"refund": "ask", look_up: agrees})
    sgl.use_tools(s, [look_up], approve={look_up: agrees, refund: lambda call: call.deny()})
    sgl.use_tools(s, [look_up], approve="ask")
    sgl.use_tools(s, [look_up], approve=agrees)
    sgl.use_tools(s, [look_up], approve=lambda call: call.approve(amount=1))
