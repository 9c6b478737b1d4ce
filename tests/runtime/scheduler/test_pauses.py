"""Programs that pause keep their prefixes, wait whole, and give way in order. On a simulated clock;
tokens are counted.
"""

import gc
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.program.nodes import Fork, Gen, Text
from sglang_lite.protocol import Generation, Played, ProgramResult, SamplingParams
from sglang_lite.runtime.scheduler.pauses import ExpectedGrowth, PausedBranch, peak_growth
from tests.runtime import scripted
from tests.runtime.agents import Agent, Simulated, Turn, furthest
from tests.runtime.scripted import ended


def greedy(tokens):
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def letters(seed, count):
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=count))


def traces(agents=6, turns=4, first=150, reads=20, writes=12, pause=0.7):
    """Turns of agents; each number differs by up to a half."""
    draw = random.Random(0)

    def about(number):
        return max(round(number * draw.uniform(0.5, 1.5)), 1)

    return [
        [
            Turn(about(reads if i else first), about(writes), pause * draw.uniform(0.5, 1.5))
            for i in range(turns)
        ]
        for _ in range(agents)
    ]


def played(turns, pool, **config):
    engine = Simulated(
        **{"max_running": 8, "context_length": 512, "max_total_tokens": pool, **config}
    )
    agents = [Agent(i, each) for i, each in enumerate(turns)]
    engine.simulate(agents)
    engine.check_empty()
    return engine, agents


TRACES = traces()
NEEDED = sum(turn.reads + turn.writes for turns in TRACES for turn in turns)


@pytest.fixture(scope="module")
def roomy():
    return played(TRACES, 4 * NEEDED)


@pytest.mark.parametrize(("share", "bound"), [(1.5, 1.15), (3, 1.4)])
def test_agents_compute_little_again_in_a_part_of_the_memory_they_need(roomy, share, bound):
    pool = round(NEEDED / share)
    engine, agents = played(TRACES, pool, page_size=4, checks=True)
    assert engine.computed <= bound * NEEDED
    # what the best cache computes if all come at once
    assert engine.computed <= furthest(roomy[0].accesses, pool)
    assert [agent.result.text for agent in agents] == [agent.result.text for agent in roomy[1]]


def test_pauses_that_ended_in_roomy_memory_keep_no_program():
    """Nothing is given up there, so nobody asks whose pause is too long."""
    engine, _ = played(traces(agents=60, turns=6, first=4, reads=2, writes=1), 10_000)
    gc.collect()
    assert sum(type(each) is PausedBranch for each in gc.get_objects()) <= 100
    engine.check_empty()


@pytest.fixture
def busy(monkeypatch):
    """Runs agents of an 8B model on an H200, with a tenth of the tokens, each of which takes ten
    times as long.
    """
    monkeypatch.setattr(scripted, "STEP_S", 0.06)
    monkeypatch.setattr(scripted, "TOKEN_S", 0.00026)
    turns = traces(agents=24, turns=5, first=70, reads=70, writes=6)
    needed = sum(turn.reads + turn.writes for each in turns for turn in each)

    def run(share, **config):
        """Computed over needed tokens, seconds and texts, in memory for a share of the tokens."""
        sizes = {"max_running": 32, "context_length": 1024, "page_size": 2, "step_tokens": 819}
        engine, agents = played(
            turns, int(share * needed), model=scripted.loaded(1024), **sizes, **config
        )
        return engine.computed / needed, engine.time, [agent.result.text for agent in agents]

    return run


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_with_a_host_tier_agents_take_little_longer_than_in_room_for_all(policy, busy):
    _, roomy_s, texts = busy(2)
    again, seconds, told = busy(
        1 / 2, enable_hierarchical_cache=True, hicache_ratio=3.0, hicache_write_policy=policy
    )
    assert again <= 1.05
    assert seconds <= 1.2 * roomy_s  # steps are ten times as coarse as theirs
    assert told == texts


def test_a_host_tier_that_is_too_small_for_all_agents_helps_those_that_fit(busy):
    again, seconds, _ = busy(1 / 4, enable_hierarchical_cache=True, hicache_ratio=2.0)
    again_without, seconds_without, _ = busy(1 / 4)
    assert again < again_without
    assert seconds < 0.9 * seconds_without


