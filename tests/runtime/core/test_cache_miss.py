"""Results say why tokens of a prompt were not cached: of requests, programs, selections, and over
HTTP.
"""

import argparse
import queue

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.protocol import Prompt, SamplingParams, Span
from sglang_lite.server import flags
from tests.constraints.test_generation import random_model
from tests.server.conftest import serving

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


@pytest.fixture
def engine():
    with Engine.of(random_model(), max_total_tokens=200, max_running=4, in_process=True) as engine:
        yield engine


def miss(engine, text, **settings):
    done: queue.Queue = queue.Queue()
    engine.submit(Prompt((Span(text),)), ONE, sink=done.put, **settings)
    return done.get(timeout=60).meta.get("cache_miss")


def test_what_no_prompt_began_with_was_never_seen(engine):
    found = miss(engine, "hello there")
    assert (found["reason"], found["at"]) == ("never_seen", 0)
    assert found["now"] == "hello there"[: len(found["now"])] != ""


def test_a_prompt_that_is_cached_has_no_miss(engine):
    assert miss(engine, "hello there") is not None
    assert miss(engine, "hello there") is None


def test_the_engine_counts_the_tokens_of_prompts_and_of_those_that_were_cached(engine):
    @sgl.function
    def program(s, text):
        s += f"hello {text}" + sgl.gen("a", max_tokens=3, ignore_eos=True) + ", and "
        s += sgl.gen("b", max_tokens=2, ignore_eos=True)

    usages = [program.run(text, backend=engine).usage() for text in ("there", "there", "again")]
    results = [engine.complete("hello there", ONE).usage, engine.complete("other", ONE).usage]
    stats = engine.stats()
    assert stats["prompt_tokens"] == sum(each.prompt_tokens for each in [*usages, *results])
    assert (
        stats["prompt_tokens_cached"] == sum(each.cached_tokens for each in [*usages, *results]) > 0
    )


def test_a_longer_prompt_was_never_seen_from_its_end_on(engine):
    miss(engine, "abcdef")
    engine.flush_cache()
    miss(engine, "abcdef")
    found = miss(engine, "abcdefghijkl")
    # the token that was generated may stand there
    assert found["reason"] in ("never_seen", "changed")
    assert found["left"] <= 7


def test_a_changed_text_is_shown_with_what_the_cache_has(engine):
    miss(engine, "the date is 3 May. Answer shortly.")
    found = miss(engine, "the date is 4 May. Answer shortly.")
    assert found["reason"] == "changed"
    assert found["left"] == len("4 May. Answer shortly.")
    assert "is 3 May." in found["before"]
    assert "is 4 May." in found["now"]


def test_what_was_dropped_is_told_to_be_evicted(engine):
    miss(engine, "once there was a cat")
    engine.flush_cache()
    assert miss(engine, "once there was a cat")["reason"] == "evicted"
    assert miss(engine, "zzz")["reason"] == "never_seen"


def test_a_full_pool_evicts(engine):
    first = "the first of many prompts"
    miss(engine, first)
    for i in range(20):
        miss(engine, f"{i} is another prompt of some length")
    assert miss(engine, first)["reason"] == "evicted"


def test_another_namespace_has_it(engine):
    miss(engine, "hello there", namespace="a")
    assert miss(engine, "hello there", namespace="b")["reason"] == "other_namespace"
    assert miss(engine, "hello there", namespace="b") is None


@pytest.mark.parametrize("size", [4, 16])
def test_less_than_a_page_is_not_kept(size):
    with Engine.of(random_model(), max_total_tokens=320, page_size=size, in_process=True) as engine:
        miss(engine, "xy")
        assert miss(engine, "xy")["reason"] == "page"


def test_an_engine_without_a_cache_says_so():
    with Engine.of(random_model(), prefix_cache=False, in_process=True) as engine:
        assert miss(engine, "hello")["reason"] == "disabled"


def test_an_engine_of_several_tells_nothing_of_others_prompts():
    with Engine.of(random_model(), explain_cache_misses=False, in_process=True) as engine:
        miss(engine, "the date is 3 May.")
        found = miss(engine, "the date is 4 May.")
        assert found["reason"] == "changed"
        assert "before" not in found
        assert miss(engine, "the date is 3 May.", namespace="b")["reason"] == "never_seen"


def test_a_server_tells_of_others_prompts_only_if_it_is_told_to():
    parser = argparse.ArgumentParser()
    flags.add_serve_flags(parser)
    told = [
        flags.read_serve_flags(parser.parse_args(given))[1]["explain_cache_misses"]
        for given in ([], ["--explain-cache-misses"])
    ]
    assert told == [False, True]


@sgl.function
def program(s, day):
    s += "the date is " + day
    s += sgl.gen("a", max_tokens=2, ignore_eos=True)
    s += sgl.select("b", ["yes", "no"])


@pytest.mark.parametrize("how", [{}, {"push_down": False}])
@pytest.mark.parametrize("over_http", [False, True])
def test_a_programs_trace_has_the_reasons_and_what_was_cached(engine, how, over_http):
    with serving(engine) as url:
        backend = sgl.RuntimeEndpoint(url, retries=0) if over_http else LocalBackend(engine)
        program.run("3 May, and cold.", backend=backend, **how).sync()
        trace = program.run("4 May, and cold.", backend=backend, **how).trace()
        if over_http:
            backend.shutdown()
    text, gen, _ = trace.nodes
    assert gen.miss.reason == "changed"
    assert "is 3 May" in gen.miss.before
    assert "is 4 May" in gen.miss.now
    assert text.pieces == (("the date is ", "cached"), ("4 May, and cold.", "constant"))
    again = program.run("4 May, and cold.", backend=LocalBackend(engine), **how).trace()
    assert again.nodes[0].pieces == (("the date is 4 May, and cold.", "cached"),)


def test_a_selections_prompt_has_a_reason_too(engine):
    @sgl.function
    def choose(s, text):
        s += text
        s += sgl.select("x", ["yes", "no"])

    choose.run("is it so? ", backend=LocalBackend(engine)).sync()
    text, select = choose.run("is it not? ", backend=LocalBackend(engine)).trace().nodes
    assert select.miss.reason == "changed"
    assert text.cached == len("is it ")


def test_forced_text_is_told(engine):
    @sgl.function
    def forced(s):
        s += "x"
        s += sgl.gen("a", regex="The answer is (yes|no), of course\\.")

    trace = forced.run(backend=LocalBackend(engine), push_down=False).trace()
    gen = trace.nodes[-1]
    pieces = [text for text, origin in gen.pieces if origin == "forced"]
    assert "".join(text for text, _ in gen.pieces) == gen.text
    assert gen.usage.forced_tokens > 10
    assert "".join(pieces).startswith("The answer is ")
    assert len("".join(pieces)) >= len("The answer is , of course.") - 6
