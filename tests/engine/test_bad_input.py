"""Both forms of an engine say the same of whatever they are asked: results, errors and where those
are raised.
"""

import asyncio
from dataclasses import asdict, replace

import msgspec
import pytest

import sglang_lite as sgl
from sglang_lite.errors import SglError
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    Join,
    Program,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import (
    Delta,
    Ebnf,
    Generation,
    JsonSchema,
    Media,
    Played,
    Prompt,
    Regex,
    SamplingParams,
    Selection,
    Span,
    Usage,
)
from sglang_lite.runtime.core.submission import MAX_QUEUED
from tests.engine.collector import Collector

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.5, seed=7, max_tokens=6, ignore_eos=True)
IMAGE = Media(b"x", "image/png")


def plain(value):
    """Parts of a value that must be the same: not times, not what the cache held."""
    match value:
        case SglError():
            return (
                "error",
                type(value),
                str(value),
                getattr(value, "parameter", None),
                plain(getattr(value, "partial", None)),
            )
        case Generation() | Selection():
            meta = {k: v for k, v in value.meta.items() if k != "cache_miss"}
            return msgspec.structs.replace(value, usage=Usage(), meta=meta)
        case Played():
            return (value.path, value.name, plain(value.event))
        case dict():
            left = {
                "e2e_latency",
                "cached_tokens",
                "cached_tokens_details",
                "cache_miss",
                "id",
                "queue_time",
                "first_token_time",
                "latency",
            }
            return {k: plain(v) for k, v in value.items() if k not in left}
        case list() | tuple():
            return [plain(each) for each in value]
    return value


def outcome(call, engine):
    """Result of a call, or what it raises."""
    try:
        return plain(call(engine))
    except Exception as error:
        return (
            "raised",
            plain(error) if isinstance(error, SglError) else (type(error), str(error)),
        )


def told(submit, count=1):
    """The events of something submitted; deltas of a sample as one, as their cuts may differ."""

    def call(engine):
        sink = Collector(count)
        submit(engine, sink)
        ends = sink.ends()
        texts = {}
        for event in sink.events:
            inner = event.event if isinstance(event, Played) else event
            if isinstance(inner, Delta):
                key = (getattr(event, "path", None), getattr(event, "name", None), inner.index)
                texts[key] = texts.get(key, "") + inner.text
        played = [
            e for e in sink.events if isinstance(e, Played) and not isinstance(e.event, Delta)
        ]
        return [texts, sorted(map(plain, played), key=repr), sorted(map(plain, ends), key=repr)]

    return call


def streamed(engine, *args, **options):
    *_, last = engine.generate(*args, **options, stream=True)
    return last


def gathered(*args, **options):
    return lambda engine: asyncio.run(engine.async_generate(*args, **options))


def program(*nodes, prompt="ab", **options):
    return told(
        lambda engine, sink: engine.run_program(prompt, Program(nodes), sink=sink, **options)
    )


def opened(*steps):
    """An open program that grows by steps."""

    def submit(engine, sink):
        growing = engine.open_program(sink=sink, stream=True)
        for path, nodes in steps:
            growing.extend(path, nodes)
        growing.close()

    return told(submit)


TREE = (
    Gen("x", GREEDY), Text("c"), Fork(((Gen("l", SEEDED),), (Select("r", ("d", "ef")),))), Join(), Gen("y", GREEDY),
)  # fmt: skip
MANY = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=5)
LOGPROBS = SamplingParams(
    temperature=0, max_tokens=4, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
)

