"""DSPy's predictors on an engine."""

import asyncio
from typing import Literal

import pytest

pytest.importorskip("dspy", reason="dspy is not installed: `make test-clients` installs it")

import dspy
from dspy.lm15 import InvalidRequestError, Message, Request

import sglang_lite as sgl
from sglang_lite.integrations.chat import EngineChat
from sglang_lite.integrations.dspy import AsyncDspyEngine, DspyEngine, lm

pytestmark = pytest.mark.filterwarnings("default")  # DSPy's own


@pytest.fixture(scope="module")
def model(engine):
    return lm(engine, temperature=0, max_tokens=60, cache=False)


class Review(dspy.Signature):
    """Classify the sentiment."""

    text: str = dspy.InputField()
    label: Literal["good", "bad"] = dspy.OutputField()
    score: int = dspy.OutputField()


def test_typed_outputs_are_constrained(model):
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Review)(text="I love it")
        later = asyncio.run(dspy.Predict(Review).acall(text="I love it"))
    assert found.label in ("good", "bad")
    assert type(found.score) is int
    assert later.toDict() == found.toDict()
    assert model.history[-1]["usage"]["completion_tokens"] > 0


def test_streams_and_whole_answers_are_equal(engine):
    request = Request(model="m", messages=(Message.user("Count to three."),), config=_config())
    whole = DspyEngine(EngineChat(engine)).complete(request)
    events = list(DspyEngine(EngineChat(engine)).stream(request))
    assert [event.type for event in (events[0], events[-1])] == ["start", "end"]
    assert "".join(event.delta.text for event in events[1:-1]) == whole.message.text

    async def collected():
        return [event async for event in AsyncDspyEngine(EngineChat(engine)).stream(request)]

    assert [event.type for event in asyncio.run(collected())] == [event.type for event in events]


def _config():
    return dspy.lm15.Config(max_tokens=6, temperature=0.0)


def test_errors_are_dspys(engine):
    request = Request(model="m", messages=(Message.user("Hi"),), config=dspy.lm15.Config(
        response_format={"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}))  # fmt: skip
    with pytest.raises(InvalidRequestError, match="nothing") as caught:
        DspyEngine(EngineChat(engine)).complete(request)
    assert isinstance(caught.value.__cause__, sgl.SglError)


def test_a_closed_engine_is_not_asked_again(engine, monkeypatch):
    asked = []

    def answer(_self, **_fields):
        asked.append(1)
        raise sgl.EngineClosedError("the engine is closed.")

    monkeypatch.setattr(EngineChat, "answer", answer)
    with pytest.raises(Exception, match="the engine is closed"):
        lm(engine, cache=False)("Hi")
    assert asked == [1]
