"""What comes up from lower tiers before it is needed, and only once. On a simulated clock; pages
are counted.
"""

import random

from sglang_lite.program.nodes import Gen, Text
from sglang_lite.protocol import Generation, SamplingParams
from tests.runtime.agents import Simulated
from tests.runtime.scripted import SteppedEngine, ended, loaded

LONG = [1 + i * i % 29 for i in range(600)]
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 4, "page_size": 4}


def greedy(tokens):
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def letters(seed, count):
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=count))


def away(engine, others):
    """A program that pauses, whose pages others take meanwhile."""
    events = []
    program = engine.open_program(sink=events.append)
    program.extend((), (Text(letters(0, 100)), Gen("a", greedy(4))))
    engine.drain()
    for i in range(others):
        engine.start(letters(i + 1, 120), greedy(2))
    engine.drain()
    (pause,) = engine.scheduler.pauses
    assert pause.pages > 0
    return program, events, pause


def cached(engine, pause):
    return len(engine.store.tree.match_prefix(pause.tokens, "").pages) * 4


def test_what_a_program_gave_up_is_back_when_it_returns():
    engine = Simulated(
        checks=True, max_running=4, context_length=256, max_total_tokens=256, **TIERS
    )
    program, events, pause = away(engine, 4)
    assert cached(engine, pause) < 100
    program.expect_pause((), 2.0)
    engine.start([1, 2], greedy(5))
    engine.drain()
    assert cached(engine, pause) < 100  # it is not expected soon
    engine.time = pause.began + pause.expected_s - 0.2
    engine.start([1, 2], greedy(20))
    engine.drain()
    assert cached(engine, pause) == 100
    assert pause.pages == 0
    program.extend((), (Text("zz"), Gen("b", greedy(2))))
    program.close()
    engine.drain()
    usages = [e.event.usage for e in events if isinstance(getattr(e, "event", None), Generation)]
    assert (usages[1].cached_tokens, usages[1].host_tokens) == (100, 0)  # whole pages
    engine.check_empty()


def test_nothing_is_prefetched_into_pages_that_are_short():
    engine = Simulated(
        checks=True, max_running=4, context_length=256, max_total_tokens=256, **TIERS
    )
    program, _, pause = away(engine, 4)
    engine.start(letters(9, 200), greedy(20))
    for _ in range(10):
        engine.step()
    assert pause.pages > 0
    program.abort()
    engine.drain()
    engine.check_empty()


def test_files_are_read_while_a_request_waits_for_its_turn(tmp_path):
    sizes = {
        "max_running": 1,
        "context_length": 700,
        "max_total_tokens": 1024,
        "model": loaded(1024),
    }
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path)}
    first = SteppedEngine(**sizes, **TIERS, **files)
    first.start(LONG, greedy(2))
    first.drain()
    engine = SteppedEngine(**sizes, **TIERS, **files)
    _, busy = engine.start([1, 2, 3], greedy(30))
    engine.step()
    _, events = engine.start(LONG, greedy(2))
    for _ in range(4):
        engine.step()
    assert busy == []
    assert engine.store.source.read_pages == 512 // 4
    engine.drain()
    usage = ended(events).usage
    assert (usage.cached_tokens, usage.disk_tokens) == (512, 512)
    engine.check_empty()


def test_what_many_requests_begin_with_comes_up_once():
    engine = SteppedEngine(max_running=8, context_length=256, max_total_tokens=512, **TIERS)
    stem = LONG[:100]
    for prompt in (stem, *([i, *LONG[:180]] for i in range(1, 9))):
        engine.start(prompt, greedy(2))
        engine.drain()
    told = [engine.start([*stem, i, i], greedy(2))[1] for i in range(1, 9)]
    engine.drain()
    assert all(ended(events).usage.cached_tokens == 100 for events in told)
    assert engine.store.source.fetched_pages == 100 // 4
