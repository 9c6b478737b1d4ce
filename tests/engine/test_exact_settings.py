"""Exact draws and healed answers are the same with every way to run the model."""

from typing import Any, Literal

import pytest

import sglang_lite as sgl

SETTINGS: dict[str, dict[str, Any]] = {
    "drafts": {"speculation": "prompt"},
    "two ranks": {"tp_size": 2, "in_process": False},
    "replicas": {"dp_size": 2, "in_process": False},
    "tiers": {"enable_hierarchical_cache": True, "hicache_size": 1},
    "small steps": {"step_tokens": 16, "max_running": 4},
    "no cache": {"disable_radix_cache": True},
}
LANGUAGES: list[dict[str, Any]] = [
    {"regex": "[a-z]+"},
    {"regex": "[^a-z]{1,3}"},
    {"type": Literal["one", "two", "three"]},
]


@sgl.function
def program(s, number, seed, temperature):
    s += "Question: how many moons?\nAnswer:"
    s += sgl.gen("text", exact=True, seed=seed, temperature=temperature, **LANGUAGES[number])


ASKED = [(number, seed, 1.0) for number in range(3) for seed in range(4)] + [(2, 0, 0.0)]


HEALED: list[dict[str, Any]] = [{}, {"regex": "[a-z]+"}, {"regex": "[a-z]+", "exact": True}]


@sgl.function
def healed(s, number, seed, temperature):
    s += "Question: how many moons?\nAnsw"
    s += sgl.gen(
        "text", heal=True, seed=seed, temperature=temperature, max_tokens=6, **HEALED[number]
    )


def draw_texts(path, **settings):
    with sgl.Engine(path, dtype="float32", **({"in_process": True} | settings)) as engine:
        return [
            state["text"]
            for each in (program, healed)
            for state in each.run_batch(ASKED, backend=engine)
        ]


@pytest.fixture(scope="module")
def expected(small_file):
    return draw_texts(small_file)


@pytest.mark.parametrize("name", SETTINGS)
def test_texts_are_the_same(name, small_file, expected):
    assert draw_texts(small_file, **SETTINGS[name]) == expected
    assert len(set(expected)) > 4
