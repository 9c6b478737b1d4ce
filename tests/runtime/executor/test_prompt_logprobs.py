"""Log-probabilities of prompts are computed in pieces, and take no more of a step than other
tokens.
"""

import random

import pytest
import torch

from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.executor import prompt_logprobs
from tests.runtime.scripted import VOCAB, ScriptedModel, SteppedEngine, ended, hashes, logits_of

PROMPT = [random.Random(1).randrange(1, VOCAB) for _ in range(300)]
PARAMS = SamplingParams(
    max_tokens=1,
    temperature=0,
    return_logprob=True,
    logprob_start_len=0,
    top_logprobs_num=3,
    token_ids_logprob=(5, 2),
)


@pytest.fixture
def at_once(monkeypatch):
    """Of each product with the head, the rows."""
    rows = []
    logits = ScriptedModel.logits
    monkeypatch.setattr(
        ScriptedModel,
        "logits",
        lambda self, hidden: rows.append(len(hidden)) or logits(self, hidden),
    )
    return rows


@pytest.mark.parametrize("overlap", [False, True])
def test_the_logits_of_a_piece_are_there_at_a_time(monkeypatch, at_once, overlap):
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", 50 * VOCAB)
    monkeypatch.setattr(prompt_logprobs, "FIRST_ROWS", 7)
    engine = SteppedEngine(overlap=overlap)
    _, events = engine.start(PROMPT, PARAMS)
    engine.drain()
    assert max(at_once) == 50
    expected = torch.from_numpy(logits_of(hashes(PROMPT))).log_softmax(-1)[:-1]
    entries = ended(events).prompt_logprobs
    assert len(entries) == len(PROMPT) - 1
    for token, row, entry in zip(PROMPT[1:], expected, entries):
        assert (entry.token_id, entry.logprob) == (token, float(row[token]))
        values, ids = row.topk(3)
        assert [(v, i) for v, i, _ in entry.top] == list(zip(values.tolist(), ids.tolist()))
        assert [(v, i) for v, i, _ in entry.ids] == [(float(row[i]), i) for i in (5, 2)]


def test_scored_tokens_take_twice_the_room_of_a_step(at_once):
    """So that rows beside them wait for no more than a piece of a prompt."""
    engine = SteppedEngine(step_tokens=40, max_running=4)
    engine.start([1, 2, 3], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    for _ in range(3):
        engine.step()
    before = engine.loop.steps
    _, events = engine.start(PROMPT, PARAMS)
    while not events:
        engine.step()
    assert engine.loop.steps - before >= 300 / 20
    assert max(at_once) <= 20
    assert len(ended(events).prompt_logprobs) == len(PROMPT) - 1


def test_rows_are_scored_together_and_each_as_alone(monkeypatch, at_once):
    """The head is read once for all that is reported alike, and pieces may begin in the middle of a
    row.
    """
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", 5 * VOCAB)
    monkeypatch.setattr(prompt_logprobs, "FIRST_ROWS", 4)
    engine = SteppedEngine(step_tokens=1000, max_running=8)
    plain = SamplingParams(max_tokens=0, return_logprob=True, logprob_start_len=0)
    prompts = [PROMPT[20 * i : 20 * i + 3 + i] for i in range(4)]
    started = [engine.start(prompt, plain)[1] for prompt in prompts]
    more = engine.start(PROMPT[100:107], PARAMS)[1]
    engine.drain()
    for prompt, events in zip((*prompts, PROMPT[100:107]), (*started, more)):
        expected = torch.from_numpy(logits_of(hashes(prompt))).log_softmax(-1)[:-1]
        entries = ended(events).prompt_logprobs
        found = [(entry.token_id, entry.logprob) for entry in entries if entry.logprob is not None]
        assert found == [(token, float(row[token])) for token, row in zip(prompt[1:], expected)]
        assert {len(entry.top) for entry in entries if entry.logprob is not None} == {
            3 if events is more else 0
        }
    # 14 tokens of four rows, then six of one, then what that row draws
    assert at_once == [4, 5, 5, 4, 2, 1]
