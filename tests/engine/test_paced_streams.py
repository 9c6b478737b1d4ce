"""Streams that are told of now and then: the same text, in fewer and larger pieces."""

import queue

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Delta, Generation
from tests.engine.conftest import SETTINGS


@pytest.fixture(scope="module")
def seldom(folders):
    """An engine that tells of the first token, and then of the rest at the end."""
    with sgl.Engine(folders[0], **SETTINGS, stream_interval_s=60) as engine:
        yield engine


def events_of(engine, prompt, params):
    events = queue.SimpleQueue()
    engine.submit(prompt, params, sink=events.put, stream=True)
    found = []
    while not found or isinstance(found[-1], Delta):
        found.append(events.get(timeout=60))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"stop": ("e",)}, {"stop": ("qu", "x!"), "include_stop": True}, {"temperature": 1.0, "seed": 4},
        {"ignore_eos": True}, {"stop_regex": ("[a-c]{2}",)}, {"frequency_penalty": 1.0}, {"return_logprob": True},
    ],
)  # fmt: skip
def test_they_say_what_others_say(seldom, own, options):
    params = sgl.SamplingParams(max_tokens=40, **{"temperature": 0.0, **options})
    *deltas, whole = events_of(seldom, "a quick brown", params)
    other = own.complete("a quick brown", params)
    assert isinstance(whole, Generation)
    assert (whole.text, whole.token_ids, whole.finish_reason) == (
        other.text,
        other.token_ids,
        other.finish_reason,
    )
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [e.logprob for delta in deltas for e in delta.logprobs] == [
        e.logprob for e in whole.output_logprobs
    ]


def test_the_first_token_comes_at_once_and_the_others_together(seldom):
    """So many tokens that the process's thread that sends is not still asleep when the last comes:
    what it has not sent yet is merged.
    """
    first, *rest, whole = events_of(
        seldom, "a", sgl.SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    )
    assert len(first.token_ids) == 1
    assert len(rest) == 1
    assert first.token_ids + rest[0].token_ids == whole.token_ids


def test_many_at_once_are_told_apart(seldom, own):
    params = sgl.SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    asked = [f"number {i}" for i in range(12)]
    events: dict = {text: queue.SimpleQueue() for text in asked}
    for text in asked:
        seldom.submit(text, params, sink=events[text].put, stream=True)
    for text in asked:
        told = ""
        while isinstance(event := events[text].get(timeout=60), Delta):
            told += event.text
        assert told == event.text == own.complete(text, params).text
