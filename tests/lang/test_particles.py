"""Particles: their weights against probabilities that exact draws compute, and what goes wrong."""

import asyncio
import itertools
import math
from typing import Any, Literal

import numpy as np
import pytest

import sglang_lite as sgl
from tests.server.conftest import serving

QUESTION = "Question: what comes next?\nAnswer:"
FIRST = (",", ";", "(a)")
SECOND = ("!", "?", "b", "bc")


@pytest.fixture(scope="module")
def engine(small_file):
    with sgl.Engine(small_file, in_process=True, dtype="float32") as engine:
        yield engine


@pytest.fixture(params=["in process", "child", "http"])
def backend(request, engine, small_file):
    if request.param == "in process":
        yield engine
    elif request.param == "child":
        with sgl.Engine(small_file, dtype="float32") as child:
            yield child
    else:
        with serving(engine) as url:
            endpoint = sgl.RuntimeEndpoint(url)
            yield endpoint
            endpoint.shutdown()


def shares_of(engine, before, texts):
    """The probabilities of texts behind a prompt, and the log of their sum."""

    @sgl.function
    def program(s):
        s += before + sgl.gen("x", constraint=sgl.Choices(texts), exact=True)

    found = program.run(backend=engine).exact("x")
    return found.probs, found.log_mass


def error_of_mean(weights):
    """The standard error of the log of the weights' mean."""
    mean = math.fsum(weights) / len(weights)
    spread = math.fsum((weight - mean) ** 2 for weight in weights) / len(weights)
    return math.sqrt(spread / len(weights)) / mean


def distance(shares, probs):
    return sum(abs(shares.get(key, 0) - probs.get(key, 0)) for key in {*shares, *probs}) / 2


def test_weights_account_for_what_masks_exclude(backend, engine):
    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(300, resample=0)
        p += sgl.gen("x", constraint=sgl.Choices(FIRST))
        return p

    p = program.run(backend=backend, seed=1).ret_value
    probs, log_mass = shares_of(engine, QUESTION, FIRST)
    assert abs(p.log_mass - log_mass) < 5 * error_of_mean(p.weights)
    assert distance(p.shares("x"), probs) < 5 * math.sqrt(3 / p.effective_size) / 2
    assert len(p) == len(p.weights) == 300
    assert math.fsum(p.weights) == pytest.approx(1)


@pytest.mark.parametrize("resample", [0, 0.5, 1])
@pytest.mark.parametrize("exact", [False, True])
def test_the_posterior_of_two_steps_and_a_potential(engine, resample, exact):
    def fits(state):
        both = state["one"] + state["two"] if "two" in state else state["one"]
        return 5.0 if both in ("(a)b", ",?") else 0.5 if both.startswith(";") else 1.0

    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(600, fits, resample=resample)
        p += sgl.gen("one", constraint=sgl.Choices(FIRST), exact=exact)
        p += " then" + sgl.gen("two", constraint=sgl.Choices(SECOND), exact=exact)
        return p

    ones, log_one = shares_of(engine, QUESTION, FIRST)
    masses = {}
    for one in FIRST:
        twos, log_two = shares_of(engine, f"{QUESTION}{one} then", SECOND)
        for two in SECOND:
            factor = 5 if one + two in ("(a)b", ",?") else 0.5 if one == ";" else 1
            masses[one, two] = ones[one] * twos[two] * factor * math.exp(log_one + log_two)
    total = math.fsum(masses.values())
    p = program.run(backend=engine, seed=3).ret_value
    found = dict.fromkeys(masses, 0.0)
    for state, weight in zip(p, p.weights):
        found[state["one"], state["two"]] += weight
    assert distance(found, {both: mass / total for both, mass in masses.items()}) < 0.08
    assert p.log_mass == pytest.approx(math.log(total), abs=0.25)
    assert (p.effective_size == pytest.approx(600)) == (resample == 1)
    assert p.effective_size >= resample * 600 * (1 - 1e-9)


def test_a_seed_gives_the_same_particles(engine):
    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(20, lambda state: 1.0 + len(state["word"]), resample=0.9)
        p += sgl.gen("word", regex="[a-z]{1,8}", max_tokens=9)
        p += "," + sgl.gen("word", regex="[a-z]{1,8}", max_tokens=9)
        s += p.pick()["word"]
        return [state.text() for state in p], p.weights

    # What a run gives its other generations doesn't change what particles draw.
    first = program.run(backend=engine, seed=7, temperature=0, top_p=0.1)
    again = program.run(backend=engine, seed=7)
    other = program.run(backend=engine, seed=8)
    assert first.text() == again.text()
    assert first.ret_value[0] == again.ret_value[0]
    assert first.ret_value[1] == pytest.approx(again.ret_value[1], rel=1e-3)
    assert other.ret_value[0] != first.ret_value[0]
    assert len(set(first.ret_value[0])) > 1