RESULTS = {
    "complete": lambda e: e.complete("ab", GREEDY),
    "complete ids": lambda e: e.complete([5, 6], SEEDED),
    "complete spans": lambda e: e.complete(Prompt((Span("a"), Span("b", (66,)))), GREEDY),
    "complete logprobs": lambda e: e.complete("abcde", LOGPROBS),
    "complete defaults": lambda e: e.complete("ab", SamplingParams(seed=1)),
    "constraint": lambda e: e.complete("ab", GREEDY, Regex("[ab]{3}")),
    "schema": lambda e: e.complete("ab", SamplingParams(max_tokens=40, seed=2), JsonSchema('{"enum": ["a", 7]}')),
    "submit": told(lambda e, sink: e.submit("ab", GREEDY, sink=sink)),
    "submit stream": told(lambda e, sink: e.submit("ab", GREEDY, sink=sink, stream=True)),
    "submit n": told(lambda e, sink: e.submit("ab", MANY, sink=sink, stream=True), 3),
    "generate": lambda e: e.generate("ab", {"max_new_tokens": 5, "temperature": 0}),
    "generate batch": lambda e: e.generate(["ab", "c"], {"max_new_tokens": 5, "temperature": 0}),
    "generate n": lambda e: e.generate("ab", {"max_new_tokens": 5, "n": 2, "sampling_seed": 5}),
    "generate ids": lambda e: e.generate(input_ids=[[5, 6], [7]], sampling_params={"max_new_tokens": 3, "temperature": 0}),
    "generate logprobs": lambda e: e.generate(
        "abc", {"max_new_tokens": 3, "temperature": 0}, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    ),
    "generate stream": lambda e: streamed(e, "ab", {"max_new_tokens": 5, "temperature": 0}),
    "generate json": lambda e: e.generate("ab", {"max_new_tokens": 30, "temperature": 0, "regex": "[a-c]{4}"}),
    "async": gathered("ab", {"max_new_tokens": 5, "temperature": 0}),
    "async batch": gathered(["ab", "cd"], {"max_new_tokens": 5, "temperature": 0}),
    "select": lambda e: e.select("ab", ["c", "de"]),
    "select unconditional": lambda e: e.select("ab", ["c", "de"], unconditional=True),
    "score": lambda e: e.score("ab", ["c", "de"]),
    "score nothing before": lambda e: e.score("", ["c", "de"]),
    "submit_select": told(lambda e, sink: e.submit_select("ab", ["c", "de"], sink=sink)),
    "play": lambda e: e.play("ab", Program(TREE)),
    "run_program": program(*TREE),
    "run_program stream": program(*TREE, stream=True),
    "open_program": opened(((), TREE[:2]), ((), TREE[2:])),
    "open nothing": opened(),
    "grammar block": program(GrammarBegin(Regex("(ab)+c")), Gen("x", SEEDED), GrammarEnd()),
    "chat_template": lambda e: e.chat_template(),
    "tokenizer": lambda e: (e.tokenizer.encode("abc"), e.tokenizer.decode([5, 6]), e.vocab_size, e.context_length),
    "matches": lambda e: [sgl.grammar.matches(Regex("a+"), text, model=e) for text in ("aa", "b")],
    "check": lambda e: replace(sgl.grammar.check(JsonSchema('{"type": "integer"}'), model=e), seconds=0.0),
    "config": lambda e: {k: v for k, v in asdict(e.config).items() if k != "in_process"},
    "server info": lambda e: {
        # Only a process can be started again.
        k: sorted(v[0].keys() - {"restarts"}) if k == "internal_states" else v for k, v in e.get_server_info().items() if k != "in_process"
    },
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RESULTS)
def test_both_forms_give_the_same(own, here, name):
    assert outcome(RESULTS[name], own) == plain(RESULTS[name](here))


def odd(value):
    """A value of any type, for a checker."""
    return value


def forced(**fields):
    """Parameters that nobody has checked."""
    params = SamplingParams()
    for name, value in fields.items():
        msgspec.structs.force_setattr(params, name, value)
    return params


def bad_params(**fields):
    return lambda e: e.submit("ab", forced(**fields), sink=Collector())


def in_fork(**fields):
    return program(Fork(((Text("c"),), (Gen("x", forced(**fields)),))))


