"""An engine sees one program a run, whatever the run is told and however its timing falls.

SGLANG_LITE_RUNS=100 SGLANG_LITE_CASES=all runs every conformance program so often in each way, else
some once in some ways, by turns.
"""

import asyncio
import contextlib
import os
from collections import Counter
from functools import partial
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from tests.conformance.case import cases, outcome
from tests.constraints.test_generation import random_model

CASES = cases()
RUNS = int(os.environ.get("SGLANG_LITE_RUNS", "1"))
FIXED: dict[str, Any] = {"seed": 3, "max_new_tokens": 8}
gen = sgl.gen


def accepts(value):
    return True


async def accepts_later(value):
    await asyncio.sleep(0)
    return True


def told(node):
    """`gen` with settings of a node that leave its answer as it is."""

    def with_settings(*args, **given):
        return gen(*args, **(given if "choices" in given else {**node, **given}))

    return with_settings


# of settings of the run, and of each generation
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "timeout": ({"timeout": 60}, {}),
    "retries": ({"retries": 2}, {}),
    "both": ({"timeout": 60, "retries": 2}, {}),
    "timeout of nodes": ({}, {"timeout": 60}),
    "retries of nodes": ({}, {"retries": 1}),
    "check": ({}, {"check": accepts}),
    "coroutine check": ({}, {"check": accepts_later, "retries": 1}),
    "waited for": ({"use_thread": False}, {}),
}
TAKEN = [
    (name, way)
    for i, name in enumerate(CASES)
    for j, way in enumerate(WAYS)
    if RUNS > 1 or way == "plain" or (i + j) % 4 == 0
]


@sgl.function
def one(s):
    s += "a" + sgl.gen("x", max_tokens=1)


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model(), max_running=64) as engine:
        yield engine


@pytest.fixture
def backend(engine):
    backend = LocalBackend(engine)
    backend.chat_template = get_chat_template("chatml")
    return backend


def seen(backend, run):
    """How many programs the engine sees in a run, and how many requests that are none."""

    def counts():
        one.run(backend=backend)["x"]  # what was posted before has arrived
        stats = backend.engine.stats()
        return stats["programs_opened"], stats["requests_submitted"]

    programs, requests = counts()
    run()
    after = counts()
    return after[0] - programs - 1, after[1] - requests


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "way"), TAKEN)
def test_a_run_is_one_program(backend, monkeypatch, name, way):
    settings, node = WAYS[way]
    monkeypatch.setattr(sgl, "gen", told(node))
    run = partial(outcome, CASES[name], backend, **FIXED, **settings)
    assert Counter(seen(backend, run) for _ in range(RUNS)) == {(CASES[name].programs, 0): RUNS}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.streams and not case.raises]
)
def test_a_streamed_run_is_one_program(backend, name):
    case = CASES[name]

    def run():
        state = case.program.run(
            backend=backend, stream=True, **case.arguments, **{**case.settings, **FIXED}
        )
        with contextlib.suppress(sgl.SglError):  # few tokens may be too few for a value
            list(state.text_iter())

    assert Counter(seen(backend, run) for _ in range(RUNS)) == {(case.programs, 0): RUNS}


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:items [0-9]+ and [0-9]+ are equal")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.raises])
def test_a_batch_is_a_program_an_item(backend, name):
    case = CASES[name]
    settings = {
        key: value for key, value in {**case.settings, **FIXED}.items() if key != "use_thread"
    }
    run = partial(
        case.program.run_batch, [case.arguments] * 3, backend=backend, on_error="return", **settings
    )
    assert seen(backend, run) == (3 * case.programs, 0)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_asked_node_by_node_is_no_program(backend, name):
    programs, _ = seen(backend, partial(outcome, CASES[name], backend, **FIXED, push_down=False))
    assert programs == 0


def test_a_node_on_another_backend_of_the_engine_is_a_request(backend):
    @sgl.function
    def program(s):
        s += (
            "a"
            + sgl.gen("x", max_tokens=2)
            + "b"
            + sgl.gen("y", max_tokens=2, backend=LocalBackend(backend.engine))
        )
        s += "c" + sgl.gen("z", max_tokens=2)

    assert seen(backend, lambda: program.run(backend=backend, **FIXED)["z"]) == (1, 1)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_a_fork_of_any_size_is_in_the_program(backend, size):
    @sgl.function
    def program(s):
        s += "a"
        branches = s.fork(size)
        branches += lambda i: f"{i}:" + sgl.gen("x", max_tokens=2)
        branches.join()
        s += "b" + sgl.gen("y", max_tokens=2)

    assert seen(backend, lambda: program.run(backend=backend, **FIXED)["y"]) == (1, 0)


def test_what_is_added_from_outside_of_the_body_while_it_runs_is_in_the_program(backend):
    @sgl.function
    async def program(s):
        s += "a"
        branches = s.fork(4)

        async def go(branch):
            branch += "b" + sgl.gen("x", regex="[ab]")
            branch += await branch.get("x") + sgl.gen("y", max_tokens=2)
            return await branch.get("y")

        s["found"] = await asyncio.gather(*map(go, branches))

    assert seen(backend, lambda: program.run(backend=backend, **FIXED)["found"]) == (1, 0)
