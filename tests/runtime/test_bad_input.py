"""Bad requests: each is refused alone, by its parameter's name; and a crash is everyone's to hear
of.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.program.nodes import Gen, Program
from sglang_lite.protocol import Delta, Generation, Media, Prompt, Regex, SamplingParams, Span
from sglang_lite.runtime.structured_output.compiler import Compiler
from tests.runtime import scripted

GREEDY = SamplingParams(temperature=0, max_tokens=4)
FOR_EVER = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def small():
    with Engine.of(scripted.loaded()) as engine:
        yield engine


BAD_PROMPTS = [
    ("", "prompt: is empty"),
    ([], "prompt: is empty"),
    ([0, 99_999], "input_ids: 99999 is no token id"),
    ([-1], "input_ids: -1"),
    ([10**5000], "input_ids: a huge number"),
    ([True], "input_ids: True"),
    ([5, True], "input_ids: True"),
    (["a"], "input_ids: 'a'"),
    ([1.5], "input_ids: 1.5"),
    ([[1]], r"input_ids: \[1\]"),
    (b"abc", "prompt: bytes is neither text nor"),
    (None, "prompt: NoneType"),
    (7, "prompt: int"),
    ("a\ud800b", "prompt: is no valid Unicode"),
    (Prompt((Span("a\udfffb"),)), "prompt: is no valid Unicode"),
    (Prompt((Span("a", (99_999,)),)), "input_ids: 99999"),
    (Prompt((Span("x"),), images=(Media(b"", "image/png"),)), "prompt: .* can't see images"),
    ([1, [2]], r"input_ids: \[2\] is no token id"),
    ([5] * 9000, "prompt: 9,000 tokens long; smollm2-135m takes 8,192"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_bad_prompts_are_refused(engine, prompt, message):
    with pytest.raises(sgl.ParameterError, match=message):
        engine.complete(prompt)


BAD_PARAMS = [
    (dict(max_tokens=-1), "max_tokens: -1 is outside its range: at least 0"),
    (dict(max_tokens=2**40), "max_tokens: 1099511627776 is outside an engine's range: 0 to 2,147,483,647"),
    (dict(max_tokens=True), "max_tokens"),
    (dict(max_tokens=10**5000), "max_tokens: a huge number"),
    (dict(min_tokens=9, max_tokens=8), "min_tokens: 9 is more than max_tokens"),
    (dict(n=0), "n: 0"),
    (dict(n=257), "n: 257"),
    (dict(temperature=-0.1), "temperature"),
    (dict(temperature=float("nan")), "temperature: nan"),
    (dict(temperature=float("inf")), "temperature: inf"),
    (dict(temperature=10**400), r"temperature: 1000.*\.\.\."),
    (dict(temperature="hot"), "temperature: 'hot' is not a number"),
    (dict(top_p=0), "top_p: 0 is outside an engine's range: above 0, at most 1. 0 leaves no token; temperature=0 is"),
    (dict(top_p=1.5), "top_p"),
    (dict(top_k=-2), "top_k"),
    (dict(top_k=2.0), "top_k: 2.0 is not a whole number"),
    (dict(min_p=2), "min_p"),
    (dict(frequency_penalty=3), "frequency_penalty"),
    (dict(presence_penalty=float("nan")), "presence_penalty"),
    (dict(repetition_penalty=0), "repetition_penalty"),
    (dict(stop=("",)), "stop: '' is not a non-empty string"),
    (dict(stop="abc"), "stop: 'abc' is not a tuple or list of strings"),
    (dict(stop=(b"a",)), "stop"),
    (dict(stop=("a\ud800",)), "stop: .* has unpaired surrogates"),
    (dict(stop=tuple(map(str, range(5000)))), "stop: 5,000 entries, the limit is 64"),
    (dict(stop=("a" * 600,)), "stop: a string of 600 characters"),
    (dict(stop_token_ids=(-1,)), "stop_token_ids: -1 is outside its range: at least 0"),
    (dict(stop_token_ids=(49_152,)), "stop_token_ids: 49152 is no token id of this model"),
    (dict(stop_token_ids=7), "stop_token_ids: 7 is not a tuple or list of token ids"),
    (dict(stop_token_ids=tuple(range(2000))), "stop_token_ids: 2,000 entries"),
    (dict(stop_regex=("(",)), "stop_regex: .* is no regular expression"),
    (dict(stop_regex=("",)), "stop_regex"),
    (dict(stop_regex=("(?r)a",)), "stop_regex: .* is no regular expression"),
    (dict(stop_regex=("a" * 257,)), "stop_regex: a pattern of 257 bytes"),
    (dict(stop_regex=("é" * 129,)), "stop_regex: a pattern of 258 bytes"),
    (dict(stop_regex=("a",) * 33), "stop_regex: 33 entries"),
    (dict(stop_regex=("((a{1000}){1000}){1000}",)), "stop_regex: .* repeats 1,000,000,000 times"),
    (dict(token_ids_logprob=(49_152,)), "token_ids_logprob"),
    (dict(top_logprobs_num=1000), "top_logprobs_num"),
    (dict(logprob_start_len=-2), "logprob_start_len"),
    (dict(logit_bias=((99_999, 1.0),)), "logit_bias: 99999 is no token id"),
    (dict(logit_bias=((1, float("inf")),)), "logit_bias"),
    (dict(logit_bias={1: 2.0}), "logit_bias: {1: 2.0} is not a tuple or list of pairs"),
    (dict(logit_bias=((1, 1e5),)), "logit_bias: 100000.0 is outside an engine's range: -10,000 to 10,000"),
    (dict(logit_bias=((1,),)), "logit_bias"),
    (dict(logit_bias=tuple((i, 1.0) for i in range(5000))), "logit_bias: 5,000 entries"),
    (dict(seed=1.5), "seed"),
    (dict(ignore_eos=1), "ignore_eos: 1 is neither True nor False"),
    (dict(return_logprob="yes"), "return_logprob"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "message"), BAD_PARAMS, ids=range(len(BAD_PARAMS)))
def test_bad_parameters_are_refused_by_name(engine, params, message):
    with pytest.raises(sgl.ParameterError, match=message) as caught:
        engine.submit("x", SamplingParams(**params), sink=print)
    assert [caught.value.parameter] == list(params)[:1]
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(modle="x"), "modle: Engine has no such parameter"),
        (dict(page_size=0), "page_size"),
        (dict(page_size=65), "page_size"),
        (dict(max_running="8"), "max_running"),
        (dict(dtype="int7"), "dtype"),
        (dict(load_format="magic"), "load_format"),
        (dict(step_tokens=8, max_running=16), "step_tokens"),
        (dict(context_length=0), "context_length"),
        (dict(deterministic="yes"), "deterministic: 'yes' is not one of True, False"),
        (dict(log_level="loud"), "log_level"),
        (dict(context_length=100_000), "context_length: 100000 is more than the model's 8192"),
    ],
)
def test_bad_settings_of_an_engine_are_refused_by_name(config, message):
    with pytest.raises(sgl.ParameterError, match=message):
        sgl.Engine(**config, in_process=True)


@pytest.mark.parametrize("name", ["context_length", "max_total_tokens"])
def test_a_limit_that_holds_no_usual_answer_is_told(name, caplog):
    with Engine.of(scripted.loaded(), **{name: 128}):
        assert caplog.messages == []
    with Engine.of(scripted.loaded(), **{name: 16}):
        (told,) = caplog.messages
    assert told.startswith(f"{name}: 16 tokens are all that a prompt and its answer can have")
    assert told.endswith("an answer may take 128. Raise it, or leave it out.")


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(alphabet=st.characters(), max_size=200),
        st.binary(max_size=200).map(lambda b: b.decode("latin-1")),
    )
)
def test_any_text_is_a_prompt_or_refused(engine, text):
    with contextlib.suppress(sgl.ParameterError):
        assert all(0 <= i < engine.vocab_size for i in engine.core.builder.prompt_ids(text))


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(0, 49_151), min_size=1, max_size=40))
def test_any_tokens_are_a_prompt(engine, ids):
    generation = engine.complete(
        ids, SamplingParams(max_tokens=2, ignore_eos=True, return_logprob=True, logprob_start_len=0)
    )
    assert len(generation.token_ids) == 2
    assert len(generation.prompt_logprobs) == len(ids) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(priority="high"), "priority: 'high' is no int"),
        (dict(namespace=["a"]), r"namespace: \['a'\] is no str"),
        (
            dict(params=SamplingParams(return_logprob=True, logprob_start_len=3)),
            "logprob_start_len: 3 is beyond the prompt's 2",
        ),
    ],
)
def test_what_would_break_the_scheduler_is_refused(small, options, message):
    with pytest.raises(sgl.ParameterError, match=message):
        small.submit("ab", sink=print, **options)


def test_ids_of_no_token_are_refused_on_every_path(small):
    bad = Prompt((Span("a"), Span("b", (99,))))
    with pytest.raises(sgl.ParameterError, match="input_ids: 99"):
        small.score(bad, ["c"])
    with pytest.raises(sgl.ParameterError, match="input_ids: 99"):
        small.play(bad, Program((Gen("x"),)))
    assert isinstance(small.complete("ab", GREEDY), Generation)


def test_the_bad_ones_among_good_ones_are_refused_alone(small):
    results, done, refused = [], threading.Event(), 0

    def sink(event):
        results.append(event)
        if len(results) == 8:
            done.set()

    for i in range(24):
        params = [
            GREEDY,
            SamplingParams(temperature=101),
            SamplingParams(logit_bias=((10**6, 1.0),)),
        ][i % 3]
        try:
            small.submit("ab", params, sink=sink)
        except sgl.ParameterError:
            refused += 1
    assert done.wait(60)
    assert refused == 16
    assert {g.text for g in results} == {small.complete("ab", GREEDY).text}


@pytest.mark.parametrize("rid", ["unknown", "", "finished", 7, None])
def test_aborting_what_does_not_run_is_refused(small, rid):
    small.generate("ab", {"max_new_tokens": 1}, rid="finished")
    with pytest.raises(
        sgl.ParameterError, match=r"rid: .* is no request that is waiting or running"
    ):
        small.abort(rid)


def test_more_samples_than_may_wait_are_refused_at_once():
    with Engine.of(scripted.loaded(), max_running=2, max_queued=2) as engine:
        with pytest.raises(sgl.OverloadedError):
            engine.submit("ab", SamplingParams(n=5), sink=lambda e: None)
        assert engine.generate("ab", {"n": 4, "max_new_tokens": 2})  # nothing is left counted


# ------------------------------------------------------------------------- one end for each request


class Collector:
    """A sink that knows when `count` last events have come."""

    def __init__(self, count=1):
        self.events, self._left, self._done = [], count, threading.Event()

    def __call__(self, event):
        self.events.append(event)
        if not isinstance(event, Delta):
            self._left -= 1
            if not self._left:
                self._done.set()

    def ends(self):
        assert self._done.wait(60)
        return [event for event in self.events if not isinstance(event, Delta)]


@pytest.fixture
def slow_compiler(monkeypatch):
    """Compiling waits until the event is set."""
    go, original = threading.Event(), Compiler.build

    def build(self, constraint):
        assert go.wait(60)
        return original(self, constraint)

    monkeypatch.setattr(Compiler, "build", build)
    yield go
    go.set()


def test_a_request_that_is_aborted_while_it_is_compiled_ends_once(slow_compiler):
    every = []
    with Engine.of(scripted.loaded(), max_running=1, max_queued=1) as engine:
        for i in range(5):  # more in all than may be open
            slow_compiler.clear()
            sinks = Collector(), Collector()
            every += sinks
            tickets = [
                engine.submit("ab", GREEDY, Regex(p), sink=s)
                for p, s in zip(("[ab]+" * i + "a", "(" * i + "("), sinks)
            ]
            for ticket in tickets:
                ticket.abort()
            assert [type(s.ends()[0]) for s in sinks] == [sgl.RequestAbortedError] * 2
            slow_compiler.set()
    assert [len(s.ends()) for s in every] == [1] * 10


def test_closing_ends_what_is_compiled_and_what_waits_to_be(slow_compiler, monkeypatch):
    engine = Engine.of(scripted.loaded())
    shutdown = ThreadPoolExecutor.shutdown
    monkeypatch.setattr(
        ThreadPoolExecutor,
        "shutdown",
        lambda pool, **more: (slow_compiler.set(), shutdown(pool, **more)),
    )
    sinks = [Collector(2) for _ in range(6)]
    for i, sink in enumerate(sinks):
        engine.submit("ab", SamplingParams(n=2, max_tokens=3), Regex("[ab]+" + "a" * i), sink=sink)
    engine.close()
    assert all(len(sink.ends()) == 2 for sink in sinks)
    for call in (
        lambda: engine.submit("ab", sink=print),
        lambda: engine.submit("ab", constraint=Regex("a"), sink=print),
        lambda: engine.generate("ab"),
        lambda: engine.score("ab", ["c"]),
        lambda: engine.update_weights("smollm2-135m"),
        engine.stats,
        engine.flush_cache,
        engine.get_server_info,
    ):
        with pytest.raises(sgl.EngineClosedError):
            call()


def test_a_crash_is_told_to_everyone_and_to_no_other_engine(monkeypatch, caplog):
    class Crashing(scripted.ScriptedModel):
        calls = 0

        def forward(self, ids, positions, plan, cache):
            self.calls += 1
            if self.calls > 5:
                raise ArithmeticError("out of everything")
            return super().forward(ids, positions, plan, cache)

    loaded = scripted.loaded()
    fields = {name: getattr(loaded, name) for name in loaded.__slots__}
    engine = Engine.of(type(loaded)(**{**fields, "model": Crashing()}), max_running=2)
    sinks = []
    with contextlib.suppress(sgl.EngineClosedError):  # as it may have crashed before the last one
        for _ in range(6):
            sink = Collector()
            engine.submit("ab", FOR_EVER, sink=sink, stream=True)
            sinks.append(sink)
    for sink in sinks:
        (error,) = sink.ends()
        assert isinstance(error, sgl.EngineClosedError)
        assert isinstance(error.__cause__, ArithmeticError)
    with pytest.raises(sgl.EngineClosedError) as caught:
        engine.complete("ab")
    assert isinstance(caught.value.__cause__, ArithmeticError)
    engine.close()
    with Engine.of(scripted.loaded()) as other:
        assert isinstance(other.complete("ab", GREEDY), Generation)


def test_a_sink_that_fails_harms_nobody_else(small, caplog):
    def bad(event):
        raise LookupError("mine")

    small.submit("ab", SamplingParams(max_tokens=5), sink=bad, stream=True)
    assert len(small.complete("ab", SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5
    assert "sink of request" in caplog.text