ERRORS = {
    "prompt empty": lambda e: e.complete(""),
    "prompt bytes": lambda e: e.complete(b"a"),
    "prompt none": lambda e: e.submit(None, sink=Collector()),
    "prompt surrogate": lambda e: e.complete("a\ud800"),
    "prompt span surrogate": lambda e: e.complete(Prompt((Span("a\udfff"),))),
    "prompt long": lambda e: e.complete([5] * 3000),
    "prompt ids": lambda e: e.complete([5, 96]),
    "prompt floats": lambda e: e.complete([0.5]),
    "prompt image": lambda e: e.complete(Prompt((Span("a"),), images=(IMAGE,))),
    "prompt object": lambda e: e.complete(object()),
    "span of a list": lambda e: e.complete(Prompt(odd(["a"]))),
    "params none": lambda e: e.complete("ab", None),
    "params dict": lambda e: e.complete("ab", {"max_tokens": 3}),
    "params max_tokens": bad_params(max_tokens=-1),
    "params object": bad_params(temperature=object()),
    "params stop": bad_params(stop=7),
    "params huge": bad_params(seed=2**80),
    "params n": bad_params(n="2"),
    "params list in bias": bad_params(logit_bias=[[1, "a"]]),
    "params regex": bad_params(stop_regex=("(",)),
    "complete n": lambda e: e.complete("ab", SamplingParams(n=2)),
    "priority": lambda e: e.submit("ab", sink=Collector(), priority="high"),
    "namespace": lambda e: e.submit("ab", sink=Collector(), namespace=7),
    "constraint bad": lambda e: e.complete("ab", GREEDY, Regex("(")),
    "constraint told": told(lambda e, s: e.submit("ab", GREEDY, Regex("("), sink=s)),
    "constraint n": told(lambda e, s: e.submit("ab", MANY, Ebnf("root ::="), sink=s), 3),
    "schema": lambda e: e.complete("ab", GREEDY, JsonSchema('{"type": "nothing"}')),
    "schema pointer": lambda e: e.compile_grammar(JsonSchema('{"properties": {"a": {"type": 7}}}')),
    "compile": lambda e: e.compile_grammar(Regex("(")),
    "compile kind": lambda e: e.compile_grammar("a+"),
    "compile surrogate": lambda e: e.compile_grammar(Regex("a\ud800")),
    "rid": lambda e: e.abort("nothing"),
    "rid kind": lambda e: e.abort(["a"]),
    "rid list": lambda e: e.submit("ab", GREEDY, sink=Collector(), rid=["a"]),
    "no choices": lambda e: e.select("ab", []),
    "empty choice": lambda e: e.select("ab", ["a", ""]),
    "choices kind": lambda e: e.select("ab", 7),
    "choice surrogate": lambda e: e.select("ab", ["a", "\ud800"]),
    "select prompt surrogate": lambda e: e.select("\ud800", ["a"]),
    "select image": lambda e: e.select(Prompt((Span("a"),), images=(IMAGE,)), ["a"]),
    "select long": lambda e: e.select("a" * 3000, ["a"]),
    "program params": program(Gen("x", forced(max_tokens=-1))),
    "program params object": program(Gen("x", forced(temperature=object()))),
    "program fork params": in_fork(top_p=7),
    "program fork params kind": in_fork(stop=7),
    "program choices": program(Select("x", ())),
    "program image": program(Gen("x", GREEDY), prompt=Prompt((Span("a"),), images=(IMAGE,))),
    "program constraint": program(Gen("x", GREEDY, Regex("("))),
    "program long": program(Text("a" * 3000), Gen("x", GREEDY)),
    "program bad ids": program(Text("a", (99,)), Gen("x", GREEDY)),
    "program not one": lambda e: e.run_program("ab", (Gen("x", GREEDY),), sink=Collector()),
    "program no nodes": lambda e: e.run_program("ab", Program(odd(7)), sink=Collector()),
    "open params": opened(((), (Gen("x", forced(max_tokens=-1)), Gen("y", GREEDY)))),
    "open params object": opened(((), (Gen("x", forced(stop=object())),))),
    "open after a failure": opened(((), (Gen("x", GREEDY, Regex("(")),)), ((), (Gen("y", GREEDY),))),
    "open fork params": opened(((), (Fork(((Gen("x", forced(stop_token_ids=(99,))),), (Gen("y", GREEDY),))), Join()))),
    "generate key": lambda e: e.generate("ab", {"max_tokenz": 3}),
    "generate both": lambda e: e.generate("ab", input_ids=[1]),
    "generate neither": lambda e: e.generate(),
    "generate second": lambda e: e.generate(["ab", ""], {"max_new_tokens": 3}),
    "generate rids": lambda e: e.generate(["ab", "c"], {"max_new_tokens": 3}, rid=["a", "a"]),
    "generate processor": lambda e: e.generate("ab", custom_logit_processor="x"),
    "generate surrogate": lambda e: e.generate("a\ud800", {"max_new_tokens": 3}),
    "async generate": gathered("", {"max_new_tokens": 3}),
    "constraint kind": lambda e: e.complete("ab", GREEDY, "a+"),
    "choice kind": lambda e: e.select("ab", ["a", 7]),
    "choices text": lambda e: e.select("ab", "cd"),
    "select prompt kind": lambda e: e.select(7, ["a"]),
    "select namespace": told(lambda e, s: e.submit_select("ab", ["a"], sink=s, namespace=7)),
    "program prompt kind": program(Gen("x", GREEDY), prompt=7),
    "program namespace": program(Gen("x", GREEDY), namespace=7),
    "program node kind": program(odd("c"), Gen("x", GREEDY)),
    "open namespace": lambda e: e.open_program(sink=Collector(), namespace=7),
    "open node kind": opened(((), (Gen("x", GREEDY), odd("c")))),
    "extend path": opened((odd("a"), (Gen("x", GREEDY),))),
    "extend path kind": opened((odd(("a",)), (Gen("x", GREEDY),))),
    "too many nodes": opened(((), (Text("c"), Gen("x", GREEDY))), ((), (Text("c"),) * (MAX_QUEUED + 1))),
    "too many nodes of a program": program(*(Text("c"),) * (MAX_QUEUED + 1)),
    "weights": lambda e: e.update_weights("/nowhere/to/be/found"),
    "weights kind": lambda e: e.update_weights(7),
    "encode": lambda e: e.encode("ab"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Text(odd(7)), "text: a Text needs a string here, not 7"),
        (lambda: Gen(odd(7)), "name: a Gen needs a string or None here, not 7"),
        (
            lambda: Gen("x", odd({"max_tokens": 3})),
            "params: a Gen needs SamplingParams here, not {'max_tokens': 3}",
        ),
        (
            lambda: Gen("x", constraint=odd("a+")),
            r"constraint: a Gen needs a constraint or None here, not 'a\+'",
        ),
        (lambda: Select(odd(7), ("a",)), "name: a Select needs"),
        (
            lambda: Select("x", odd("ab")),
            "choices: a Select needs a tuple of strings here, not 'ab'",
        ),
        (lambda: Select("x", odd(("a", 7))), "choices: a Select needs"),
        (lambda: GrammarBegin(odd("a")), "constraint: a GrammarBegin needs"),
        (lambda: GrammarBegin(Regex("a"), odd(b"a")), "text: a GrammarBegin needs"),
        (lambda: TurnBegin(odd(None)), "role: a TurnBegin needs"),
        (lambda: TurnEnd(odd(None)), "role: a TurnEnd needs"),
        (lambda: ScopeBegin(odd(None)), "name: a ScopeBegin needs"),
        (lambda: ScopeEnd(odd(None)), "name: a ScopeEnd needs"),
        (lambda: Fork(odd(2)), "branches: a Fork needs a tuple of tuples of nodes here, not 2"),
        (lambda: Fork((odd(["c"]),)), "branches: a Fork needs"),
        (lambda: Fork(((odd("c"),),)), "branches: a Fork needs"),
    ],
)
def test_a_node_with_something_of_another_type_is_refused_where_it_is_made(make, message):
    with pytest.raises(sgl.ParameterError, match=message):
        make()


