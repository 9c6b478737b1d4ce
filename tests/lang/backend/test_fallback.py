"""Several backends, of which the next one answers where one does not."""

import itertools

import pytest
from anthropic_answers import said as claude_said
from api_server import Drop, Events, Reply
from openai_answers import chunk, failure, said

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic
from sglang_lite.lang.backend.capabilities import BegunTurns, TurnRules, combine_turn_rules
from sglang_lite.lang.backend.openai import OpenAI


@pytest.fixture
def other():
    with sgl.server_for_tests() as server:
        yield server


@pytest.fixture
def both(api, other, connected):
    """A fallback from OpenAI to Claude."""
    first = connected(OpenAI, "gpt-4o", path="/v1")
    return sgl.Fallback([first, connected(Anthropic, "claude-opus-5", base_url=other.url)])


def run(backend, stream=False, **options):
    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        s += sgl.user("Hi")
        s += sgl.assistant(sgl.gen("a", **options))

    return program.run(backend=backend, stream=stream)


def test_the_first_one_that_can_answers(api, other, both):
    api.answers = [said("one")]
    state = run(both)
    assert state["a"] == "one"
    assert state.get_meta_info("a")["backend"] == "OpenAI('gpt-4o')"
    assert "failed" not in state.get_meta_info("a")
    assert not other.requests


