"""Limits on what a run may use: the call that could go beyond is not made, and what was done is
kept.
"""

import asyncio
import pickle

import pytest

import sglang_lite as sgl
from sglang_lite import wire
from sglang_lite.lang.backend.token_counts import estimate_tokens
from sglang_lite.protocol import Message, Prompt, Span, Usage
from sglang_lite.testing import Say


@sgl.function
def four(s, n=4):
    for i in range(n):
        s += sgl.user(f"Question {i}?")
        s += sgl.assistant(sgl.gen(f"a{i}", max_tokens=10))


@pytest.fixture(params=["scripted", "slow", "engine", "hooks"])
def backend(request):
    """Backends that answer at once, that have to be waited for, that play whole programs, with
    SGLang's hooks.
    """
    if request.param == "engine":
        return request.getfixturevalue("engine_process")
    if request.param == "hooks":
        return Hooks()
    return sgl.ScriptedBackend(
        default="one two", latency=0.0001 if request.param == "slow" else 0.0
    )


class Hooks(sgl.BaseBackend):
    def generate(self, s, sampling_params):
        return "one two", {"prompt_tokens": len(s.text_.split()), "completion_tokens": 2}


def test_no_call_goes_beyond_the_tokens(backend):
    for limit in (30, 60, 120, 200):
        state = four.run(backend=backend, max_total_tokens=limit)
        usage = state.trace().usage
        assert usage.prompt_tokens + usage.completion_tokens <= limit


def test_what_is_done_is_kept_in_the_state_of_the_error(backend):
    whole = four.run(8, backend=backend, temperature=0)
    state = four.run(8, backend=backend, temperature=0, max_total_tokens=100)
    with pytest.raises(
        sgl.BudgetError, match=r"max_total_tokens: .* of 100 tokens are used or reserved"
    ) as caught:
        state["a7"]
    assert caught.value.limit == "max_total_tokens"
    assert caught.value.state is state
    assert caught.value.state["a0"] == whole["a0"]
    assert caught.value.state.usage().completion_tokens == state.trace().usage.completion_tokens
    assert "test_budget.py" in str(caught.value)


def test_enough_is_as_good_as_no_limit(backend):
    free, bound = (
        four.run(backend=backend, temperature=0, max_total_tokens=limit) for limit in (None, 10**6)
    )
    assert bound.text() == free.text()
    assert bound.usage().completion_tokens == free.usage().completion_tokens


def test_dollars(api, connected):
    api.answers = Say("Paris")
    backend = connected(sgl.OpenAI, "gpt-4o")
    state = four.run(12, backend=backend, max_cost=0.0003)
    with pytest.raises(sgl.BudgetError, match=r"max_cost: \$\S+ of \$0.0003 are used or reserved"):
        state["a11"]
    assert 0 < len(api.requests) < 12
    assert backend.cost(state.trace().usage) <= 0.0003
    assert state["a0"] == "Paris"


def test_a_price_that_nobody_knows_is_no_budget():
    with pytest.raises(sgl.ParameterError, match="the price of the model 'scripted' is not known"):
        four.run(backend=sgl.ScriptedBackend(default="a"), max_cost=1.0)
    backend = sgl.ScriptedBackend(default="a")
    backend.price = sgl.Price(1.0, 1.0)
    assert four.run(backend=backend, max_cost=1.0)["a3"] == "a"


def test_an_answer_without_a_limit_is_refused_where_the_api_has_none(api, connected):
    api.answers = Say("Paris")

    @sgl.function
    def open_end(s):
        s += sgl.user("Hi") + sgl.assistant(sgl.gen("a"))

    backend = connected(sgl.OpenAI, "gpt-4o")
    with pytest.raises(sgl.ParameterError, match="max_tokens: this generation has no limit"):
        open_end.run(backend=backend, max_total_tokens=1000)["a"]
    assert open_end.run(backend=backend, max_total_tokens=1000, max_new_tokens=9)["a"] == "Paris"
    assert len(api.requests) == 1


def test_branches_under_way_are_booked():
    calls = []

    def answer(call):
        calls.append(call)
        return "one two"

    @sgl.function
    def wide(s):
        s += sgl.user("Go.")
        forks = s.fork(20)
        forks += sgl.assistant(sgl.gen("a", max_tokens=10))
        for fork in forks:
            fork.error()

    state = wide.run(backend=sgl.ScriptedBackend(answer, latency=0.001), max_total_tokens=200)
    usage = state.trace().usage
    assert usage.prompt_tokens + usage.completion_tokens <= 200
    assert 1 <= len(calls) < 20


