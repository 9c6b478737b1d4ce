"""Compiled programs on an engine in a process of its own: as in this process."""

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from tests.waiting import until


@sgl.function
def program(s, question, length=2):
    s += f"{question}" + sgl.gen("a", max_tokens=length, ignore_eos=True)
    branches = s.fork(2)
    branches += lambda i: f"{i}" + s["a"] + sgl.gen("b", max_tokens=2, ignore_eos=True)
    branches.join("concate_and_append")
    s += sgl.select("c", [f"{question}x", "y"])


@sgl.function
def deciding(s, question, length=2):
    s += f"{question}" + sgl.gen("a", max_tokens=length, ignore_eos=True)
    for turn in range(4):
        with s.checkpoint() as place:
            s += f"{turn}" + sgl.gen("b", regex="[abc]", temperature=1.0)
            if s["b"] == "c":
                place.rollback()
                continue
        s += s["b"]
        if s["b"] == "a":
            break
    s += sgl.select("c", [f"{question}x", "y"])


@sgl.function
def checked(s, question, length=2):
    s += f"{question}" + sgl.gen("a", max_tokens=length, ignore_eos=True, check=lambda a: a < "m", retries=9)
    s += f" {s['a'].upper()} " + sgl.gen("b", regex="[abc]", temperature=1.0)
    s += sgl.select("c", [f"{question}x", "y"])


ROWS = [{"question": "ab" * (i + 1), "length": i % 4 + 1} for i in range(12)]


def told(state):
    b = state["b"] if "b" in state else None  # noqa: SIM401 # its get is a coroutine
    return state.text(), state["a"], b, state["c"], state.usage().completion_tokens


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", [program, deciding, checked], ids=["plain", "decides", "holds"])
def test_a_compiled_batch_is_the_same_in_both_forms(here, own, program):
    found = []
    for engine in (here, own):
        backend = LocalBackend(engine)
        for each in (program, program.compile(backend)):
            found.append([told(state) for state in each.run_batch(ROWS, backend=backend, seed=5)])
    assert all(each == found[0] for each in found)


def test_leaving_a_batch_ends_what_is_under_way(own):
    backend = LocalBackend(own)
    rows = [{"question": "ab", "length": 1}, *({"question": "ab", "length": 500} for _ in range(3))]
    states = program.compile(backend).run_batch(rows, backend=backend, seed=5, generator_style=True)
    assert told(next(states))
    states.close()
    until(lambda: not own.stats()["running"])
