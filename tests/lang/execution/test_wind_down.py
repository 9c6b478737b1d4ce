"""A run whose time is over winds down: what is open is closed, and what follows gets its shortest
answer.
"""

import asyncio
import math
from typing import Any

import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.schema import json_schema, parse_json
from tests.constraints.test_generation import random_model
from tests.lang.fakes import Gated
from tests.runtime.requests.test_cut import OPEN
from tests.runtime.scripted import loaded
from tests.server.conftest import serving


class Values(BaseModel):
    a: list[str]


LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "seed": 1}
NO_TIME: dict[str, Any] = {"timeout": 1e-9, "wind_down": 600}


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model()) as engine:
        yield engine


@sgl.function
def program(s):
    s += "x" + sgl.gen("text", **LONG)
    first, second = s.fork(2)
    first += " a " + sgl.gen("more", **LONG)
    second += " b " + sgl.select("choice", ["ab", "cd"])
    s += " " + first["more"] + second["choice"]
    s += sgl.gen("list", json_schema=OPEN, max_tokens=400, temperature=1.0, seed=3)
    s += sgl.gen("last", check=lambda text: len(text) < 9, **LONG)
    return s["last"]


@sgl.function
async def coroutine(s):
    s += "x" + sgl.gen("text", **LONG)
    s += sgl.gen("list", json_schema=OPEN, max_tokens=400, temperature=1.0, seed=3)
    s += sgl.gen("last", **LONG)
    return await s.get("last")


DOORS = {
    "run": lambda backend, **more: program.run(backend=backend, **more),
    "node by node": lambda backend, **more: program.run(backend=backend, push_down=False, **more),
    "stream": lambda backend, **more: program.run(backend=backend, stream=True, **more),
    "arun": lambda backend, **more: asyncio.run(program.arun(backend=backend, **more)),
    "coroutine": lambda backend, **more: coroutine.run(backend=backend, **more),
    "batch": lambda backend, **more: program.run_batch([{}, {}], backend=backend, **more)[1],
    "abatch": lambda backend, **more: asyncio.run(
        program.arun_batch([{}, {}], backend=backend, **more)
    )[1],
    "iterator": lambda backend, **more: list(
        program.run_batch([{}, {}], backend=backend, generator_style=True, **more)
    )[1],
}


@pytest.mark.parametrize("door", DOORS)
def test_what_begins_after_the_timeout_gets_its_shortest_answer(engine, door):
    state = DOORS[door](engine, **NO_TIME)
    for name in ("text", "last"):
        meta = state.get_meta_info(name)
        assert (meta["finish_reason"]["type"], meta["completion_tokens"]) == ("length", 1)
    assert parse_json(json_schema(OPEN), state["list"]) == {"a": []}
    assert state.get_meta_info("list")["shortened"] != []
    assert state.error() is None
    assert state.text().endswith(state["list"] + state["last"])


@sgl.function
def endless(s):
    s += "x" + sgl.gen("a", max_tokens=4000, ignore_eos=True, temperature=1.0, seed=1)
    s += " y " + sgl.gen("b", max_tokens=2000, ignore_eos=True, temperature=1.0, seed=1)


@pytest.mark.parametrize("push_down", [True, False])
def test_what_is_open_at_the_timeout_ends_where_it_stands(push_down):
    with Engine.of(loaded(8192), max_total_tokens=16384) as engine:
        whole = endless.run(backend=engine, push_down=push_down)
        state = endless.run(backend=engine, push_down=push_down, timeout=0.05, wind_down=600)
        assert whole.get_meta_info("a")["completion_tokens"] == 4000
        assert 1 <= state.get_meta_info("a")["completion_tokens"] < 4000
        assert whole["a"].startswith(state["a"])
        assert state.get_meta_info("a")["finish_reason"]["type"] == "length"
        assert state.get_meta_info("b")["completion_tokens"] == 1


def test_without_time_to_wind_down_the_error_is_that_of_the_timeout():
    @sgl.function
    def body(s):
        s += "x" + sgl.gen("a", backend=sgl.ScriptedBackend({"": "done"}))
        s += sgl.gen("b", backend=Gated())
        return s["b"]

    with pytest.raises(
        sgl.RequestTimeoutError, match=r"the run took longer than its timeout of 0\.02 s\."
    ) as caught:
        body.run(backend=sgl.ScriptedBackend(), timeout=0.02, wind_down=0.03)
    state = caught.value.state
    assert state["a"] == "done"
    assert state.so_far().text == "xdone"


def test_a_program_inside_winds_down_with_the_run(engine):
    @sgl.function
    def outer(s):
        s += "x"
        return [
            s.call(program)["last"],
            program.run(timeout=500)["last"],
            program.run_batch([{}])[0]["last"],
        ]

    state = outer.run(backend=engine, **NO_TIME)
    assert [len(each) for each in state.ret_value] == [1, 1, 1]


