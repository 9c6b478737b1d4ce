"""Priorities under a policy that knows none."""

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from tests.runtime import scripted


def test_a_priority_needs_the_policy():
    with (
        Engine.of(scripted.loaded()) as small,
        pytest.raises(sgl.ParameterError, match="priority: the engine's policy is 'lpm'"),
    ):
        small.submit("ab", sink=lambda event: None, priority=1)


def test_without_the_policy_the_first_one_advances_whatever_the_priorities():
    forty = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    with (
        Engine.of(scripted.loaded(), max_total_tokens=96, page_size=1) as tight,
        pytest.warns(UserWarning, match="prio"),
    ):
        found = tight.generate(["ab", "b", "ba"], forty, priority=[0, 1, 2])
    retractions = [each["meta_info"]["num_retractions"] for each in found]
    assert sum(retractions) > retractions[0] == 0
