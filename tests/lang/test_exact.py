"""Exact generations in programs: in forks, batches, with checks and samples, in this process, in a
child process and over HTTP.
"""

import re
from typing import Literal

import pytest

import sglang_lite as sgl
from sglang_lite.lang.exact import ExactShares
from tests.server.conftest import serving

Answer = Literal[" one", " two", " three"]
QUESTION = "Question: how many moons?\nAnswer:"


@pytest.fixture(scope="module", params=["in process", "child", "http"])
def backend(request, small_file):
    engine = sgl.Engine(small_file, in_process=request.param == "in process")
    with engine:
        if request.param != "http":
            yield engine
            return
        with serving(engine) as url:
            endpoint = sgl.RuntimeEndpoint(url)
            yield endpoint
            endpoint.shutdown()


@sgl.function
def ask(s, /, **options):
    s += QUESTION + sgl.gen("answer", type=Answer, exact=True, **options)
    s += "." + sgl.gen("more", max_tokens=2, temperature=0)


def test_the_shares_are_told(backend):
    state = ask.run(backend=backend, temperature=0)
    shares = state.exact("answer")
    assert isinstance(shares, ExactShares)
    assert set(shares.probs) == {" one", " two", " three"}
    assert sum(shares.probs.values()) == pytest.approx(1)
    assert state["answer"] == max(shares.probs, key=shares.probs.__getitem__)
    assert shares.log_mass < 0 <= shares.gap < 0.002
    assert state.text().startswith(QUESTION + state["answer"] + ".")
    assert state.get_meta_info("answer")["exact"]["probs"] == shares.probs


def test_a_seed_gives_one_answer(backend):
    @sgl.function
    def program(s, number):
        s += QUESTION + sgl.gen("answer", type=Answer, exact=True, seed=number)

    alone = [program.run(number, backend=backend)["answer"] for number in range(12)]
    batch = program.run_batch([(number,) for number in range(12)], backend=backend)
    assert [state["answer"] for state in batch] == alone
    assert len(set(alone)) > 1


def test_open_texts_are_drawn(backend):
    @sgl.function
    def program(s, number):
        s += QUESTION + sgl.gen("word", regex="[a-z]+", exact=True, seed=number)
        s += sgl.gen("more", regex="[^a-z]{1,3}", exact=True, seed=number)

    alone = [program.run(number, backend=backend) for number in range(8)]
    batch = program.run_batch([(number,) for number in range(8)], backend=backend)
    assert [state.text() for state in batch] == [state.text() for state in alone]
    assert len({state["word"] for state in alone}) > 2
    for state in alone:
        assert re.fullmatch("[a-z]+", state["word"])
        assert re.fullmatch("[^a-z]{1,3}", state["more"])
        shares = state.exact("word")
        assert state["word"] in shares.probs
        assert shares.tries >= 1
        assert shares.rows >= shares.steps >= 2


def test_samples_forks_and_checks(backend):
    @sgl.function
    def program(s):
        s += QUESTION
        forks = s.fork(2)
        left, right = forks
        left += sgl.gen("a", type=Answer, exact=True, n=3, seed=1)
        right += sgl.gen(
            "b", type=Answer, exact=True, seed=2, retries=40, check=lambda value: value == " two"
        )
        assert len(left["a"]) == 3
        assert left.exact("a", 2) == left.exact("a")
        assert right["b"] == " two"
        forks.join()
        s += sgl.gen("c", type=bool, exact=True, temperature=0)

    state = program.run(backend=backend)
    assert state["c"] in (True, False)
    assert set(state.exact("c").probs) == {"true", "false"}


def test_a_stream_sends_the_whole_answer(backend):
    state = ask.run(backend=backend, stream=True, seed=3)
    assert "".join(state.text_iter("answer")) == ask.run(backend=backend, seed=3)["answer"]


def test_what_was_not_drawn_exactly_has_no_shares(backend):
    @sgl.function
    def program(s):
        s += QUESTION + sgl.gen("a", type=Answer) + sgl.gen("b", type=Answer, exact=True)

    state = program.run(backend=backend)
    with pytest.raises(sgl.ProgramError, match="'a' was not drawn exactly") as caught:
        state.exact("a")
    assert caught.value.hint == "Use gen(exact=True)."
    with pytest.raises(sgl.ParameterError, match="sample: 1 is no index of 1 samples"):
        state.exact("b", 1)


def test_mistakes_are_told_where_they_are(backend):
    @sgl.function
    def program(s):
        s += QUESTION + sgl.gen("a", regex="[0-9]+", exact=True, temperature=0.5)

    with pytest.raises(sgl.ParameterError, match=r"exact: the constraint allows more than 64") as e:
        program.run(backend=backend)["a"]
    assert e.value.where is not None
    assert e.value.where.file.endswith("test_exact.py")


def test_a_grammar_over_several_nodes_is_refused(backend):
    @sgl.function
    def program(s):
        with s.grammar(sgl.Regex("(a|b)(c|d)")):
            s += sgl.gen("a", type=Literal["a", "b"], exact=True) + sgl.gen("b")

    with pytest.raises(sgl.SglError, match="exact"):
        program.run(backend=backend)["a"]


def test_other_backends_refuse_it():
    with pytest.raises(sgl.SglError, match="exact"):
        ask.run(backend=sgl.OpenAI("gpt-4o", api_key="x"))["answer"]
