"""Limits on how much a provider is asked: declared, and heard."""

import asyncio
import email.utils
import gc
import itertools
from types import SimpleNamespace

import pytest
from openai_answers import ask, failure, said

import sglang_lite as sgl
from sglang_lite.lang.backend.http.rate_limit import RateLimit, retry_after, shared_limit
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.execution import retries
from sglang_lite.protocol import Generation
from sglang_lite.testing import rate_limit

pytestmark = pytest.mark.usefixtures("either_client")


@sgl.function
def hello(s):
    s += sgl.user("Hi") + sgl.assistant(sgl.gen("a"))


class Clock:
    """Time that passes only while somebody waits for it."""

    def __init__(self):
        self.now, self.waits = 1000.0, []

    async def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def limited(clock, **limits):
    return RateLimit(**limits, now=lambda: clock.now, sleep=clock.sleep)


def times(limit, clock, calls, tokens=0.0):
    """When each of the calls may be made, in seconds."""

    async def each():
        found = []
        for _ in range(calls):
            await limit.wait(tokens)
            found.append(clock.now - 1000)
        return found

    return asyncio.run(each())


def test_calls_beyond_the_limit_wait_for_their_share_of_a_minute():
    clock = Clock()
    assert times(limited(clock, requests_per_minute=3), clock, 6) == pytest.approx(
        [0, 0, 0, 20, 40, 60]
    )
    clock = Clock()
    limit = limited(clock, tokens_per_minute=600)
    assert times(limit, clock, 4, tokens=300) == pytest.approx([0, 0, 30, 60])


def test_what_never_fits_waits_for_a_full_bucket_and_no_longer():
    clock = Clock()
    assert times(limited(clock, tokens_per_minute=60), clock, 2, tokens=10**9) == pytest.approx(
        [0, 60]
    )


def test_calls_that_are_given_up_leave_their_share_to_others():
    clock = Clock()
    limit = limited(clock, requests_per_minute=3, tokens_per_minute=600)

    async def never(_):
        await asyncio.Event().wait()

    async def given_up():
        waiting = [asyncio.ensure_future(limit.wait(200)) for _ in range(100)]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        return sum(not each.cancelled() for each in waiting)

    limit.sleep = never
    assert asyncio.run(given_up()) == 3
    limit.sleep = clock.sleep
    assert times(limit, clock, 2, tokens=200) == pytest.approx([20, 40])


def test_without_a_limit_nothing_waits():
    clock = Clock()
    assert times(limited(clock), clock, 1000, tokens=1e6)[-1] == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "1"},
        {"anthropic-ratelimit-requests-limit": "60", "anthropic-ratelimit-requests-remaining": "1"},
    ],
)
def test_limits_are_heard_in_headers(headers):
    clock = Clock()
    limit = limited(clock)
    limit.update_from_response(200, headers)
    assert times(limit, clock, 3) == pytest.approx([0, 1, 2])


def test_a_declared_limit_wins_over_a_heard_one():
    clock = Clock()
    limit = limited(clock, requests_per_minute=1)
    limit.update_from_response(200, {"x-ratelimit-limit-requests": "6000"})
    assert times(limit, clock, 2) == pytest.approx([0, 60])


def test_an_overloaded_provider_is_left_alone_for_as_long_as_it_asks():
    clock = Clock()
    limit = limited(clock)
    limit.update_from_response(429, {"retry-after": "7"})
    assert times(limit, clock, 2) == pytest.approx([7, 7])
    limit.update_from_response(200, {"retry-after": "7"})
    assert times(limit, clock, 1) == pytest.approx([7])


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2"}, 2),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "999999"}, 600),
        # long ago: a clock that jumped
        ({"retry-after": email.utils.formatdate(0, usegmt=True)}, 0),
        (
            {
                "retry-after": email.utils.formatdate(1030, usegmt=True),
                "date": email.utils.formatdate(1000, usegmt=True),
            },
            30,
        ),
        ({"retry-after": email.utils.formatdate(0), "date": "yesterday"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
    ],
)
def test_what_a_header_asks_for_is_read_or_left(headers, seconds):
    assert retry_after(headers) == seconds


