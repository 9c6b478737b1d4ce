"""Settings of an engine whose effect its answers and counts show."""

import warnings

import sglang_lite as sgl
from tests.runtime.thinkers import thinker


def engine(**settings):
    return sgl.Engine.of(thinker("abcdefghij.", starts=False), **settings)


def drawn(**settings):
    with engine(**settings) as small:
        return small.generate("x", {"temperature": 50, "max_new_tokens": 30, "ignore_eos": True})["output_ids"]


def test_engines_of_a_seed_draw_the_same():
    assert drawn(seed=3) == drawn(seed=3)


def test_a_cache_has_as_much_room_as_the_engine_is_told():
    with engine(max_total_tokens=512) as small:
        assert small.stats()["total_tokens"] == 512


def test_an_engine_has_the_name_that_it_is_given():
    with engine(served_model_name="mine") as small:
        assert small.model_name == "mine"


def test_a_prompt_takes_as_many_steps_as_it_has_parts():
    with engine(step_tokens=16) as small:
        before = small.stats()["steps"]
        small.generate("ab" * 80, {"max_new_tokens": 1})
        assert small.stats()["steps"] - before >= 10


def test_priorities_count_under_their_policy():
    with engine(policy="priority") as small, warnings.catch_warnings():
        warnings.simplefilter("error")
        small.generate("x", {"max_new_tokens": 1}, priority=1)
