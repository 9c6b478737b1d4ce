"""Agents of Pydantic AI on an engine, and clients of the package openai without a server."""

import asyncio
from typing import Any

import pytest

pytest.importorskip(
    "pydantic_ai", reason="pydantic-ai is not installed: `make test-clients` installs it"
)

import openai
from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError

from sglang_lite.integrations.openai import async_client
from sglang_lite.integrations.pydantic_ai import SglangLiteModel

pytestmark = pytest.mark.filterwarnings("default")  # the library's own


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def model(engine):
    return SglangLiteModel(engine, settings={"temperature": 0, "max_tokens": 60})


def test_outputs_have_their_type(model):
    done = Agent(model, output_type=Person).run_sync("Extract name and age as JSON: Maria is 34.")
    assert done.output == Person(name="Maria", age=34)
    assert done.usage.input_tokens > 0


def test_a_tool_that_makes_the_output_is_called(model):
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    assert Agent(model, output_type=ToolOutput(add)).run_sync("Add 3 and 4.").output == 7


def test_text_streams(model):
    async def texts():
        async with Agent(model).run_stream(
            "Count to three.", model_settings={"max_tokens": 6}
        ) as stream:
            return [text async for text in stream.stream_text(delta=True, debounce_by=None)]

    whole = Agent(model).run_sync("Count to three.", model_settings={"max_tokens": 6}).output
    found = asyncio.run(texts())
    assert len(found) > 1
    assert "".join(found) == whole


def test_a_refusal_says_why(model):
    with pytest.raises(ModelHTTPError, match=r"temperature: -3\.0 is outside its range"):
        Agent(model).run_sync("Hi", model_settings={"temperature": -3})


def test_other_routes_are_not_found(engine):
    with pytest.raises(openai.NotFoundError, match="is not a route of an engine"):
        asyncio.run(async_client(engine).embeddings.create(model="m", input="x"))


def test_a_stream_has_its_role_and_logprobs(engine):
    async def chunks():
        asked = [{"role": "user", "content": "Hi"}]
        client: Any = async_client(engine).chat.completions  # wrong arguments are on purpose
        stream = await client.create(
            model="m",
            messages=asked,
            max_tokens=2,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        found = [chunk async for chunk in stream]
        with pytest.raises(openai.BadRequestError, match="stream_options"):
            await client.create(model="m", messages=asked, stream=True, stream_options="x")
        with pytest.raises(openai.BadRequestError, match="stream"):
            await client.create(model="m", messages=asked, extra_body={"stream": "x"})
        return found

    found = asyncio.run(chunks())
    choices = [choice for chunk in found for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    logprobs = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(logprobs) == found[-1].usage.completion_tokens > 0
