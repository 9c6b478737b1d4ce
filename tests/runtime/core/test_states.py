"""Models with recurrent layers: prefixes are reused where a state is kept, and every answer
is that of the whole text.
"""

import random

import pytest

from sglang_lite.protocol import ParameterError, SamplingParams
from tests.runtime.core.test_equivalence import requests
from tests.runtime.scripted import VOCAB, Guesses, SteppedEngine, answer, ended, loaded


def check(seed, *, rows=20):
    """Random requests to a scripted model whose states must sum up what is in the cache."""
    draw = random.Random(seed)
    engine = SteppedEngine(
        model=loaded(states=True), overlap=draw.random() < 0.5, max_running=4,
        step_tokens=draw.choice([4, 16, 1000]), page_size=draw.choice([1, 2, 4, 16]), prefix_cache=draw.random() < 0.8,
        context_length=96, max_total_tokens=draw.choice([128, 256, 640]), retract_every=draw.choice([0, 0, 3]),
        policy=draw.choice(["lpm", "fcfs"]), drafter=draw.choice([None, None, Guesses(0.8)]),
        max_mamba_cache_size=draw.choice([4, 6, 40]), mamba_track_interval=draw.choice([0, 0, 10]),
    )  # fmt: skip
    asked = requests(rows, seed)
    events = [engine.start(prompt, params)[1] for prompt, params in asked]
    engine.drain()
    for found, (prompt, params) in zip(events, asked):
        result = ended(found)
        assert (list(result.token_ids), result.finish_reason) == answer(prompt, params, params.seed)
    engine.check_empty()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(24))
def test_every_schedule_sums_up_what_is_in_the_cache(seed):
    check(seed)


def ask(engine, prompt, tokens=4):
    _, events = engine.start(prompt, SamplingParams(max_tokens=tokens, temperature=0))
    engine.drain()
    return ended(events)


def engine(**settings):
    sizes = {"max_running": 2, "context_length": 400, "max_total_tokens": 4000, "page_size": 4}
    kept = {"max_mamba_cache_size": 30}
    return SteppedEngine(model=loaded(states=True), **{**sizes, **kept, **settings})


def draw(count, seed):
    made = random.Random(seed)
    return [made.randrange(1, VOCAB) for _ in range(count)]


def test_a_chat_goes_on_where_its_last_answer_ended():
    running = engine()
    history = draw(50, 1)
    for turn in range(6):
        result = ask(running, history)
        cached = result.usage.cached_tokens
        assert not turn or cached >= len(history) - 12 - 4  # all but the last page, and what is new
        history = [*history, *result.token_ids, *draw(8, turn + 2)]


@pytest.mark.parametrize("shared", [40, 41, 43])
def test_prompts_that_wait_begin_where_they_stop_being_alike(shared):
    """Exactly there, even inside a page."""
    running = engine()
    stem = draw(shared, 1)
    asked = [[*stem, i, *draw(20, i)] for i in range(1, 9)]
    params = SamplingParams(max_tokens=1, temperature=0)
    events = [running.start(ids, params)[1] for ids in asked]
    running.drain()
    cached = [ended(each).usage.cached_tokens for each in events]
    assert cached == [0] + [shared] * 7


def test_a_second_prompt_that_leaves_the_tree_makes_a_third_begin_there():
    running = engine()
    stem = draw(64, 1)
    cached = [ask(running, [*stem, i, *draw(20, i)]).usage.cached_tokens for i in (1, 2, 3)]
    assert cached == [0, 0, 64]
    recomputed = running.store.states.stats()["state_recomputed_tokens"]
    assert recomputed == 64  # of the second one


def test_the_same_prompt_computes_its_last_page_alone():
    running = engine()
    prompt = draw(63, 1)
    assert [ask(running, prompt).usage.cached_tokens for _ in range(3)] == [0, 60, 60]


def test_long_prompts_keep_a_state_each_interval():
    prompt = draw(90, 1)
    for interval, cached in ((0, 0), (16, 32)):
        running = engine(mamba_track_interval=interval)
        ask(running, prompt)
        other = [*prompt[:40], *(1 + each % (VOCAB - 1) for each in prompt[40:])]
        assert ask(running, other).usage.cached_tokens == cached


def test_as_many_states_are_kept_as_the_setting_says():
    running = engine(max_mamba_cache_size=3)
    for seed in range(8):
        ask(running, draw(40, seed))
    stats = running.store.states.stats()
    assert stats["states_total"] == 3 + 2 * 2
    assert 0 < stats["states_kept"] <= 3


def test_states_take_a_share_of_the_memory():
    totals = []
    assert "room for 4,000 tokens, 34 states for 2 requests" in repr(engine())
    for ratio in (0.01, 0.02):
        model = loaded(states=True)
        model.model.token_bytes = 64  # so 4,000 tokens take 256,000 bytes
        running = SteppedEngine(
            model=model, max_running=2, max_total_tokens=4000, mamba_full_memory_ratio=ratio
        )
        totals.append(running.store.states.stats()["states_total"])
    assert totals == [160, 320]  # of 16 bytes


def test_a_state_that_saves_more_and_is_used_more_stays():
    running = engine(max_mamba_cache_size=4)
    long = draw(200, 1)
    for i in range(3):
        ask(running, [*long, i + 1])
    for seed in range(10, 16):
        ask(running, draw(12, seed), tokens=1)
    assert ask(running, [*long, 9]).usage.cached_tokens >= 196


def test_a_miss_for_want_of_a_state_is_told():
    running = engine(max_mamba_cache_size=2)
    first = draw(40, 1)
    ask(running, first)
    for seed in range(2, 6):
        ask(running, draw(60, seed))
    result = ask(running, [*first, 5, 6])
    assert result.usage.cached_tokens == 0
    assert running.built[-1].cache.miss.reason == "no_state"


@pytest.mark.parametrize(
    ("settings", "states", "problem"),
    [
        ({"max_mamba_cache_size": 1}, True, "1 states are fewer than the 2 requests"),
        ({"max_mamba_cache_size": -1}, True, "max_mamba_cache_size"),
        ({"max_mamba_cache_size": 8}, False, "the model has no recurrent layers"),
        ({"mamba_ssm_dtype": "float64"}, True, "mamba_ssm_dtype"),
        ({"mamba_track_interval": -1}, True, "mamba_track_interval"),
        ({"mamba_full_memory_ratio": 0}, True, "mamba_full_memory_ratio"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit_are_told(settings, states, problem):
    with pytest.raises(ParameterError, match=problem):
        SteppedEngine(model=loaded(states=states), max_running=2, **settings)
