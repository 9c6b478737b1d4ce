"""Requests that only score: their last token is not computed, as nothing is drawn after it."""

import pytest
import torch

from tests.runtime.scripted import SteppedEngine, hashes, logits_of

PROMPT, CHOICES = "abc", ["d", "efg"]


def planned(engine):
    """The steps that an engine plans from now on."""
    plan, batches = engine.scheduler.plan, []
    engine.scheduler.plan = lambda: batches.append(plan()) or batches[-1]
    return batches


@pytest.mark.parametrize(
    "options", [{}, {"retract_every": 1}, {"step_tokens": 8}, {"page_size": 4}, {"overlap": False}]
)
def test_the_last_token_of_a_choice_is_scored_and_not_computed(options):
    engine, events = SteppedEngine(max_running=8, max_total_tokens=512, **options), []
    batches = planned(engine)
    engine.submit_select(PROMPT, CHOICES, sink=events.append)
    engine.drain()
    (selection,) = events
    for choice, score in zip(CHOICES, selection.scores):
        tokens = engine.tokenizer.encode(PROMPT + choice)
        logprobs = torch.from_numpy(logits_of(hashes(tokens))).log_softmax(-1)
        assert score.token_ids == tuple(tokens[len(PROMPT) :])
        assert score.logprobs == pytest.approx([float(logprobs[i - 1, tokens[i]]) for i in range(3, len(tokens))])
    if "retract_every" not in options:
        assert sum(batch.tokens for batch in batches if batch is not None) == len("abc") + len("abcef")
    engine.check_empty()
