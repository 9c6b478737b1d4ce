"""A constrained output is complete before its timeout: on the engine's clock, by which each step takes a second."""

from concurrent.futures import Future

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.schema import json_schema
from sglang_lite.program.nodes import Gen
from sglang_lite.protocol import Number, ParameterError, Regex, SamplingParams
from tests.constraints.test_generation import random_model
from tests.runtime.scripted import FreeDrafts
from tests.runtime.structured_output.test_closing import PERSON, is_valid

CONSTRAINTS = {
    "a person": json_schema(PERSON),
    "different words": json_schema(
        {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 2, "uniqueItems": True}
    ),
    "a pattern": Regex("[a-z]{20,200}!"),
}


@pytest.fixture(params=[{}, {"jump_forward": "off"}, {"overlap": False}], ids=str)
def engine(request):
    with Engine.of(random_model(), **request.param) as engine:
        loop = engine.core.loop
        loop.clock.now = lambda: float(loop.steps)
        yield engine


def answer(engine, constraint, timeout, **params):
    """A generation, and the number of steps until its end."""
    done, before = Future(), engine.core.loop.steps
    settings = SamplingParams(**{"max_tokens": 400, "temperature": 1.0, **params})
    engine.submit("x", settings, constraint, sink=done.set_result, timeout=timeout)
    return done.result(timeout=60), engine.core.loop.steps - before


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_an_output_is_complete_before_its_timeout(engine, name):
    constraint, shortened = CONSTRAINTS[name], 0
    for seed in range(4):
        free, _ = answer(engine, constraint, None, seed=seed)
        timeout = 60 + 5 * seed
        found, took = answer(engine, constraint, timeout, seed=seed)
        assert is_valid(constraint, found.text), found
        assert took <= timeout
        assert found.meta["shortened"] is True or found.token_ids == free.token_ids
        shortened += found.meta["shortened"] is True and free.meta["shortened"] is False
        begins = zip(found.token_ids, free.token_ids)
        same = next((i for i, (one, other) in enumerate(begins) if one != other), len(found.token_ids))
        assert same > 5  # it was free before
    assert shortened


def test_time_that_suffices_changes_nothing(engine):
    constraint = CONSTRAINTS["a person"]
    for seed in range(4):
        free, steps = answer(engine, constraint, None, seed=seed, max_tokens=100)
        found, _ = answer(engine, constraint, 10 * steps + 1000, seed=seed, max_tokens=100)
        assert (found.token_ids, found.meta["shortened"]) == (free.token_ids, free.meta["shortened"])


def test_drafted_tokens_close_in_time_as_well():
    with Engine.of(random_model(), speculation="again", draft_tokens=1) as engine:
        loop = engine.core.loop
        loop.clock.now, loop.scheduler.drafts.drafting.cost = lambda: float(loop.steps), FreeDrafts()
        free, _ = answer(engine, CONSTRAINTS["a person"], None, seed=0)  # which the second one drafts
        found, took = answer(engine, CONSTRAINTS["a person"], 60, seed=0)
        assert is_valid(CONSTRAINTS["a person"], found.text)
        assert (took <= 60, found.meta["shortened"], free.meta["shortened"]) == (True, True, False)
        assert found.meta["spec_accept_token_num"] > 5


def test_scored_tokens_close_in_time_as_well(engine):
    found, took = answer(engine, CONSTRAINTS["a person"], 70, seed=3, confidence=True)
    assert is_valid(CONSTRAINTS["a person"], found.text)
    assert took <= 70
    assert len(found.scores.logprobs) == len(found.token_ids)


def test_a_node_of_a_program_closes_in_time(engine):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("person", json_schema=PERSON, max_tokens=400, temperature=1.0, timeout=60)

    for seed in range(3):
        state = program.run(backend=engine, seed=seed)
        assert is_valid(CONSTRAINTS["a person"], state["person"])
        assert engine.core.loop.steps < 400


def test_free_text_and_numbers_take_no_notice(engine):
    for constraint in (None, Number("integer")):
        free, _ = answer(engine, constraint, None, seed=1, max_tokens=50)
        found, _ = answer(engine, constraint, 10, seed=1, max_tokens=50)
        assert found.token_ids == free.token_ids


def test_a_timeout_that_is_no_number_is_refused():
    with pytest.raises(ParameterError, match="timeout"):
        Gen("a", timeout="3")  # type: ignore[arg-type]