def test_the_best_cache_is_what_it_is_called():
    """Three of ten tokens each in turn, in room for two: of each round one stays, and half of
    another.
    """
    rounds = [("a", 10), ("b", 10), ("c", 10)] * 4
    assert furthest(rounds, 30) == 30
    assert furthest(rounds, 10) == 120
    assert 30 < furthest(rounds, 20) < 120


def test_of_programs_that_are_known_to_grow_no_more_begin_than_can_end():
    turns = traces(agents=12, turns=8, first=20, reads=20, writes=4)
    needed = sum(turn.reads + turn.writes for each in turns for turn in each)
    engine, _ = played(turns, needed // 2)
    again = [Agent(100 + i, each) for i, each in enumerate(turns)]
    engine.computed = 0
    engine.simulate(again)
    assert engine.computed <= 1.1 * needed


def test_the_program_that_came_first_keeps_all_it_has():
    _, agents = played([[Turn(30, 8, 0.7)] * 4] * 5, 200)
    usages = agents[0].usages
    assert all(later.cached_tokens >= earlier.prompt_tokens for earlier, later in pairwise(usages))
    assert agents[0].ended == min(agent.ended for agent in agents)


def paused(engine, text, name="a", tokens=4):
    """A program that pauses after a generation, and its events."""
    events = []
    program = engine.open_program(sink=events.append)
    program.extend((), (Text(text), Gen(name, greedy(tokens))))
    engine.drain()
    return program, events


def returned(engine, program, events, text="zz"):
    """Usage and miss of its next generation."""
    program.extend((), (Text(text), Gen("b", greedy(2))))
    program.close()
    engine.simulate([])
    assert isinstance(events[-1], ProgramResult)
    generation = [
        e.event for e in events if isinstance(e, Played) and isinstance(e.event, Generation)
    ][-1]
    return generation.usage, generation.meta.get("cache_miss")


def test_a_program_that_pauses_for_ever_stays_right_and_keeps_nobody_waiting():
    engine = Simulated(checks=True, max_running=4, context_length=128, max_total_tokens=128)
    program, events = paused(engine, letters(0, 90))
    engine.time += 1000
    _, others = engine.start(letters(1, 100), greedy(8))
    engine.simulate([])
    assert isinstance(ended(others), Generation)
    usage, miss = returned(engine, program, events)
    assert usage.cached_tokens < 30
    assert miss["reason"] == "paused"
    engine.check_empty()


def test_those_give_way_that_have_been_seen_to_return_late():
    engine = Simulated(max_running=4, context_length=256, max_total_tokens=256)
    for _ in range(3):
        program, events = paused(engine, letters(0, 30), "slow")
        engine.time += 100
        returned(engine, program, events)
    engine.scheduler.end_pauses_and_flush()
    slow, quick = paused(engine, letters(1, 100), "slow"), paused(engine, letters(2, 100), "quick")
    busy = engine.start([1, 2, 3], greedy(20))[1]
    engine.step()
    engine.start(letters(3, 100), greedy(2))
    engine.simulate([])
    assert isinstance(ended(busy), Generation)
    assert returned(engine, *quick)[0].cached_tokens >= 100
    assert returned(engine, *slow)[0].cached_tokens < 80


@pytest.mark.parametrize("told", ["at once", "later", "before", "and was wrong"])
def test_those_give_way_whose_callers_told_that_they_return_late(told):
    engine = Simulated(max_running=4, context_length=256, max_total_tokens=256)
    (slow, slow_events), (quick, quick_events) = (paused(engine, letters(i, 60)) for i in (1, 2))
    if told == "before":
        slow.extend((), (Text("z"), Gen("a", greedy(4))))
        slow.expect_pause((), 50)
        engine.drain()
    elif told == "later":
        engine.time += 1
        slow.expect_pause((), 50)
    elif told == "at once":
        slow.expect_pause((), 50)
    else:  # it tells again
        slow.expect_pause((), 50)
        engine.drain()
        for program in (slow, quick):
            program.expect_pause((), 50 if program is quick else 0.5)
        slow, slow_events, quick, quick_events = quick, quick_events, slow, slow_events
    busy = engine.start([1, 2, 3], greedy(20))[1]
    engine.step()
    engine.start(letters(3, 150), greedy(2))
    engine.simulate([])
    assert isinstance(ended(busy), Generation)
    assert returned(engine, quick, quick_events)[0].cached_tokens >= 60
    assert returned(engine, slow, slow_events)[0].cached_tokens < 50


def test_a_pause_of_a_branch_that_is_none_changes_nothing():
    engine = Simulated(max_running=4, context_length=256, max_total_tokens=256)
    program, events = paused(engine, letters(1, 60))
    program.expect_pause((7, 0), 50)
    program.close()
    program.expect_pause((), 50)
    engine.drain()
    assert isinstance(events[-1], ProgramResult)
    program.expect_pause((), 50)
    engine.drain()
    engine.check_empty()


def test_what_forks_begin_with_is_kept_once():
    engine = Simulated(checks=True, max_running=8, context_length=256, max_total_tokens=256)
    events = []
    program = engine.open_program(sink=events.append)
    program.extend((), (Text(letters(0, 120)), Fork(((Gen("x", greedy(4)),),) * 6)))
    engine.drain()
    assert len(engine.scheduler.pauses) == 6
    assert engine.store.tree.locked_pages <= 120 + 6 * 4
    # most branches are not continued once their parent is
    program.extend((), (Text("z"), Gen("y", greedy(2))))
    engine.drain()
    assert len(engine.scheduler.pauses) == 1
    program.abort()
    engine.drain()
    assert not len(engine.scheduler.pauses)
    engine.check_empty()


def test_a_program_that_needs_more_than_the_pool_has_the_answers_of_a_roomy_one():
    answers = []
    for pool in (4096, 160):
        engine = Simulated(checks=True, max_running=8, context_length=128, max_total_tokens=pool)
        events = []
        program = engine.open_program(sink=events.append)
        branches = tuple((Text(letters(i, 20)), Gen("x", greedy(20))) for i in range(8))
        program.extend((), (Text(letters(99, 60)), Fork(branches)))
        program.close()
        _, others = engine.start(letters(100, 20), greedy(8))
        engine.simulate([])
        assert isinstance(events[-1], ProgramResult)
        assert isinstance(ended(others), Generation)
        answers.append(
            sorted(
                e.event.text
                for e in events
                if isinstance(e, Played) and isinstance(e.event, Generation)
            )
        )
        engine.check_empty()
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


def test_programs_without_an_end_do_not_keep_others_out_for_ever():
    engine = Simulated(max_running=4, context_length=256, max_total_tokens=200)
    endless = [Agent(i, [Turn(50, 2, 3.0), *[Turn(0, 1, 3.0)] * 40]) for i in range(2)]
    late = Agent(9, [Turn(60, 4, 0.1)] * 2, at=5.0)
    engine.simulate([*endless, late])
    assert late.ended < min(agent.ended for agent in endless)
    assert late.ended > 5 + 60
    engine.check_empty()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_the_peak_is_the_most_that_there_is_at_any_time(branches):
    most = 0
    for now in range(31):
        most = max(
            most, sum(min(now, growth) if now <= growth else -length for length, growth in branches)
        )
    assert peak_growth([ExpectedGrowth((0, 0), *branch) for branch in branches]) == most


@pytest.mark.parametrize("seed", range(4))
def test_random_agents_in_small_pools_end_with_the_same_texts(seed):
    draw = random.Random(seed)
    turns = [
        [
            Turn(draw.randrange(1, 20), draw.randrange(1, 6), draw.choice([0, 0.1, 3, 40]))
            for _ in range(4)
        ]
        for _ in range(8)
    ]
    texts = []
    for pool in (4096, 110):
        _, agents = played(
            turns, pool, checks=True, max_running=draw.choice([1, 3, 8]), page_size=draw.choice([1, 2, 4]),
            policy=draw.choice(["lpm", "fcfs", "priority"]), overlap=draw.random() < 0.5, retract_every=7 * (seed % 2),
            context_length=110,
        )  # fmt: skip
        texts.append([agent.result.text for agent in agents])
    assert texts[0] == texts[1]