@pytest.mark.parametrize(
    "answer",
    [
        failure(429, "Slow down"),
        failure(500, "Oops"),
        failure(503, "Busy"),
        Drop(),
        failure(504, "Late"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_may_pass_is_asked_of_the_next(api, other, both, answer, stream):
    api.answers, other.answers = [answer], [claude_said("two")]
    state = run(both, stream=stream)
    assert state["a"] == "two"
    meta = state.get_meta_info("a")
    assert meta["backend"] == "Anthropic('claude-opus-5')"
    ((name, error),) = meta["failed"]
    assert name == "OpenAI('gpt-4o')"
    assert "OpenAI('gpt-4o')" in error
    assert other.last["messages"] == [{"role": "user", "content": "Hi"}]
    assert other.last["system"] == "Be brief."


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (failure(400, "Bad"), sgl.BackendError),
        (failure(401, "No"), sgl.BackendError),
        (failure(429, "Pay", "insufficient_quota"), sgl.BackendError),
        (said("", refusal="No."), sgl.RefusalError),
        (Reply("[]"), sgl.BackendError),
    ],
)
def test_what_would_be_so_again_is_an_error_at_once(api, other, both, answer, error):
    api.answers = [answer]
    with pytest.raises(error):
        run(both)["a"]
    assert not other.requests


def test_an_answer_that_was_begun_is_not_begun_again(api, other, both):
    api.answers, other.answers = [Events([chunk("Hel")], end="drop")], [claude_said("two")]
    state = run(both, stream=True)
    pieces = []
    with pytest.raises(sgl.BackendError, match="connection failed"):
        pieces += state.text_iter("a")
    assert not other.requests
    assert run(both)["a"] == "two"  # nothing was shown of it


def test_the_last_ones_error_is_told(api, other, both):
    api.answers, other.answers = [failure(500, "Oops")], [failure(503, "Busy")]
    with pytest.raises(sgl.OverloadedError, match=r"Anthropic\('claude-opus-5'\): Busy"):
        run(both)["a"]


def test_choices_go_the_same_way(api, other, both):
    api.answers, other.answers = [failure(500, "Oops")], [claude_said('{"value": "cat"}')]

    @sgl.function
    def program(s):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pet", ["dog", "cat"]))

    state = program.run(backend=both)
    assert state["pet"] == "cat"


def test_what_one_of_them_cannot_is_refused_before_any_call(api, other, both):
    with pytest.raises(
        sgl.CapabilityError, match=r"Anthropic\('claude-opus-5'\) can't honour seed"
    ):
        run(both, seed=1)["a"]
    assert not api.requests
    assert not other.requests


def test_text_outside_turns_is_refused_as_ever(both):
    @sgl.function
    def program(s):
        s += "Some introduction."
        s += sgl.user("x")
        s += sgl.assistant(sgl.gen("a"))

    with pytest.raises(sgl.CapabilityError, match="outside the turns"):
        program.run(backend=both)["a"]


@pytest.mark.parametrize("backends", [[], "ab", None, [object(), object()]])
def test_a_list_that_is_none_is_refused(backends):
    with pytest.raises(sgl.ParameterError):
        sgl.Fallback(backends)


def test_a_node_may_run_on_another_provider(api, other, connected):
    first, second = (
        connected(OpenAI, "gpt-4o", path="/v1"),
        connected(Anthropic, "claude-opus-5", base_url=other.url),
    )
    api.answers, other.answers = [said("one")], [claude_said("two")]

    @sgl.function
    def program(s):
        s += sgl.user("Hi")
        s += sgl.assistant(sgl.gen("a"))
        s += sgl.user("Sure?")
        s += sgl.assistant(sgl.gen("b", backend=second))

    state = program.run(backend=first)
    assert (state["a"], state["b"]) == ("one", "two")


def test_the_next_one_is_asked_for_a_turn_as_the_first_is(api, other, connected):
    """Several generations of one call."""
    first, second = (
        connected(OpenAI, "gpt-4o", path="/v1"),
        connected(OpenAI, "gpt-4.1", base_url=f"{other.url}/v1"),
    )

    @sgl.function(num_api_spec_tokens=32)
    def program(s):
        s += sgl.user("Who?")
        s += sgl.assistant(
            "Name:" + sgl.gen("name", stop="\n") + "\nCity:" + sgl.gen("city", stop="\n")
        )

    api.answers, other.answers = [failure(503, "Busy")], [said("Name: Ann\nCity: Rome")]
    state = program.run(backend=sgl.Fallback([first, second]))
    assert (state["name"], state["city"]) == (" Ann", " Rome")
    assert len(other.requests) == 1


# -------------------------------------------------------- turns, where the rules of backends differ


def fields(s, /, **options):
    s += sgl.user("Who?")
    s += sgl.assistant(
        "Name:"
        + sgl.gen("name", stop=";", **options)
        + ";\nCity:"
        + sgl.gen("city", stop=";", **options)
    )


@pytest.fixture
def mixed(other, connected):
    """Makes a fallback from a model that can't continue a begun turn to one that can."""

    def make(**options):
        first = connected(OpenAI, "gpt-4o", path="/v1", **options)
        return sgl.Fallback([first, connected(Anthropic, "claude-haiku-4-5", base_url=other.url)])

    return make


def test_what_one_refuses_of_a_turn_is_refused_before_any_call(api, other, mixed):
    with pytest.raises(
        sgl.CapabilityError, match="after text that is already in the assistant's turn: 'Name:'"
    ):
        sgl.function(fields).run(backend=mixed())["city"]
    assert not api.requests
    assert not other.requests


def test_a_turn_is_asked_for_as_the_weakest_has_to_be(api, other, mixed):
    """The second generation is answered by the other one, which is shown the turn as the first
    would have been.
    """
    api.answers = [said(" Ann"), failure(503, "Busy")]
    other.answers = [claude_said(" Rome")]
    state = sgl.function(fields).run(backend=mixed(policy="emulate", profile="compatible"))
    assert (state["name"], state["city"]) == (" Ann", " Rome")
    assert [message["role"] for message in other.last["messages"]] == ["user", "assistant", "user"]


def test_an_engine_beside_an_api_keeps_to_the_rules_of_the_api(api, connected):
    scripted = sgl.ScriptedBackend({"Name:": " Ann", "City:": " Rome"})
    both = sgl.Fallback([connected(OpenAI, "gpt-4o", path="/v1"), scripted])
    with pytest.raises(sgl.CapabilityError, match="gpt-4o"):
        sgl.function(fields).run(backend=both)["city"]
    assert not api.requests
    assert sgl.function(fields).run(backend=sgl.Fallback([scripted, scripted]))["city"] == " Rome"


def test_rules_in_common_are_the_weakest_of_each():
    ways: tuple[BegunTurns, ...] = ("continued", "asked", "refused")
    for one, other in itertools.product(ways, ways):
        rules = combine_turn_rules([TurnRules(one, other, True), TurnRules(other, other)])
        assert rules == TurnRules(ways[max(ways.index(one), ways.index(other))], other)
