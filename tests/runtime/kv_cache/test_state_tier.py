"""States below the device: pages and their state come back together, and every answer is that of
the whole text.
"""

import random

import pytest

from sglang_lite.protocol import Generation, SamplingParams
from sglang_lite.runtime.calls import Stats
from tests.counts import some
from tests.runtime.scripted import VOCAB, Guesses, SteppedEngine, answer, ended, loaded

POLICIES = ["write_through", "write_through_selective", "write_back"]
ACTIONS = some(40, 2000)  # requests of each case


def engine(**config):
    sizes = {
        "max_running": 2,
        "context_length": 200,
        "max_total_tokens": 240,
        "page_size": 4,
        "max_mamba_cache_size": 10,
        "hicache_ratio": 8,
    }
    made = {"model": loaded(states=True), "enable_hierarchical_cache": True}
    return SteppedEngine(**{**made, **sizes, **config})


def draw(count, seed):
    made = random.Random(seed)
    return [made.randrange(1, VOCAB) for _ in range(count)]


def ask(running, prompt, tokens=1):
    params = SamplingParams(max_tokens=tokens, temperature=0)
    _, events = running.start(prompt, params)
    running.drain()
    result = ended(events)
    assert list(result.token_ids) == answer(prompt, params)[0]
    return result


def cached(running, prompt):
    return ask(running, prompt).usage.cached_tokens


@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_answers_are_those_of_a_cache_that_never_forgets(policy, seed):
    rng = random.Random(seed)
    running = engine(
        hicache_write_policy=policy, page_size=rng.choice([1, 4, 16]), hicache_ratio=rng.choice([0.1, 0.5, 4]),
        max_running=4, max_total_tokens=rng.choice([200, 320]), max_mamba_cache_size=rng.choice([4, 6, 20]),
        mamba_track_interval=rng.choice([0, 16]), late=lambda: rng.random() < 0.4, seed=seed,
        overlap=rng.random() < 0.5, retract_every=rng.choice([0, 0, 3]),
        drafter=rng.choice([None, Guesses(0.8)]), step_tokens=rng.choice([8, 1000]),
    )  # fmt: skip
    stems = [draw(100, 100 * seed + i) for i in range(6)]
    requests = []
    for i in range(ACTIONS):
        ids = [*rng.choice(stems)[: rng.randrange(1, 100)], *draw(rng.randrange(6), i)]
        params = SamplingParams(
            max_tokens=rng.randrange(10), temperature=float(rng.random() < 0.5), seed=i
        )
        namespace = rng.choice(["", "a"])
        requests.append((*running.start(ids, params, namespace=namespace), ids, params))
        for _ in range(rng.randrange(8)):
            running.step()
        if rng.random() < 0.1:
            rng.choice(requests)[0].abort()
        if rng.random() < 0.02:
            running.scheduler.end_pauses_and_flush(keep=rng.random() < 0.5)
    running.drain()
    for _, events, ids, params in requests:
        result = ended(events)
        if isinstance(result, Generation):
            assert (list(result.token_ids), result.finish_reason) == answer(
                ids, params, params.seed
            )
    running.check_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_left_the_device_comes_back_with_its_state(policy):
    running = engine(hicache_write_policy=policy)
    prompts = [draw(100, seed) for seed in range(5)]
    for prompt in prompts:
        ask(running, prompt)
        ask(running, prompt)  # used again
    assert [cached(running, prompt) for prompt in prompts] == [96] * 5
    assert running.built[-1].cache.host_tokens == 96
    stats = running.core.submit_call(Stats())
    running.step()
    assert stats.result()["host_states_fetched"] >= 4
    assert stats.result()["host_states_total"] == 8 * 10
    assert 5 <= stats.result()["host_states_kept"] <= stats.result()["host_states_total"]
    running.check_empty()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_state_comes_back_to_pages_that_never_left(policy):
    running = engine(hicache_write_policy=policy, max_mamba_cache_size=2, max_total_tokens=2000)
    first = draw(100, 1)
    ask(running, first)
    for seed in range(2, 8):
        ask(running, draw(60, seed))
    assert cached(running, [*first, 1]) >= 96
    assert running.store.source.fetched_pages == 0
    assert running.store.source.states.fetched == 1


def test_pages_without_a_state_are_not_fetched():
    running = engine()
    prompts = [draw(100, seed) for seed in range(5)]
    for prompt in prompts:
        ask(running, prompt)
    other = [*prompts[0][:60], *draw(40, 9)]
    assert cached(running, other) == 0
    assert running.store.source.fetched_pages == 0


def test_pages_are_fetched_up_to_their_last_state():
    running = engine(mamba_track_interval=16)
    prompts = [draw(100, seed) for seed in range(5)]
    for prompt in prompts:
        ask(running, prompt)
    assert cached(running, [*prompts[0][:60], *draw(40, 9)]) == 48
    assert running.store.source.fetched_pages == 48 // 4


@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_with_room_for_one_state_keeps_the_last_one(policy):
    running = engine(
        hicache_write_policy=policy, max_mamba_cache_size=2, hicache_ratio=0.5, max_total_tokens=400
    )
    for seed in range(6):
        prompt = draw(100, seed)
        ask(running, prompt)
        ask(running, prompt)
    assert running.store.source.stats()["host_states_total"] == 1
    assert cached(running, draw(100, 5)) == 96
    running.check_empty()


def test_a_chat_goes_on_from_the_host_where_its_last_answer_ended():
    running = engine()
    histories = [draw(40, seed) for seed in range(4)]
    for turn in range(3):
        for i, history in enumerate(histories):
            result = ask(running, history, tokens=30)
            answered = len(history) - 8
            assert not turn or result.usage.cached_tokens >= (answered - 1) // 4 * 4
            histories[i] = [*history, *result.token_ids, *draw(8, turn)]
    assert running.store.source.states.fetched == 4 * 2


def test_a_flush_forgets_the_hosts_states():
    running = engine()
    prompt = draw(100, 1)
    ask(running, prompt)
    running.scheduler.end_pauses_and_flush()
    assert running.store.source.stats()["host_states_kept"] == 0
    assert cached(running, prompt) == 0


@pytest.mark.parametrize(
    ("settings", "pages", "states"),
    [
        ({"hicache_ratio": 3}, 180, 30),
        ({"hicache_ratio": 0.01}, 1, 1),
        # 2/3 GB in pages of 4 MB, 1/3 GB in states of 16 MB
        ({"hicache_size": 1, "mamba_full_memory_ratio": 0.5}, 158, 19),
    ],
)
def test_the_host_has_room_for_pages_and_for_states(settings, pages, states):
    model = loaded(states=True)
    model.model.token_bytes, model.model.state_bytes = 1 << 20, 1 << 24
    running = engine(model=model, **settings)
    stats = running.store.source.stats()
    assert f"14 states for 2 requests, {states} states on the host" in repr(running)
    assert (stats["host_total_tokens"] // 4, stats["host_states_total"]) == (pages, states)
