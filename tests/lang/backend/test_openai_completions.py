"""Completions through OpenAI's own SDK, against a local server that speaks the protocol."""

import pytest
from api_server import Events, Reply
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from openai_answers import USAGE

import sglang_lite as sgl

pytestmark = pytest.mark.usefixtures("either_client")


def test_completion_models_get_the_text(api, openai):
    logprobs = Logprobs(
        tokens=["Pa", "ris"],
        token_logprobs=[-0.1, -0.2],
        top_logprobs=[{"Pa": -0.1}, {"ris": -0.2}],
    )
    choice = CompletionChoice(index=0, text="Paris", finish_reason="length", logprobs=logprobs)
    api.answers = [
        Reply(
            Completion(
                id="c",
                choices=[choice],
                created=1,
                model="m",
                object="text_completion",
                usage=USAGE,
            )
        )
    ]

    @sgl.function
    def program(s):
        s += "The capital of France is" + sgl.gen(
            "a", max_tokens=2, return_logprob=True, top_logprobs_num=1
        )

    state = program.run(backend=openai("gpt-3.5-turbo-instruct"))
    assert state["a"] == "Paris"
    assert api.requests[0].path == "/v1/completions"
    assert api.last == {
        "model": "gpt-3.5-turbo-instruct",
        "prompt": "The capital of France is",
        "max_tokens": 2,
        "logprobs": 1,
    }
    meta = state.get_meta_info("a")
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["output_token_logprobs"] == [[-0.1, -1, "Pa"], [-0.2, -1, "ris"]]


def test_completions_are_streamed(api, openai):
    def part(text, finish=None):
        choice = CompletionChoice.construct(index=0, text=text, finish_reason=finish, logprobs=None)
        return Completion(id="c", choices=[choice], created=1, model="m", object="text_completion")

    api.answers = [Events([part("Pa"), part("ris", "stop"), "[DONE]"])]

    @sgl.function
    def program(s):
        s += "France:" + sgl.gen("a")

    state = program.run(backend=openai("local-base", is_chat_model=False), stream=True)
    assert list(state.text_iter("a")) == ["Pa", "ris"]