def test_programs_inside_use_the_same_budget():
    @sgl.function
    def outer(s):
        s += sgl.user("Go.")
        for _ in range(9):
            s.call(four, 1)["a0"]

    with pytest.raises(sgl.BudgetError):
        outer.run(backend=sgl.ScriptedBackend(default="one two"), max_total_tokens=80)


def test_selections_count():
    @sgl.function
    def choose(s):
        for i in range(50):
            s += sgl.user("Which?") + sgl.assistant(sgl.select(f"c{i}", ["a", "b"]))

    state = choose.run(backend=sgl.ScriptedBackend(), max_total_tokens=300)
    assert isinstance(state.error(), sgl.BudgetError)
    assert 0 < state.trace().usage.prompt_tokens <= 300


def test_a_batch_has_one_budget_and_keeps_what_is_done():
    backend, rows = sgl.ScriptedBackend(default="one two"), [{"n": 2}] * 20
    with pytest.raises(sgl.BatchError) as caught:
        four.run_batch(rows, backend=backend, num_threads=1, max_total_tokens=200)
    done = [
        r for r in caught.value.results if isinstance(r, sgl.ProgramState) and r.error() is None
    ]
    over = [r for r in caught.value.results if isinstance(r, sgl.BudgetError)]
    assert 0 < len(done) < 20
    assert len(done) + len(over) == 20
    used = [state.usage() for state in done]
    assert sum(u.prompt_tokens + u.completion_tokens for u in used) <= 200


def test_a_coroutine_has_one_too():
    async def main():
        state = await four.arun(
            backend=sgl.ScriptedBackend(default="a", latency=0.0001), max_total_tokens=60
        )
        return state.error()

    assert isinstance(asyncio.run(main()), sgl.BudgetError)


@pytest.mark.parametrize(
    "options",
    [{"max_cost": 0}, {"max_cost": "1"}, {"max_total_tokens": 0}, {"max_total_tokens": 1.5}],
)
def test_a_limit_that_is_none_is_refused(options):
    with pytest.raises(sgl.ParameterError, match=next(iter(options))):
        four.run(backend=sgl.ScriptedBackend(), **options)


def test_the_error_travels_without_its_state():
    error = sgl.BudgetError("max_cost", "all is used")
    error.state = object()
    again = pickle.loads(pickle.dumps(error))
    sent = wire.decode(wire.encode(error))
    for each in (again, sent):
        assert (type(each), str(each), each.limit, each.state) == (
            sgl.BudgetError,
            str(error),
            "max_cost",
            None,
        )


def test_estimates_of_prompts_are_rather_too_high():
    text = "What is the capital of France, and how many people live there? " * 20
    prompt = Prompt((Span(text),), (Message("user", (text,)),))
    assert len(text) / 4 < estimate_tokens(prompt) < len(text)


# ---------------------------------------------------------------------------------- failed attempts


def test_attempts_that_fail_count_as_thrown_away():
    backend = sgl.ScriptedBackend({"Number?": ["one two three", "4"]})

    @sgl.function
    def number(s):
        s += sgl.user("Number?")
        s += sgl.assistant(sgl.gen("n", check=lambda text: text == "4", retries=1, temperature=0.5))

    usage = number.run(backend=backend).usage()
    assert (usage.completion_tokens, usage.thrown_away_tokens) == (4, 3)


def test_a_call_that_is_given_up_counts_as_booked():
    """Nobody tells what it had used by then."""
    backend = sgl.ScriptedBackend(default="one", latency=60)

    @sgl.function
    def number(s):
        s += sgl.user("Number?")
        s += sgl.assistant(sgl.gen("n", max_tokens=100, timeout=1e-6, retries=5))

    with pytest.raises(sgl.BudgetError, match="max_total_tokens"):
        number.run(backend=backend, max_total_tokens=300)["n"]


def test_an_answer_that_is_cut_short_counts_too(api, connected):
    api.answers = [Say("4 5 6", finish="length", exactly=True), "4"]

    @sgl.function
    def number(s):
        s += sgl.user("Number?")
        s += sgl.assistant(sgl.gen("n", type=int, retries=1, temperature=0.5, max_tokens=9))

    state = number.run(backend=connected(sgl.OpenAI, "gpt-4o", path="/v1"))
    assert state["n"] == 4
    assert (state.usage().completion_tokens, state.usage().thrown_away_tokens) == (5, 3)
    assert isinstance(state.usage(), Usage)


def test_a_run_again_has_the_backends_price():
    backend = sgl.ScriptedBackend(default="a")
    backend.price = sgl.Price(1.0, 1.0)
    state = four.run(backend=backend, max_cost=1.0)
    assert state.rerun("a1", "b")["a3"] == "a"
