"""LlamaIndex's calls on an engine."""

import asyncio

import pytest

pytest.importorskip(
    "llama_index.core", reason="llama-index-core is not installed: `make test-clients` installs it"
)

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.integrations.llama_index import SglangLite

pytestmark = pytest.mark.filterwarnings("default")  # the library's own


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.fixture
def llm(engine):
    return SglangLite(engine=engine, max_tokens=60, fields={"temperature": 0})


def test_predictions_have_their_type(llm):
    prompt = PromptTemplate("Extract: {text}")
    assert llm.structured_predict(Person, prompt, text="Maria is 34.") == Person(
        name="Maria", age=34
    )
    assert asyncio.run(llm.astructured_predict(Person, prompt, text="Maria is 34.")) == Person(
        name="Maria", age=34
    )


def test_a_tool_is_called(llm):
    assert (
        llm.predict_and_call(
            [FunctionTool.from_defaults(add)], "Add 3 and 4.", tool_required=True
        ).response
        == "7"
    )


def test_all_ways_of_asking_agree(llm):
    asked = [ChatMessage("Count to three.")]

    async def later():
        streamed = [each async for each in await llm.astream_chat(asked, max_tokens=6)]
        return (await llm.achat(asked, max_tokens=6)).message.content, streamed[-1].message.content

    text = llm.chat(asked, max_tokens=6).message.content
    streamed = list(llm.stream_chat(asked, max_tokens=6))
    assert "".join(each.delta for each in streamed) == streamed[-1].message.content == text
    assert llm.complete("Count to three.", max_tokens=6).text == text
    assert asyncio.run(later()) == (text, text)


def test_unknown_fields_are_refused(llm):
    with pytest.raises(sgl.ParameterError, match="temprature"):
        llm.complete("Hi", temprature=0)


def test_a_tool_is_chosen_by_its_name(llm):
    answer = llm.chat_with_tools(
        [FunctionTool.from_defaults(add)], "Add 3 and 4.", tool_choice="add"
    )
    assert [call.tool_name for call in llm.get_tool_calls_from_response(answer)] == ["add"]