def test_what_shortened_says_counts_for_what_is_closed(engine):
    @sgl.function
    def body(s):
        s += "x" + sgl.gen("list", type=Values, temperature=1.0, seed=3)

    state = body.run(backend=engine, **NO_TIME)
    assert state["list"] == Values(a=[])
    assert "the timeout of the run cut 'list'" in state.get_meta_info("list")["warnings"][0]
    assert "warnings" not in body.run(backend=engine, shortened="keep", **NO_TIME).get_meta_info(
        "list"
    )
    with pytest.raises(
        sgl.TruncatedError, match="Raise the timeout of the run, or shortened="
    ) as caught:
        _ = body.run(backend=engine, shortened="raise", **NO_TIME)["list"]
    assert caught.value.value == Values(a=[])


def test_what_its_own_limit_cuts_is_an_error_as_ever(engine):
    @sgl.function
    def body(s):
        s += "x" + sgl.gen("list", type=Values, max_tokens=3, temperature=1.0, seed=3)

    with pytest.raises(sgl.SglError, match="max_tokens"):
        _ = body.run(backend=engine, **NO_TIME)["list"]


def test_what_no_bracket_closes_goes_on_to_its_end(engine):
    @sgl.function
    def body(s):
        s += "x" + sgl.gen("word", regex="[a-f]{30}", temperature=1.0, seed=1)

    whole = body.run(backend=engine)
    assert body.run(backend=engine, **NO_TIME)["word"] == whole["word"]


def test_time_that_suffices_changes_nothing(engine):
    @sgl.function
    def body(s):
        s += "x" + sgl.gen("text", **{**LONG, "max_tokens": 30})
        s += sgl.gen("list", json_schema=OPEN, max_tokens=400, temperature=1.0, seed=3)

    whole = body.run(backend=engine).text()
    assert body.run(backend=engine, timeout=600, wind_down=600).text() == whole


@pytest.mark.parametrize("latency", [0.0, 1000.0])
def test_a_scripted_answer_is_cut_after_its_first_word(latency):
    backend = sgl.ScriptedBackend({"x": "one two", " y ": '{"a": ["b"]}'}, latency=latency)
    state = endless_or_json.run(backend=backend, **NO_TIME)
    assert (state["a"], state["b"]) == ("one", {"a": ["b"]})
    assert state.get_meta_info("a")["finish_reason"]["type"] == "length"


@sgl.function
def endless_or_json(s):
    s += "x" + sgl.gen("a")
    s += " y " + sgl.gen("b", type=dict[str, list[str]])


@pytest.fixture(scope="module")
def served(engine):
    with serving(engine) as url:
        backend = sgl.RuntimeEndpoint(url)
        yield backend
        backend.shutdown()


def test_a_program_on_a_server_winds_down(served):
    """The server hears of it behind the first nodes."""
    state = program.run(backend=served, **NO_TIME)
    for name in ("text", "last"):
        meta = state.get_meta_info(name)
        assert meta["finish_reason"]["type"] == "length"
        assert 1 <= meta["completion_tokens"] < LONG["max_tokens"]
    parse_json(json_schema(OPEN), state["list"])


@pytest.mark.parametrize("given", [{"push_down": False}, {"max_total_tokens": 10_000}], ids=str)
def test_a_server_that_is_asked_node_by_node_is_refused(served, given):
    with pytest.raises(
        sgl.CapabilityError, match=r"a run that is asked node by node.*leave out push_down"
    ):
        program.run(backend=served, **given, **NO_TIME)


# ----------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "2", True])
@pytest.mark.parametrize("door", ["run", "arun", "batch", "abatch"])
def test_what_is_no_time_is_refused(engine, door, value):
    with pytest.raises(
        sgl.ParameterError, match=r"wind_down: .* is not a number of seconds above 0"
    ):
        DOORS[door](engine, timeout=5, wind_down=value)


def test_it_is_refused_without_a_timeout(engine):
    with pytest.raises(
        sgl.ParameterError, match=r"without a timeout.* run\(timeout=30, wind_down=2\)"
    ):
        program.run(backend=engine, wind_down=2)


@pytest.mark.parametrize("door", ["run", "stream", "arun"])
def test_a_backend_that_can_not_end_an_answer_is_refused(door):
    with pytest.raises(
        sgl.CapabilityError, match=r"Gated can't end an answer that is open.*wind_down"
    ) as caught:
        DOORS[door](Gated(), timeout=5, wind_down=2)
    assert "Leave it out" in (caught.value.hint or "")


def test_a_batch_at_such_a_backend_is_refused():
    with pytest.raises(
        sgl.BatchError, match=r"2 of 2 programs failed.*Gated can't end an answer that is open"
    ):
        program.run_batch([{}, {}], backend=Gated(), timeout=5, wind_down=2)
