"""Settings of an engine whose effect its answers and counts show."""

import logging
import os
import warnings

import pytest
import torch

import sglang_lite as sgl
from tests.engine.collector import Collector
from tests.engine.conftest import SETTINGS
from tests.runtime.scripted import loaded
from tests.runtime.thinkers import thinker

FOUR = sgl.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LONG = [1 + i * i % 30 for i in range(300)]


def engine(**settings):
    return sgl.Engine.of(thinker("abcdefghij.", starts=False), **settings)


def drawn(**settings):
    with engine(**settings) as small:
        return small.generate("x", {"temperature": 50, "max_new_tokens": 30, "ignore_eos": True})[
            "output_ids"
        ]


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


def steps_of(prompts, params, **settings):
    """Number of steps that some requests at once take."""
    with engine(**settings) as small:
        before = small.stats()["steps"]
        small.generate(prompts, params)
        return small.stats()["steps"] - before


def test_as_many_requests_run_at_once_as_the_engine_is_told():
    params = {"max_new_tokens": 20, "ignore_eos": True}
    assert steps_of(["x"] * 3, params, max_running=1) >= 60


def test_as_many_requests_wait_as_the_engine_is_told():
    params = sgl.SamplingParams(max_tokens=1500, ignore_eos=True)
    with (
        engine(max_running=1, max_queued=2) as small,
        pytest.raises(sgl.OverloadedError, match="max_queued"),
    ):
        for _ in range(12):
            small.submit("x", params, sink=lambda event: None)


def cached(small, letter):
    """Number of cached tokens of a prompt that is asked again and again."""
    return small.generate(letter * 20, {"max_new_tokens": 1})["meta_info"]["cached_tokens"]


def test_the_prefix_that_came_first_gives_way_if_the_engine_is_told_so():
    """Of the first one, which was used again, and the second one."""
    with engine(eviction="fifo", max_total_tokens=64) as small:
        for letter in "deded":
            cached(small, letter)
        small.generate("g" * 30, {"max_new_tokens": 1})
        assert cached(small, "e") > cached(small, "d")


def test_forced_text_takes_a_step_a_token_if_the_engine_is_told_so():
    params = {"regex": "The river runs to the sea", "max_new_tokens": 40}
    assert steps_of("x", params, jump_forward="off") >= 25


def test_without_overlap_no_step_follows_the_end():
    params = {"max_new_tokens": 40, "temperature": 0}  # the answer is ABC, and its end
    assert steps_of("x", params, overlap=False) < steps_of("x", params, overlap=True)


def noted(running, note):
    """What a function of this process gives at each draw of an engine."""
    found, sink = [], Collector()

    def processor(ids, logits):
        found.append(note())
        return logits

    running.submit("ab", FOUR, logit_processor=processor, sink=sink)
    sink.end()
    return found


def test_an_engine_in_this_process_calls_functions_of_this_process(here):
    assert noted(here, os.getpid) == [os.getpid()] * 4


def test_an_engine_has_the_model_that_it_is_told(here, folders):
    assert here.get_model_info()["model_path"] == folders[0]


def test_an_engine_computes_with_as_many_threads_as_it_is_told(folders):
    with sgl.Engine(folders[0], **SETTINGS | {"threads": 3}, in_process=True) as running:
        assert noted(running, torch.get_num_threads) == [3] * 4


def scores(folder, dtype):
    settings = {**SETTINGS, "dtype": dtype, "in_process": True}
    with sgl.Engine(folder, **settings) as running:
        params = sgl.SamplingParams(
            max_tokens=4, temperature=0, ignore_eos=True, return_logprob=True
        )
        return [each.logprob for each in running.complete("ab", params).output_logprobs]


def test_numbers_are_as_exact_as_their_type(folders):
    assert scores(folders[0], "bfloat16") != scores(folders[0], "float32")


def test_messages_are_logged_from_the_level_on_that_the_engine_is_told(monkeypatch):
    logger = logging.getLogger("sglang_lite")
    monkeypatch.setattr(logger, "level", logger.level)  # which comes back
    with engine(log_level="critical"):
        assert not logger.isEnabledFor(logging.ERROR)


def tiers(**settings):
    return sgl.Engine.of(
        loaded(),
        **{"enable_hierarchical_cache": True, "max_total_tokens": 512, "page_size": 4, **settings},
    )


def test_what_left_the_device_comes_back_from_the_host():
    with tiers(hicache_ratio=4) as small:
        for prompt in (LONG, [7] * 400, LONG):
            usage = small.complete(prompt, FOUR).usage
        assert usage.host_tokens > 200


def test_the_host_has_as_many_bytes_as_the_engine_is_told(folders):
    settings = {**SETTINGS, "enable_hierarchical_cache": True, "in_process": True, "page_size": 16}
    with sgl.Engine(folders[0], **settings, hicache_size=1) as running:
        token = 2 * 2 * 2 * 16 * 4  # keys and values of 2 layers, 2 heads of 16 numbers of 4 bytes
        assert abs(running.stats()["host_total_tokens"] - 1e9 / token) < 16


@pytest.mark.parametrize(("gigabytes", "files"), [(1e-6, 0), (10, 3)])
def test_files_of_prefixes_have_as_many_bytes_as_the_engine_is_told(tmp_path, gigabytes, files):
    store = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path)}
    with tiers(**store, hicache_storage_max_gb=gigabytes) as small:
        for first in range(3):
            small.complete([first + 1, *LONG], FOUR)
    found = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert len(found) == files
