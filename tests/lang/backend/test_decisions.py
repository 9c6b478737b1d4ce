"""Selections by OpenAI's decisions endpoint, which its SDK has since 3.51."""

import contextlib
import math

import openai
import pytest
from plain_server import server

import sglang_lite as sgl
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.protocol import RefusalError

types = pytest.importorskip("openai.types.decision")


def decided(**probabilities):
    each = [
        types.AnswerAnswerResourceChoiceProbability(value=v, probability=p)
        for v, p in probabilities.items()
    ]
    answer = types.AnswerAnswerResourceChoice(
        choice="x", confidence=0.5, probabilities=each, type="choice"
    )
    return decision_of(answer)


def decision_of(answer):
    usage = types.Usage(
        input_tokens=9,
        input_tokens_details=types.UsageInputTokensDetails(cache_write_tokens=0, cached_tokens=4),
        output_tokens=0,
        output_tokens_details=types.UsageOutputTokensDetails(reasoning_tokens=0),
        total_tokens=9,
    )
    return types.Decision(answers=[answer], model="gpt-6-luna", usage=usage)


@sgl.function
def choose(s, heat=0.0):
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.select("pet", ["dog", "cat"], temperature=heat))


@contextlib.contextmanager
def deciding(reply):
    """A backend on a server that answers with a decision; and what came to that."""
    with server({}, reply) as (url, came):
        backend = OpenAI("gpt-6-luna", api_key="key", base_url=f"{url}/v1", max_retries=0)
        yield backend, came
        backend.shutdown()


@pytest.mark.usefixtures("either_client")
def test_decisions_give_probabilities():
    with deciding(decided(cat=0.75, dog=0.25)) as (backend, came):
        state = choose.run(backend=backend)
        assert state["pet"] == "cat"
    ((path, body),) = came
    assert path == "/v1/decisions"
    assert body["questions"][0]["choices"] == [{"value": "dog"}, {"value": "cat"}]
    assert body["input"] == [{"role": "user", "content": "Which?"}]
    assert state.selection("pet").probs == pytest.approx({"dog": 0.25, "cat": 0.75})
    meta = state.get_meta_info("pet")
    assert (meta["strategy"], meta["prompt_tokens"]) == ("decisions", 9)
    assert meta["normalized_prompt_logprobs"] == pytest.approx([math.log(0.25), math.log(0.75)])


def test_a_decision_can_be_drawn_from():
    with deciding(decided(cat=0.0, dog=1.0)) as (backend, _):
        assert choose.run(1.0, backend=backend)["pet"] == "dog"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (decided(cat=1.0), sgl.BackendError),
        (decision_of(types.AnswerAnswerResourceRefusal(type="refusal")), RefusalError),
        ({}, sgl.BackendError),
    ],
)
def test_a_decision_that_is_none_is_an_error(reply, error):
    with deciding(reply) as (backend, _), pytest.raises(error):
        choose.run(backend=backend)["pet"]


def test_an_sdk_without_decisions_calls_their_address(monkeypatch):
    monkeypatch.delattr(openai.AsyncOpenAI, "decisions")
    with deciding(decided(cat=0.25, dog=0.75)) as (backend, came):
        state = choose.run(backend=backend)
        assert state["pet"] == "dog"
    assert state.selection("pet").probs == pytest.approx({"dog": 0.75, "cat": 0.25})
    ((path, body),) = came
    assert (path, body["model"]) == ("/v1/decisions", "gpt-6-luna")