def test_headers_that_are_nonsense_change_nothing():
    clock = Clock()
    limit = limited(clock)
    limit.update_from_response(
        200, {"x-ratelimit-limit-requests": "many", "x-ratelimit-remaining-requests": "-5"}
    )
    limit.update_from_response(200, {"x-ratelimit-limit-requests": "0"})
    assert times(limit, clock, 3)[-1] == 0


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "9"])
def test_a_limit_that_is_none_is_refused(value):
    with pytest.raises(sgl.ParameterError, match="requests_per_minute"):
        RateLimit(requests_per_minute=value)


def test_backends_of_one_server_and_key_share_a_limit():
    one, other = shared_limit("s", "key"), shared_limit("s", "key")
    assert one is other
    assert shared_limit("s", "other key") is not one
    del one, other
    gc.collect()
    assert shared_limit("s", "key") is not None


def test_a_backend_waits_and_says_so(api, openai):
    clock = Clock()
    limit = limited(clock, requests_per_minute=1)
    api.answers = [said("x")]
    backend = openai(rate_limit=limit)
    assert ask(backend) == "x"
    assert not clock.waits

    @sgl.function
    def program(s):
        s += sgl.user("Hi")
        s += sgl.assistant(sgl.gen("a"))

    meta = program.run(backend=backend).get_meta_info("a")
    assert clock.waits == [pytest.approx(60)]
    assert meta["waited_s"] == pytest.approx(60)


def test_a_retry_of_the_sdk_is_heard_and_holds_the_others(api, openai):
    clock = Clock()
    limit = limited(clock)
    api.answers = [failure(429, "Slow down", **{"Retry-After": "0.01"}), said("x")]
    backend = openai(rate_limit=limit, max_retries=1)
    assert ask(backend) == "x"
    ask(backend)
    assert clock.waits == [pytest.approx(0.01)]


def test_an_error_says_when_to_come_back(api, openai):
    api.answers = [failure(429, "Slow down", **{"Retry-After": "0.3"})]
    with pytest.raises(sgl.OverloadedError) as caught:
        ask(openai())
    assert caught.value.retry_after == 0.3
    api.answers = [failure(429, "Slow down")]
    with pytest.raises(sgl.OverloadedError) as caught:
        ask(openai())
    assert caught.value.retry_after is None


def test_a_limit_of_another_type_is_refused():
    with pytest.raises(sgl.ParameterError, match="rate_limit"):
        OpenAI("gpt-4o", api_key="k", rate_limit=60)  # type: ignore[arg-type] # what is refused


class Busy(sgl.BaseBackend):
    """Is busy at first, and says for how long."""

    def __init__(self, *seconds):
        super().__init__()
        self.chat_template = get_chat_template("chatml")
        self._seconds = list(seconds)

    async def agenerate(self, prompt, params, constraint, *, stream):
        if self._seconds:
            error = sgl.OverloadedError("busy")
            error.retry_after = self._seconds.pop(0)
            raise error
        yield Generation("x")


@pytest.fixture
def pauses(monkeypatch):
    """Pauses between attempts, which nobody waits for."""
    found = []

    async def sleep(seconds):
        found.append(seconds)

    monkeypatch.setattr(retries, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return found


def test_retries_pause_for_as_long_as_the_provider_asks(pauses):
    state = hello.run(backend=Busy(7, 0.001, None), retries=3)
    assert state["a"] == "x"
    assert pauses == [7, 0.2, 0.4]  # at least as long as ever


def test_what_is_asked_for_beyond_the_timeout_is_not_waited_for(pauses):
    with pytest.raises(sgl.OverloadedError, match="busy") as caught:
        hello.run(backend=Busy(600), retries=3, timeout=300)["a"]
    assert "after 600 s, but the run's timeout ends before that" in caught.value.hint
    assert pauses == []


def test_a_clock_that_is_set_changes_nothing(api, openai, monkeypatch):
    """Code that waits or has a limit looks at no clock that can be set."""
    jumps = itertools.cycle([0.0, 4e9, 1e9, -4e9])
    monkeypatch.setattr("time.time", lambda: next(jumps))
    api.answers = lambda request: (
        rate_limit(retry_after=0.001) if len(api.requests) % 2 else "an answer"
    )
    backend = openai(rate_limit=RateLimit(requests_per_minute=60_000), max_retries=1, timeout=30)
    for stream in (False, True):
        state = hello.run(backend=backend, stream=stream, timeout=30)
        assert "".join(state.text_iter("a")) == state["a"] == "an answer"
        assert 0 <= state.usage().total_s < 30
