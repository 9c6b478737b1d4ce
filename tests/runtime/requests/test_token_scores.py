"""What the model gave each token, and what its grammar took: against the model's log-probabilities
and brute force.
"""

import math
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Regex, SamplingParams
from sglang_lite.runtime.executor.sampler import Masks, SamplingTable, sample
from sglang_lite.runtime.executor.step_record import SAMPLING, sampling_row
from sglang_lite.runtime.requests.resolved_params import resolve_params

OBJECT = json_schema({
    "type": "object", "properties": {"ok": {"type": "boolean"}, "é": {"type": "string", "maxLength": 4}},
    "required": ["ok", "é"], "additionalProperties": False,
})  # fmt: skip
ASKED = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1},
    {
        "seed": 2,
        "top_p": 0.5,
        "top_k": 9,
        "repetition_penalty": 1.5,
        "logit_bias": ((7, 9.0), (30, -4.0)),
    },
    {"seed": 3, "presence_penalty": 1.0, "min_tokens": 3},
]


def complete(engine, constraint, **params):
    return engine.complete(
        "A fact: ", SamplingParams(**{"max_tokens": 60, "confidence": True, **params}), constraint
    )


def model_logprobs(engine, prompt, ids):
    """Log-probabilities of tokens as a continuation, in the model itself."""
    start = len(engine.tokenizer.encode(prompt))
    scored = SamplingParams(max_tokens=0, return_logprob=True, logprob_start_len=start)
    before = engine.tokenizer.encode(prompt)
    return [each.logprob for each in engine.complete([*before, *ids], scored).prompt_logprobs]


@pytest.mark.parametrize("params", ASKED, ids=str)
def test_they_are_the_models_own_whatever_is_drawn_from(small_engine, params):
    generation = complete(small_engine, OBJECT, **params)
    scores = generation.scores
    assert scores is not None
    assert (
        len(scores.logprobs) == len(scores.allowed) == len(scores.ends) == len(generation.token_ids)
    )
    assert list(scores.logprobs) == pytest.approx(
        model_logprobs(small_engine, "A fact: ", generation.token_ids), abs=1e-3
    )
    assert all(own - 1e-5 < allowed <= 0 for own, allowed in zip(scores.logprobs, scores.allowed))
    assert scores.ends[-1] == len(generation.text)
    for i, end in enumerate(scores.ends):
        text = small_engine.tokenizer.decode(generation.token_ids[: i + 1])
        assert generation.text[:end].startswith(text.rstrip("\ufffd"))


def test_log_probabilities_under_a_constraint_are_reported_in_both_ways(small_engine):
    generation = complete(
        small_engine, Regex("[0-9]{3}"), temperature=0, return_logprob=True, confidence=False
    )
    scores = generation.scores
    assert scores is not None
    for drawn, own, allowed in zip(generation.output_logprobs, scores.logprobs, scores.allowed):
        assert drawn.logprob == pytest.approx(own - allowed, abs=1e-4)
    assert scores.allowed[0] < -0.1  # digits are not all that the model would write
    assert complete(small_engine, Regex("[0-9]{3}"), confidence=False).scores is None
    assert complete(small_engine, None, return_logprob=True, confidence=False).scores is None


def test_what_is_allowed_has_the_sum_of_its_probabilities(small_engine):
    """All first tokens of a small language, each with the probability that the model gives it."""
    words = ("12", "1x", "yes", "zebra")
    first = complete(small_engine, Regex("|".join(words)), temperature=0)
    table = small_engine.tokenizer
    allowed = [
        i for i in range(table.vocab_size)
        if (text := table.decode((i,), skip_special=False)) and any(word.startswith(text) for word in words)
    ]  # fmt: skip
    asked = SamplingParams(
        max_tokens=0, return_logprob=True, token_ids_logprob=tuple(allowed), temperature=0
    )
    (entry,) = small_engine.complete("A fact: ", asked).output_logprobs
    assert first.scores is not None
    assert first.scores.allowed[0] == pytest.approx(
        math.log(sum(math.exp(each[0]) for each in entry.ids)), abs=1e-4
    )


def test_forced_tokens_are_scored_too(small_engine):
    generation = complete(small_engine, Regex("hello world and everyone [0-9]"), temperature=0)
    assert generation.usage.forced_tokens == 0  # each takes a draw
    assert generation.scores is not None
    assert len(generation.scores.logprobs) == len(generation.token_ids)


def test_tokens_of_an_output_that_goes_on_have_no_scores(small_engine):
    whole = complete(small_engine, Regex("[a-z]{12}"), seed=4)
    given = whole.token_ids[:2]
    done: Future[Any] = Future()
    params = SamplingParams(max_tokens=60, confidence=True, seed=4)
    small_engine.submit(
        "A fact: ", params, Regex("[a-z]{12}"), sink=done.set_result, output_ids=given
    )
    rest = done.result(timeout=60)
    assert rest.text == whole.text
    assert whole.scores is not None
    assert rest.scores.logprobs[:2] == (None, None) == rest.scores.allowed[:2]
    assert rest.scores.logprobs[2:] == pytest.approx(whole.scores.logprobs[2:], abs=1e-4)
    assert rest.scores.ends == whole.scores.ends


@pytest.mark.parametrize("allowed", [[3], [3, 4, 5], [0, 3], [*range(70)]], ids=len)
def test_masses_from_certain_to_impossible_are_exact(allowed):
    """Against sums in float64, of logits that reach from 0 to -300."""
    logits = torch.full((2, 70), -300.0) + torch.arange(70)
    logits[:, 0], logits[:, 69] = 0.0, float("-inf")
    words = np.packbits(np.isin(np.arange(96), allowed), bitorder="little").view(np.int32)[None]
    table, slots = SamplingTable(1), np.zeros(2, dtype=np.int32)
    table.set_parameters(
        slots[:1],
        np.array(
            [sampling_row(resolve_params(SamplingParams(temperature=0), 70), 0)], dtype=SAMPLING
        ),
    )
    masks, raw = Masks(words, np.array([0, -1], dtype=np.int32)), logits.double()
    drawn = sample(logits, table, slots, slots, {}, masks, np.array([True, True]))
    assert drawn.scores is not None
    exact = float(raw[0, allowed].logsumexp(0) - raw[0].logsumexp(0))
    assert drawn.scores[1] == pytest.approx([exact, 0.0], abs=1e-5)
    own = [float(raw[i].log_softmax(-1)[token]) for i, token in enumerate(drawn.tokens)]
    assert drawn.scores[0] == pytest.approx(own, abs=1e-4)