def test_free_text_and_given_text_change_no_weight(engine):
    @sgl.function
    def program(s):
        p = s.particles(5)
        p += QUESTION
        p += sgl.gen("x", max_tokens=3) + " and " + sgl.gen("y", max_tokens=2, stop="e")
        p += lambda state: f" ({state['x']})"
        return p

    p = program.run(backend=engine, seed=1).ret_value
    assert p.weights == [0.2] * 5
    assert p.log_mass == 0
    assert all(state.text().endswith(f" ({state['x']})") for state in p)
    assert p[1]["x"] == list(p)[1]["x"]


def test_a_text_that_a_limit_cuts_has_no_weight(engine):
    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(40, resample=0)
        p += sgl.gen("x", regex=r"(,|;|\(abcdefghijklmnopqrst\))", max_tokens=2)
        return p

    p = program.run(backend=engine, seed=1, shortened="keep").ret_value
    assert {(state["x"] in ",;", weight > 0) for state, weight in zip(p, p.weights)} == {
        (True, True),
        (False, False),
    }


def test_async_bodies_await_the_weights(engine):
    @sgl.function
    async def program(s):
        s += QUESTION
        p = s.particles(4)
        p += sgl.gen("x", regex="[a-z]{1,3}")
        with pytest.raises(sgl.ProgramError, match="would block the event loop"):
            p += sgl.gen("y", regex="[a-z]{1,3}")
        await p.async_sync()
        p += sgl.gen("y", regex="[a-z]{1,3}")
        await p.async_sync()
        return p.shares("y")

    state = asyncio.run(program.arun(backend=engine, seed=1))
    assert sum(state.ret_value.values()) == pytest.approx(1)


def test_particles_of_a_fork(engine):
    @sgl.function
    def program(s):
        s += QUESTION
        forks = s.fork(2)
        for fork in forks:
            p = fork.particles(6, lambda state: 2.0 if state["x"] == "," else 1.0, resample=1)
            p += sgl.gen("x", constraint=sgl.Choices(FIRST))
            fork["likeliest"] = next(iter(p.shares("x")))
        forks.join()
        return s["likeliest"]

    assert set(program.run(backend=engine, seed=2).ret_value) <= set(FIRST)


async def coroutine_potential(state):
    return 1.0


