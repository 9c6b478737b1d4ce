"""Programs on the default model, whose words are known."""

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int


@pytest.fixture(autouse=True)
def _default(smollm):
    sgl.set_default_backend(smollm)


@sgl.function
def capital(s, country):
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


def test_a_question_is_answered():
    state = capital.run("France")
    assert state["answer"] == "The capital of France is Paris."
    assert state.usage("answer").completion_tokens == 8


def test_values_selections_and_branches_in_one_program():
    @sgl.function
    def program(s):
        s += sgl.user("Extract the name and age as JSON: Maria Lopez is 34 years old.")
        s += sgl.assistant(sgl.gen("person", type=Person, temperature=0, max_tokens=60))
        fork = s.fork(2)
        fork += lambda i: sgl.user(["Is she an adult?", "Is she a child?"][i])
        fork += sgl.assistant(sgl.select("answer", ["Yes", "No"]))
        fork += sgl.user("How old is she?") + sgl.assistant(sgl.gen("age", type=int, temperature=0))
        fork.join()
        s += sgl.user("Mood?") + sgl.assistant(
            sgl.gen("mood", type=Literal["good", "bad"], temperature=0)
        )

    state = program.run()
    assert state["person"] == Person(name="Maria Lopez", age=34)
    assert set(state["answer"]) <= {"Yes", "No"}
    assert [type(age) for age in state["age"]] == [int, int]
    assert state["mood"] in ("good", "bad")
    assert state.usage().cached_tokens > state.usage().prompt_tokens / 2


def test_streaming_and_asyncio():
    async def main():
        state = await capital.arun("France", stream=True)
        return "".join([piece async for piece in state.text_async_iter("answer")])

    assert asyncio.run(main()) == "The capital of France is Paris."


def test_a_batch_shares_its_prefix():
    states = capital.run_batch([{"country": c} for c in ("France", "Japan", "Germany")])
    assert [s["answer"].split()[-1] for s in states] == ["Paris.", "Tokyo.", "Berlin."]


def test_the_backend_tells_what_it_is(smollm):
    backend = LocalBackend(smollm)
    assert backend.get_model_name() == "smollm2-135m"
    assert sgl.get_server_info()["model"] == "smollm2-135m"
    assert sgl.flush_cache(smollm) is True
