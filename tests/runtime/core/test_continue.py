"""Continued outputs: whatever the cut, the rest is what an unbroken run brings."""

from concurrent.futures import Future

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import (
    Choices,
    Delta,
    Number,
    ParameterError,
    Regex,
    RequestAbortedError,
    SamplingParams,
    SglError,
)
from tests.conformance.test_random_programs import EOS, TOKENS, model
from tests.counts import some
from tests.runtime import scripted
from tests.runtime.scripted import SteppedEngine, ended

PROMPT = "hello there"


def sampled(**more):
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": 40, **more})


DIGITS = tuple((TOKENS.index(character.encode()), 6.0) for character in "0123456789.,")
STOP = TOKENS.index(b"ab")
OBJECT = json_schema({
    "type": "object", "additionalProperties": False, "required": ["aba", "abab", "b"],
    "properties": {"aba": {"enum": ["ab ab ab", "ab ab b"]}, "abab": {"type": "integer"},
                   "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
})  # fmt: skip
CASES = {
    "greedy": (sampled(temperature=0.0), None),
    "seed": (sampled(seed=11), None),
    "seed, no end": (sampled(ignore_eos=True), None),
    "stop strings": (sampled(stop=("a   x", "ba0.5s", "zz"), ignore_eos=True), None),
    "long stop string": (sampled(stop=("gbé abb\na   aabbaba0.5t", "gbé abb\na   aabbaba0"), ignore_eos=True), None),
    "stop included": (sampled(stop=("ba", ",,"), include_stop=True, ignore_eos=True), None),
    "stop regex": (sampled(stop_regex=("[ab]{6}0\\.5$", "a +b"), ignore_eos=True), None),
    "stop ids": (sampled(stop_token_ids=(TOKENS.index(b"s"), TOKENS.index(b"y")), ignore_eos=True), None),
    "penalties": (sampled(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3, ignore_eos=True), None),
    "greedy penalties": (sampled(temperature=0.0, frequency_penalty=1.5, ignore_eos=True), None),
    "bias": (sampled(logit_bias=((STOP, 2.0), (STOP + 1, -6.0)), ignore_eos=True), None),
    "least": (sampled(min_tokens=25, stop=("a", "b")), None),
    "log-probabilities": (sampled(return_logprob=True, top_logprobs_num=2, ignore_eos=True), None),
    "prompt log-probabilities": (sampled(return_logprob=True, logprob_start_len=0, ignore_eos=True, stop=("aba",)), None),
    "filters": (sampled(top_k=5, top_p=0.9, min_p=0.02, ignore_eos=True), None),
    "regex": (sampled(), Regex("[ab]{3}( [ab:]{1,4}){2,4}\\.")),
    "regex and stop": (sampled(stop=("ab a",)), Regex("([ab]{3} ){2}[ab ]{20}")),
    "regex and log-probabilities": (sampled(return_logprob=True), Regex("ab ab[ab]{3}, ab ab")),
    "forced text": (sampled(), Regex("[ab] ab ab ab ab[bc] abab ab, ab: ab ab[01]: ab ab")),
    "choices": (sampled(), Choices(("abababababab", "ab ab ab ab", "bbabab ababab"))),
    "schema": (sampled(), OBJECT),
    "greedy schema, penalised": (sampled(temperature=0.0, frequency_penalty=0.5), OBJECT),
    "schema and log-probabilities": (sampled(return_logprob=True), OBJECT),
    "integer": (sampled(seed=3, logit_bias=DIGITS), Number("integer")),
    "number": (sampled(seed=3, logit_bias=DIGITS), Number("float")),
}  # fmt: skip


def played(engine, prompt, params, constraint=None, *, stream=False, output_ids=()):
    """The end of a generation, and its deltas."""
    if constraint is not None:
        engine.compile_grammar(constraint)
    _, events = engine.start(
        prompt, params, constraint=constraint, stream=stream, output_ids=output_ids
    )
    engine.drain()
    return ended(events), events[:-1]


def same(whole, again, deltas, cut):
    """Asserts that a continued generation is the whole, its log-probabilities are those behind the
    cut, and its deltas bring all of the text.
    """
    assert again.text == whole.text
    assert again.token_ids == whole.token_ids
    assert again.spans == whole.spans
    assert (again.finish_reason, again.matched) == (whole.finish_reason, whole.matched)
    assert again.usage.completion_tokens == whole.usage.completion_tokens
    assert again.usage.prompt_tokens == whole.usage.prompt_tokens
    assert again.usage.forced_tokens == whole.usage.forced_tokens
    assert [e.token_id for e in again.output_logprobs] == [
        e.token_id for e in whole.output_logprobs[cut:]
    ]
    for one, other in zip(again.output_logprobs, whole.output_logprobs[cut:]):
        assert one == other
    assert again.prompt_logprobs == whole.prompt_logprobs
    assert again.meta.get("continued_from", 0) == cut
    if deltas:
        told = "".join(d.text for d in deltas)
        assert whole.text.startswith(told)
        ids = tuple(i for d in deltas for i in d.token_ids)
        assert ids == whole.token_ids[: len(ids)]
        logprobs = tuple(entry for d in deltas for entry in d.logprobs)
        assert logprobs == again.output_logprobs[: len(logprobs)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_a_cut_anywhere_changes_nothing(case, stream):
    params, constraint = CASES[case]
    engine = SteppedEngine(model=model(), max_running=3, page_size=4)
    whole, _ = played(engine, PROMPT, params, constraint, stream=stream)
    assert len(whole.token_ids) > 2
    for cut in range(0, len(whole.token_ids) + 1, some(3, 1) if stream else some(8, 4)):
        again, deltas = played(
            engine, PROMPT, params, constraint, stream=stream, output_ids=list(whole.token_ids[:cut])
        )  # fmt: skip
        same(whole, again, deltas, cut)
    engine.check_empty()


def finished(engine, prompt, params, constraint, output_ids):
    done = Future()

    def sink(event):
        if isinstance(event, SglError):
            done.set_exception(event)
        elif not isinstance(event, Delta):
            done.set_result(event)

    engine.submit(prompt, params, constraint, sink=sink, output_ids=output_ids)
    return done.result(timeout=60)


def test_forced_text_of_several_letters_a_token_continues_as_it_was_spelled(small_engine):
    fields = {"name": {"type": "string", "maxLength": 4}, "favourite_city": {"enum": ["Paris", "London"]},
              "employed": {"type": "boolean"}}  # fmt: skip
    schema = json_schema({"type": "object", "properties": fields, "required": list(fields)})
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=80)
    whole = small_engine.complete("A person, as JSON: ", params, schema)
    assert whole.usage.forced_tokens > 10
    for cut in range(3, len(whole.token_ids) + 1, 13):
        again = finished(small_engine, "A person, as JSON: ", params, schema, whole.token_ids[:cut])
        assert (again.token_ids, again.text) == (whole.token_ids, whole.text), cut
        assert again.usage.forced_tokens == whole.usage.forced_tokens


CONSTRAINTS = [constraint for _, constraint in CASES.values() if constraint is not None]
STOPS = st.lists(st.text("ab: 0", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=some(15, 60), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_requests_cut_at_random_places_several_times(data):
    rng = data.draw(st.randoms(use_true_random=False))
    constraint = rng.choice([None, None, *CONSTRAINTS])
    params = sampled(
        seed=rng.randrange(2**64),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.6]),
        max_tokens=rng.randrange(1 if constraint is None else 24, 60),
        stop=data.draw(STOPS),
        stop_regex=rng.choice([(), ("[ab ]{9}",), ("b.?:$",)]),
        include_stop=rng.random() < 0.3,
        frequency_penalty=rng.choice([0.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.4]),
        logit_bias=rng.choice([(), ((3, 2.5),)]),
        return_logprob=rng.random() < 0.3,
        ignore_eos=rng.random() < 0.5,
    )
    stream = rng.random() < 0.5
    engine = SteppedEngine(
        model=model(), retract_every=rng.choice([0, 3]), seed=rng.randrange(99), max_running=4, page_size=rng.choice([1, 4, 16]),
        overlap=rng.random() < 0.7, jump_forward=rng.choice(["safe", "off"]),
    )  # fmt: skip
    prompt = "".join(rng.choice("ab:, 01") for _ in range(rng.randrange(1, 20)))
    whole, _ = played(engine, prompt, params, constraint, stream=stream)
    cut = 0
    for _ in range(rng.randrange(1, 4)):
        cut = rng.randrange(cut, len(whole.token_ids) + 1)
        beside = [
            engine.start("another", sampled(seed=i), stream=True) for i in range(rng.randrange(3))
        ]
        again, deltas = played(
            engine, prompt, params, constraint, stream=stream, output_ids=whole.token_ids[:cut]
        )  # fmt: skip
        same(whole, again, deltas, cut)
        assert all(ended(events) for _, events in beside)
    engine.check_empty()


def test_the_first_delta_is_what_was_given():
    engine = SteppedEngine(model=model())
    whole, first = played(engine, PROMPT, sampled(ignore_eos=True), stream=True)
    assert len(first) > 8
    given = tuple(i for d in first[:8] for i in d.token_ids)
    again, deltas = played(engine, PROMPT, sampled(ignore_eos=True), stream=True, output_ids=given)
    assert deltas[0] == Delta("".join(d.text for d in first[:8]), given)
    assert deltas[1:] == first[8:]
    assert again.text == whole.text


# ---------------------------------------------------------------------------------------- bad input


def ids_of(text):
    return [TOKENS.index(letter.encode()) for letter in text]


@pytest.mark.parametrize(
    ("params", "output_ids", "said"),
    [
        (sampled(), [3, EOS + 1], f"{EOS + 1} is no token id"),
        (sampled(), [3, -1], "-1 is no token id"),
        (sampled(), ["a"], "is no token id"),
        (sampled(), [[3]], "is no token id"),
        (sampled(), [2.5], "is no token id"),
        (sampled(), "abc", "str is no list of token ids"),
        (sampled(), 7, "int is no list of token ids"),
        (sampled(max_tokens=3), [3, 4, 5, 6], "4 ids; the output has at most 3"),
        (sampled(n=2), [3], "n is 2"),
    ],
)
def test_ids_that_can_be_none_are_refused_where_they_are_given(params, output_ids, said):
    engine = SteppedEngine(model=model())
    with pytest.raises(ParameterError, match=said) as caught:
        engine.start(PROMPT, params, output_ids=output_ids)
    assert caught.value.parameter == "output_ids"
    assert engine.open == 0


@pytest.mark.parametrize(
    ("params", "constraint", "output_ids", "said"),
    [
        (sampled(), None, [3, EOS, 4], f"ends with index 1 .by {EOS}., and 1 ids follow"),
        (
            sampled(stop=("cab",)),
            None,
            ids_of("xcabx"),
            "ends with index 3 .by 'cab'., and 1 ids follow",
        ),
        (
            sampled(stop_regex=("c.b",)),
            None,
            ids_of("xcabxy"),
            "ends with index 3 .by 'c.b'., and 2 ids follow",
        ),
        (sampled(), Regex("[a-f]+ x"), ids_of("abq"), "at index 2 can't be"),
        (
            sampled(),
            Regex("[a-f]+ x"),
            ids_of("ab xx"),
            "ends with index 3 .by its grammar., and 1 ids follow",
        ),
        (sampled(stop=("q",)), Regex("abc?"), ids_of("abq"), "at index 2 can't be"),
    ],
)
def test_ids_that_no_output_has_fail_the_request_alone(params, constraint, output_ids, said):
    engine = SteppedEngine(model=model())
    beside = engine.start(PROMPT, sampled())[1]
    error, _ = played(engine, PROMPT, params, constraint, output_ids=output_ids)
    assert isinstance(error, ParameterError)
    assert error.parameter == "output_ids"
    with pytest.raises(ParameterError, match=said):
        raise error
    assert ended(beside).token_ids
    assert engine.open == 0
    engine.check_empty()


def test_an_output_that_was_whole_ends_as_it_did():
    engine = SteppedEngine(model=model())
    for params, text, end in (
        (sampled(stop=("cab",)), "xcab", ("x", "stop", "cab")),
        (sampled(max_tokens=4), "abcd", ("abcd", "length", None)),
        (sampled(stop_token_ids=(TOKENS.index(b"c"),)), "abc", ("ab", "stop", TOKENS.index(b"c"))),
    ):
        steps = engine.loop.steps
        generation, _ = played(engine, PROMPT, params, output_ids=ids_of(text))
        assert (generation.text, generation.finish_reason, generation.matched) == end
        assert generation.token_ids == tuple(ids_of(text))
        assert engine.loop.steps - steps == 1  # its prompt is computed, nothing is drawn


def test_one_that_is_aborted_before_it_continues_has_what_was_given(monkeypatch):
    later = []
    monkeypatch.setattr(scripted.Inline, "submit", lambda self, *work: later.append(work))
    engine = SteppedEngine(model=model())
    ticket, events = engine.start(PROMPT, sampled(), output_ids=ids_of("abc"))
    engine.drain()
    ticket.abort()
    engine.drain()
    for work, *arguments in later:
        work(*arguments)
    engine.drain()
    error = ended(events)
    assert isinstance(error, RequestAbortedError)
    assert (error.partial.text, error.partial.token_ids) == ("abc", tuple(ids_of("abc")))
    engine.check_empty()


# -------------------------------------------------------------------------- SGLang's offline engine


def test_generate_takes_a_list_for_each_prompt(small_engine):
    settings = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True}
    prompts = ["The sea is", "In the mountains"]
    wholes = small_engine.generate(prompts, settings)
    cut = [whole["output_ids"][:5] for whole in wholes]
    agains = small_engine.generate(prompts, settings, output_ids=[cut[0], None])
    assert [again["output_ids"] for again in agains] == [whole["output_ids"] for whole in wholes]
    assert agains[0]["meta_info"]["continued_from"] == 5
    assert "continued_from" not in agains[1]["meta_info"]
    *_, last = small_engine.generate(prompts[1], settings, output_ids=cut[1], stream=True)
    assert last["text"] == wholes[1]["text"]
    with pytest.raises(sgl.ParameterError, match=r"output_ids.*3 entries for 2 prompts"):
        small_engine.generate(prompts, settings, output_ids=[[1], [2], [3]])
    with pytest.raises(sgl.ParameterError, match="output_ids"):
        small_engine.generate(prompts, settings, output_ids=[1, 2])