WRONG: dict[str, Any] = {
    "potential: KeyError": lambda state: {}["x"],
    "potential: OverflowError": lambda state: 10**400,
    "potential: TypeError: it is a coroutine function": coroutine_potential,
    "potential: nan is not a number of at least 0": lambda state: math.nan,
    "potential: -1 is not a number of at least 0": lambda state: -1,
    "potential: inf is not a number": lambda state: math.inf,
    "potential: 'good' is not a number": lambda state: "good",
    "particles: none of the 3 fits": lambda state: 0,
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_potential_is_told(engine, message):
    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(3, WRONG[message])
        p += sgl.gen("x", type=Literal["a", "b"])
        return p.weights

    with pytest.raises(sgl.ProgramError, match=message) as caught:
        program.run(backend=engine).ret_value
    assert caught.value.where is not None
    assert caught.value.where.file.endswith("test_particles.py")


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


REFUSED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "seed": {"seed": 1},
    "n": {"n": 2},
    "top_p": {"top_p": 0.9},
    "logit_bias": {"logit_bias": {5: 3.0}},
    "check": {"check": lambda value: True},
    "tools": {"tools": [weather]},
    "retries": {"retries": 3},
    "reasoning": {"regex": "[a-z]+", "reasoning": "qwen3"},
    "stop": {"regex": "[a-z]+", "stop": "x"},
    "return_logprob": {"regex": "[a-z]+", "return_logprob": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_weights_can_not_account_for_is_refused(engine, name):
    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(3)
        p += sgl.gen("x", **REFUSED[name])

    with pytest.raises(sgl.ParameterError, match=f"{name}: weights of particles"):
        program.run(backend=engine).sync()


def test_attempts_of_the_run_bias_no_weight(engine):
    """A text without a value has the weight 0. Another attempt would be drawn from those with one."""
    texts = (",", ";", "(abcdefghijklmnopqrst)")
    kind: Any = Literal[texts]

    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(300, lambda state: len(state["x"]) and 1.0, resample=0)
        p += sgl.gen("x", type=kind, max_tokens=2)
        return p

    p = program.run(backend=engine, seed=1, retries=20).ret_value
    assert 0 in p.weights
    assert set(p.shares("x")) == {",", ";"}
    _, log_mass = shares_of(engine, QUESTION, texts[:2])
    assert abs(p.log_mass - log_mass) < 5 * error_of_mean(p.weights)
    p += " And" + sgl.gen("y", max_tokens=1)
    for state, weight in zip(p, p.weights):
        assert not weight or " And" in state.text()


def test_functions_may_add_different_things(engine):
    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(40, resample=0)
        p += sgl.gen("x", constraint=sgl.Choices(FIRST))
        before = p.weights
        p += lambda state: sgl.gen("y", regex="[0-9]") if state["x"] == "," else " none"
        return before, p

    before, p = program.run(backend=engine, seed=1).ret_value
    lower = [after / old for after, old, state in zip(p.weights, before, p) if state["x"] == ","]
    same = [after / old for after, old, state in zip(p.weights, before, p) if state["x"] != ","]
    assert max(lower) < min(same)
    assert max(same) == pytest.approx(min(same))


def test_a_rerun_with_a_seed_replaces_and_picks_the_same_particles(engine):
    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(6, lambda state: float(len(state["w"])), resample=1)
        for _ in range(3):
            p += sgl.gen("w", regex="[a-z]{1,8}", max_tokens=9)
        s += p.pick()["w"] + p.pick()["w"] + sgl.gen("end", max_tokens=2)

    for seed in range(3):
        state = program.run(backend=engine, seed=seed)
        before = state.text()[: -len(state["end"]) or None]
        assert state.rerun("end").text().startswith(before)


def test_picks_without_a_seed_follow_the_weights(engine):
    """Two particles, of which one has a weight of three quarters, whatever they have drawn."""

    @sgl.function
    def program(s):
        s += QUESTION
        p = s.particles(2, lambda state: state["weight"], resample=0)
        for state, weight in zip(p, (1.0, 3.0)):
            state["weight"] = weight
        p += sgl.gen("x", max_tokens=0)
        return [p.pick()["weight"] for _ in range(20)]

    picked = [weight for _ in range(20) for weight in program.run(backend=engine).ret_value]
    assert 240 < picked.count(3.0) < 360  # 300 of 400, 7 standard deviations


def test_potentials_may_be_other_numbers(engine):
    @sgl.function
    def program(s, number):
        s += QUESTION
        p = s.particles(3, lambda state: number)
        p += sgl.gen("x", type=Literal[",", ";"])
        return p.log_mass

    found = [
        program.run(number, backend=engine, seed=1).ret_value
        for number in (True, 1, np.float32(1), np.bool_(True), np.int64(1))
    ]
    assert found == pytest.approx([found[0]] * 5, abs=1e-4)


def test_other_mistakes(engine):
    @sgl.function
    def inner(s):
        s += sgl.gen("y", regex="[0-9]+")

    def added(expression):
        @sgl.function
        def program(s):
            p = s.particles(3)
            p += QUESTION
            p += expression
            return p.weights

        return program

    with pytest.raises(sgl.ParameterError, match="particles: select takes the best choice"):
        added(sgl.select("x", ["a", "b"])).run(backend=engine).ret_value
    with pytest.raises(sgl.ParameterError, match="particles: a generation has no name"):
        added(sgl.gen(max_tokens=2)).run(backend=engine).ret_value
    with pytest.raises(sgl.ParameterError, match=r"particles: what Call\(.* can't be weighed"):
        added(inner()).run(backend=engine).ret_value
    with pytest.raises(sgl.ProgramError, match="'x' was drawn from more than 64 texts"):
        added(sgl.gen("x", regex="[a-z]{1,9}", exact=True)).run(backend=engine).ret_value
    with pytest.raises(sgl.TraceError, match="particles: which of them are replaced"):
        added(sgl.gen("x", max_tokens=2)).trace()

    @sgl.function
    def in_grammar(s):
        with s.grammar(sgl.Regex("a[bc]")):
            s.particles(2)

    for arguments, message in {
        (0,): "n: 0",
        (2, "x"): "potential: 'x' is not a function",
        (2, None, 1.5): "resample: 1.5 is not between",
        (2, None, "x"): "resample: 'x' is not a number",
    }.items():
        with pytest.raises(sgl.ParameterError, match=message):
            sgl.function(
                lambda s, given=arguments: (
                    s.particles(*given[:2], resample=(*given, 0.5, 0.5)[2]) and None
                )
            ).run(backend=engine).sync()
    with pytest.raises(sgl.ProgramError, match="inside a grammar over several nodes"):
        in_grammar.run(backend=engine).sync()


def test_replaced_particles_are_copied_by_their_shares(engine):
    """Each has as many copies as its share of all, rounded up or down."""

    @sgl.function
    def program(s, number):
        def weigh(state):
            state["number"] = next(numbers)
            return float(state["number"] ** 2)

        s += QUESTION
        numbers = itertools.count()
        p = s.particles(12, weigh, resample=1)
        p += sgl.gen("x", type=Literal["a", "b", "c"], exact=True)
        return [state["number"] for state in p]

    shares = [12 * number**2 / sum(each**2 for each in range(12)) for number in range(12)]
    for number in range(4):
        numbers = program.run(number, backend=engine, seed=number).ret_value
        assert len(numbers) == 12
        for at, share in enumerate(shares):
            assert math.floor(share) <= numbers.count(at) <= math.ceil(share)


def test_a_backend_without_weights_refuses_constraints():
    @sgl.function
    def program(s):
        p = s.particles(2)
        p += sgl.user("Hi.") + sgl.assistant(sgl.gen("x", type=Literal["a", "b"]))
        return p.weights

    with pytest.raises(sgl.SglError, match="exact"):
        program.run(backend=sgl.OpenAI("gpt-4o", api_key="x")).ret_value
