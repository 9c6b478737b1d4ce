"""Sessions are programs of the scheduler: what they have computed is there when they come back. On
a simulated clock.
"""

import pytest

from sglang_lite.protocol import Generation, RequestAbortedError, SamplingParams
from sglang_lite.runtime.calls import EndSession
from sglang_lite.runtime.core import engine_sessions
from sglang_lite.runtime.core.submission import GenerateRequest
from tests.runtime.scripted import SteppedEngine, answer, ended

CHAT = [1 + i * i % 29 for i in range(80)]
TWO = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


def engine(**config):
    return SteppedEngine(
        **{"max_running": 4, "context_length": 160, "max_total_tokens": 192, **config}
    )


def begin(running, ids, session=None, params=TWO):
    events = []
    return running.core.submit(GenerateRequest(ids, params, session=session), events.append), events


def turn(running, ids, session=None):
    _, events = begin(running, ids, session)
    running.drain()
    result = ended(events)
    assert isinstance(result, Generation)
    assert (list(result.token_ids), result.finish_reason) == answer(ids, TWO)
    return result.usage


def end(running, session):
    done = running.core.submit_call(EndSession(session))
    running.step()
    done.result(0)


def others(running):
    """Two prompts that together need most of the pool."""
    for token in (3, 4):
        assert turn(running, [token] * 90).cached_tokens == 0


def test_a_session_finds_what_it_has_computed_when_others_have_come():
    running = engine()
    turn(running, CHAT)
    others(running)
    assert turn(running, [*CHAT, 5]).cached_tokens == 0  # a client without one
    running = engine()
    turn(running, CHAT, "a")
    others(running)
    assert turn(running, [*CHAT, 5], "a").cached_tokens >= 80
    end(running, "a")
    running.check_empty()


def test_a_sessions_pages_go_to_the_host_and_come_back():
    running = engine(enable_hierarchical_cache=True, hicache_write_policy="write_back", page_size=4)
    turn(running, CHAT, "a")
    for token in (3, 4):
        turn(running, [token] * 150)  # leaves no room for them
    back = turn(running, [*CHAT, 5], "a")
    assert (back.cached_tokens, back.host_tokens > 0) == (80, True)
    end(running, "a")
    running.check_empty()


def test_the_time_until_a_session_comes_back_is_measured():
    running = engine()
    for i in range(4):
        turn(running, CHAT[: 20 * i + 20], "a")
        running.time += 0.25
    (pause,) = running.scheduler.pauses
    assert pause.expected_s == pytest.approx(0.25, abs=0.1)  # 1 s at first
    assert pause.branch.awaits_caller


def test_a_closed_session_keeps_nothing_even_if_it_still_runs():
    running = engine()
    turn(running, CHAT, "a")
    _, events = begin(running, [*CHAT, 5], "a")
    running.step()
    end(running, "a")
    running.drain()
    assert isinstance(ended(events), Generation)
    end(running, "a")  # again, and one that is unknown
    assert not len(running.scheduler.pauses)
    running.check_empty()


def test_two_requests_of_a_session_and_one_that_is_aborted():
    running = engine()
    turn(running, CHAT[:20], "a")
    asked = [begin(running, [*CHAT[:20], i], "a") for i in (5, 6, 7)]
    running.step()
    asked[1][0].abort()
    running.drain()
    assert [type(ended(events)) for _, events in asked] == [
        Generation,
        RequestAbortedError,
        Generation,
    ]
    (pause,) = running.scheduler.pauses
    assert pause.branch.awaits_caller
    end(running, "a")
    running.check_empty()


def test_of_too_many_sessions_the_least_recently_used_is_closed(monkeypatch):
    monkeypatch.setattr(engine_sessions, "MAX_SESSIONS", 2)
    running = engine()
    for session in ("a", "b", "a", "c"):
        turn(running, CHAT[:4], session)
    assert len(running.scheduler.pauses) == 2
    others(running)
    end(running, "a"), end(running, "c")
    assert not len(running.scheduler.pauses)
