"""Exact generations in programs: in forks, batches, with checks and samples, in this process, in a
child process and over HTTP.
"""

import re
from typing import Any, Literal, get_args

import pytest

import sglang_lite as sgl
from sglang_lite.lang.exact import ExactShares
from tests.server.conftest import serving

Answer = Literal[" one", " two", " three"]
QUESTION = "Question: how many moons?\nAnswer:"


@pytest.fixture(scope="module", params=["in process", "child", "http"])
def backend(request, small_file):
    in_process = request.param == "in process"
    engine = sgl.Engine(small_file, in_process=in_process, dtype="float32")
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


def test_bound_accepts_a_larger_gap(backend):
    @sgl.function
    def program(s, exact):
        s += QUESTION
        s += sgl.gen("few", type=Long, exact=exact, temperature=0)
        s += sgl.gen("many", regex="[a-z]{12,}", exact=exact, temperature=0, max_tokens=12)

    Long = Literal["the quick brown fox jumps", "a stitch in time saves"]
    with pytest.raises(sgl.ConstraintError, match="exact: after 512 beginnings") as caught:
        program.run(True, backend=backend)["few"]
    assert 'exact="bound"' in caught.value.hint
    state = program.run("bound", backend=backend, seed=1)
    assert state["few"] in get_args(Long)
    assert re.fullmatch("[a-z]{12,}", state["many"])
    for name in ("few", "many"):
        shares = state.exact(name)
        assert shares.gap > 0.002
        assert shares.rows <= 512
        assert state.raw(name) in shares.probs


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


def test_select_by_exact_takes_the_likeliest_text(backend):
    @sgl.function
    def program(s, way):
        s += "How many moons? "  # with a blank, which is spelled anew with the choice
        if way == "select":
            s += sgl.select("a", ["one", "two", "three"], choices_method=sgl.exact)
        else:
            s += sgl.gen("a", type=Bare, exact=True, heal=True, temperature=0)

    Bare = Literal["one", "two", "three"]
    # What a run gives its generations doesn't count for selections.
    chosen = program.run("select", backend=backend, max_new_tokens=1, top_p=0.5, stop="o", seed=1)
    drawn = program.run("gen", backend=backend)
    shares = chosen.exact("a")
    assert shares.probs == pytest.approx(drawn.exact("a").probs, abs=1e-4)
    assert chosen["a"] == drawn["a"] == max(shares.probs, key=shares.probs.__getitem__)
    assert chosen.text() == "How many moons? " + chosen["a"]
    with pytest.raises(sgl.ProgramError, match="'a' was not selected by scores") as caught:
        chosen.selection("a")
    assert caught.value.hint == "state.exact(name) has the probabilities of what sgl.exact chose."


def test_select_by_exact_draws_with_a_temperature(backend):
    @sgl.function
    def program(s, number):
        options = [" one", " two", " three"]
        s += QUESTION + sgl.gen("a", choices=options, temperature=1, choices_method="exact")

    picked = [program.run(number, backend=backend, seed=number)["a"] for number in range(12)]
    again = [program.run(number, backend=backend, seed=number)["a"] for number in range(12)]
    assert picked == again
    assert len(set(picked)) > 1


def test_what_select_by_exact_can_not_do_is_told(backend):
    @sgl.function
    def symbolic(s, options):
        s += QUESTION + sgl.select("a", options, choices_method=sgl.exact)

    several: Any = True  # a type checker refuses it
    with pytest.raises(
        sgl.ParameterError, match="choices_method: exact chooses one text"
    ) as caught:
        sgl.select("a", ["x", "y"], choices_method=sgl.exact, multi=several)
    assert caught.value.hint == "Leave multi out, or use another method."
    with pytest.raises(sgl.SglError, match="choices_method: exact needs choices that are known"):
        symbolic.trace()


def test_confidence_reads_the_exact_probabilities(backend):
    @sgl.function
    def program(s):
        s += QUESTION + sgl.gen("a", type=Answer, exact=True, n=2)
        s += sgl.gen("b", json_schema={"enum": [True, 12]}, exact=True)
        s += sgl.gen("c", regex="[a-z]+", exact=True)
        s += sgl.gen("d", json_schema={"enum": [[], 5]}, exact=True)

    state = program.run(backend=backend, seed=4)
    for sample in range(2):
        shares = state.exact("a", sample)
        sure = state.confidence("a", sample)
        assert sure.probs == shares.probs
        assert sure.prob == pytest.approx(shares.probs[state["a"][sample]])
        assert sure.mass == shares.log_mass
    shares = state.exact("b").probs
    assert state.confidence("b").probs == {True: shares["true"], 12: shares["12"]}
    assert state.confidence("c").probs is None
    least = state.exact("c").probs[state["c"]] * (1 - state.exact("c").gap)
    assert state.confidence("c").prob == pytest.approx(least)
    assert state.confidence("d").probs == state.exact("d").probs
    assert set(state.confidence("d").probs) == {"[]", "5"}
    assert state.confidence("d").parts == {}


def test_other_backends_refuse_to_select_by_it():
    @sgl.function
    def program(s):
        s += sgl.user("Hi?") + sgl.assistant(sgl.select("a", ["x", "y"], choices_method=sgl.exact))

    with pytest.raises(sgl.CapabilityError, match="can't honour exact"):
        program.run(backend=sgl.OpenAI("gpt-4o", api_key="x"))["a"]
