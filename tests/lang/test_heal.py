"""Healed prompts in programs: in forks, batches, chats and later turns, in this process, in a child
process and over HTTP.
"""

from typing import Literal

import pytest

import sglang_lite as sgl
from tests.server.conftest import serving

TEXT = "The river runs to the sea, and the boat goes with it."


@pytest.fixture(scope="module", params=["in process", "child", "replicas", "http"])
def backend(request, small_file):
    settings = {"dp_size": 2} if request.param == "replicas" else {}
    with sgl.Engine(small_file, in_process=request.param == "in process", **settings) as engine:
        if request.param != "http":
            yield engine
            return
        with serving(engine) as url:
            endpoint = sgl.RuntimeEndpoint(url)
            yield endpoint
            endpoint.shutdown()


@sgl.function
def go_on(s, text, /, **options):
    s += text + sgl.gen("more", temperature=0, ignore_eos=True, **options)


def test_a_cut_text_goes_on_as_the_uncut_one(backend):
    whole = go_on.run(TEXT, backend=backend, max_new_tokens=16)["more"]
    cuts = [(TEXT + whole[:count],) for count in range(1, 17)]
    states = go_on.run_batch(cuts, backend=backend, max_new_tokens=12, heal=True)
    right = [state["more"][:8] == whole[count:][:8] for count, state in enumerate(states, 1)]
    assert sum(right) >= 15
    plain = go_on.run_batch(cuts, backend=backend, max_new_tokens=12)
    assert sum(
        state["more"][:8] == whole[count:][:8] for count, state in enumerate(plain, 1)
    ) < sum(right)


def test_the_metadata_tell_what_was_spelled_anew(backend):
    state = go_on.run("The river ru", backend=backend, max_new_tokens=3, heal=True)
    found = state.get_meta_info("more")["healed"]
    assert found["end"] == " ru"
    assert state["more"].startswith(found["begun"])
    assert found["rows"] >= 1


def test_later_turns_forks_and_streams(backend):
    @sgl.function
    def program(s):
        s += "The river ru" + sgl.gen("a", max_tokens=4, seed=1, heal=True)
        s += " and the bo" + sgl.gen("b", max_tokens=4, seed=2, heal=True, n=3)
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += " wi" + sgl.gen("c", max_tokens=3, seed=i, heal=True, regex="[a-z ]{1,9}")
        forks.join()
        s += sgl.user("Hello") + sgl.assistant(sgl.gen("d", max_tokens=3, seed=4, heal=True))

    first, second = program.run(backend=backend), program.run(backend=backend)
    assert first.text() == second.text()
    assert first["b"] == second["b"]
    assert "healed" not in first.get_meta_info("d")  # behind a control token
    streamed = program.run(backend=backend, stream=True)
    assert "".join(streamed.text_iter()) == streamed.text() == first.text()


def test_a_run_heals_all_its_generations(backend):
    @sgl.function
    def program(s):
        s += "The river ru" + sgl.gen("a", max_tokens=2, seed=1)
        s += " bo" + sgl.gen("b", max_tokens=2, seed=1)
        s += " wi" + sgl.gen("c", max_tokens=2, seed=1, heal=False)

    state = program.run(backend=backend, heal=True)
    assert [name for name in "abc" if "healed" in state.get_meta_info(name)] == ["a", "b"]


def test_an_exact_draw_behind_a_blank(backend):
    @sgl.function
    def program(s):
        s += "The answer is " + sgl.gen(
            "a", type=Literal["yes", "no"], exact=True, heal=True, seed=1
        )
        s += ". It is " + sgl.gen("b", regex="[a-z]{1,3}", exact=True, heal=True, seed=1)

    state = program.run(backend=backend)
    assert set(state.exact("a").probs) == {"yes", "no"}
    assert state.text() == f"The answer is {state['a']}. It is {state['b']}"


def test_text_inside_a_grammar_stays(backend):
    @sgl.function
    def program(s):
        s += "The answer is "
        with s.grammar(sgl.Regex(r"[a-z]{3} [a-z]{2}")):
            s += sgl.gen("a", regex="[a-z]{3}") + " " + sgl.gen("b", regex="[a-z]{2}")

    state = program.run(backend=backend, heal=True)
    assert state.text() == f"The answer is {state['a']} {state['b']}"


def test_a_remote_backend_that_cannot_heal_says_so():
    with (
        sgl.server_for_tests(compatible=True) as server,
        pytest.raises(sgl.SglError, match="heal"),
    ):
        go_on.run("The river ru", backend=sgl.OpenAI("one", **server.openai), heal=True)["more"]