@pytest.mark.parametrize("name", ERRORS)
def test_both_forms_refuse_the_same_with_the_same_words(own, here, name):
    assert outcome(ERRORS[name], own) == outcome(ERRORS[name], here)
    assert isinstance(own.complete("ab", GREEDY), Generation)


# Of types that no checker lets through. The forms may differ in words: what runs here finds out
# where it is used.
WRONG = {
    "namespace surrogate": told(lambda e, s: e.submit("ab", GREEDY, sink=s, namespace="\ud800")),
    "stop surrogate": bad_params(stop=("\ud800",)),
    "priority huge": told(lambda e, s: e.submit("ab", GREEDY, sink=s, priority=2**70)),
    "program surrogate": program(Text("a\ud800"), Gen("x", GREEDY)),
    "program prompt surrogate": program(Gen("x", GREEDY), prompt="a\ud800"),
    "open surrogate": opened(((), (Text("\ud800"),))),
    "open fork params object": opened(((), (Fork(((Gen("x", forced(stop=object())),),)),))),
    "params of a fork that cross": opened(((), (Fork(((Gen("x", forced(stop=7)),),)),))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_cross_is_refused_and_harms_nobody(own, name):
    other = Collector()
    own.submit("ab", forced(temperature=0, max_tokens=60, ignore_eos=True), sink=other)
    assert "Error" in str(outcome(WRONG[name], own))
    assert isinstance(other.end(), Generation)
    assert own.stats()["running"] == 0


def test_a_program_of_the_language_with_half_a_character_fails_alone(own, here):
    @sgl.function
    def bad(s):
        s += "a\ud800" + sgl.gen("x", max_tokens=3)

    said = []
    for engine in (own, here):
        with pytest.raises(sgl.ParameterError, match="unpaired surrogates") as caught:
            print(bad.run(backend=engine)["x"])
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert isinstance(own.complete("ab", GREEDY), Generation)
