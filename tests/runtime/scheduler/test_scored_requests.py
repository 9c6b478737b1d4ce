"""Requests that only score: their last token is not computed, as nothing is drawn after it."""

import pytest
import torch

from sglang_lite.protocol import RequestAbortedError
from tests.runtime.scripted import SteppedEngine, hashes, logits_of

PROMPT, CHOICES = "abc", ["d", "efg"]


def planned(engine):
    """The steps that an engine plans from now on."""
    plan, batches = engine.scheduler.plan_batch, []
    engine.scheduler.plan_batch = lambda: batches.append(plan()) or batches[-1]
    return batches


def check_scores(engine, prompt, choices, selection):
    """Each choice has the log-probabilities that the model gives its tokens."""
    for choice, score in zip(choices, selection.scores, strict=True):
        tokens = engine.tokenizer.encode(prompt + choice)
        logprobs = torch.from_numpy(logits_of(hashes(tokens))).log_softmax(-1)
        assert score.token_ids == tuple(tokens[len(prompt) :])
        expected = [float(logprobs[i - 1, tokens[i]]) for i in range(len(prompt), len(tokens))]
        assert score.logprobs == pytest.approx(expected)


@pytest.mark.parametrize(
    "options", [{}, {"retract_every": 1}, {"step_tokens": 8}, {"page_size": 4}, {"overlap": False}]
)
def test_the_last_token_of_a_choice_is_scored_and_not_computed(options):
    engine, events = SteppedEngine(max_running=8, max_total_tokens=512, **options), []
    batches = planned(engine)
    engine.submit_select(PROMPT, CHOICES, sink=events.append)
    engine.drain()
    (selection,) = events
    check_scores(engine, PROMPT, CHOICES, selection)
    if "retract_every" not in options:
        assert sum(batch.tokens for batch in batches if batch is not None) == len("abc") + len(
            "abcef"
        )
    engine.check_empty()


LONG, MORE = "what is long is computed once, " * 4, ["d", "efg", "e", "dab"]


@pytest.mark.parametrize(
    "options", [{}, {"retract_every": 1}, {"step_tokens": 8}, {"page_size": 4}, {"overlap": False}]
)
def test_a_long_prompt_is_computed_before_its_choices_with_what_their_first_tokens_are_worth(
    options,
):
    engine, events = SteppedEngine(max_running=8, max_total_tokens=2048, **options), []
    batches = planned(engine)
    engine.submit_select(LONG, MORE, sink=events.append)
    engine.drain()
    (selection,) = events
    check_scores(engine, LONG, MORE, selection)
    computed = sum(batch.tokens for batch in batches if batch is not None)
    assert selection.usage.prompt_tokens == sum(len(LONG + choice) for choice in MORE)
    if not options.keys() & {"retract_every", "page_size"}:
        # nothing of those of one letter, and no last ones
        assert computed == len(LONG) + len("ef" + "da")
        assert selection.usage.cached_tokens == 3 * len(LONG)
    engine.check_empty()


def test_a_long_prompt_that_is_cached_takes_no_step_of_its_own():
    engine, events = SteppedEngine(max_running=8, max_total_tokens=2048, overlap=False), []
    for _ in range(2):
        batches = planned(engine)
        engine.submit_select(LONG, MORE[:2], sink=events.append)
        engine.drain()
    assert [batch.tokens for batch in batches if batch is not None] == [len(" ") + len(" ef")]
    assert [score.logprobs for score in events[0].scores] == [
        pytest.approx(score.logprobs) for score in events[1].scores
    ]


@pytest.mark.parametrize("steps", range(5))
def test_a_selection_that_is_aborted_tells_so_once_and_leaves_nothing(steps):
    engine, events = SteppedEngine(max_running=8, max_total_tokens=2048, step_tokens=64), []
    ticket = engine.submit_select(LONG, MORE, sink=events.append)
    for _ in range(steps):
        engine.step()
    assert not events
    ticket.abort()
    engine.drain()
    assert [type(event) for event in events] == [RequestAbortedError]
    engine.check_empty()
