"""Work that takes long is never done on the engine's own thread: there every row would wait for it.

Watched are the tokenizer, and of the grammars what compiles, and what walks the text that a
generation continues.
"""

import threading
import traceback
from concurrent.futures import Future

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    Join,
    Mark,
    Program,
    Rollback,
    Select,
    Text,
)
from sglang_lite.protocol import (
    Choices,
    JsonSchema,
    Number,
    Played,
    ProgramResult,
    Prompt,
    Regex,
    SamplingParams,
    Span,
    StructuralTag,
    Tag,
)
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.conformance.case import cases, outcome
from tests.conformance.test_random_programs import model

SHORT = 1_000  # bytes that are spelled in microseconds
CASES = {name: case for name, case in cases().items() if case.engine}
SLOW = {
    Tokenizer: ("encode", "encode_spans"),
    LlguidanceEngine: ("spell", "encode", "new_parser", "compile", "load_prepared", "states"),
    Compiler: ("compile_in_background", "build"),
}


@pytest.fixture(scope="module")
def engine():
    with Engine.of(model(), max_running=64) as engine:
        yield engine


@pytest.fixture
def entered(monkeypatch):
    """Places where something slow was entered on an engine's thread."""
    found = []

    def watched(call):
        def entered(*args, **kwargs):
            # a completion of a text
            short = len(args) > 1 and isinstance(args[1], bytes) and len(args[1]) <= SHORT
            if threading.current_thread().name == "sglang_lite-engine" and not short:
                found.append("".join(traceback.format_stack(limit=12)))
            return call(*args, **kwargs)

        return entered

    for kind, names in SLOW.items():
        for name in names:
            monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    yield found
    assert not found, found[0]


@pytest.fixture
def backend(engine):
    backend = LocalBackend(engine)
    backend.chat_template = get_chat_template("chatml")
    return backend


def greedy(tokens=6, **options):
    return SamplingParams(temperature=0, max_tokens=tokens, **options)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_no_conformance_program_keeps_the_loop(backend, entered, name):
    outcome(CASES[name], backend, seed=3, max_new_tokens=8)


def number(name="n"):
    return Gen(name, greedy(8, seed=2), Number("integer"))


BLOCK = GrammarBegin(Regex(r"[ab ]{0,8}(x|yy|zzz)[ab:]{0,4}[0-9]!"))
PROGRAMS = {
    "generations, one after the other": (
        Text("ab"),
        Gen("a", greedy()),
        Gen("b", greedy()),
        Text(" b"),
        Gen("c"),
    ),
    "a stop of a new byte": (
        Text("ab"),
        Gen("a", greedy()),
        Text("b"),
        Gen("b", greedy(stop=("\x07q", "§"))),
    ),
    "a stop pattern": (
        Text("ab"),
        Gen("a", greedy()),
        Text("b"),
        Gen("b", greedy(stop_regex=("q[xyz]{7}",))),
    ),
    "several samples": (Text("ab"), Gen("a", greedy(n=3)), Text("b"), Gen("b", greedy(n=2))),
    "a number that its next token ends": (
        Text("a 1"),
        number(),
        Text("1"),
        number("m"),
        Text("b"),
        number("k"),
    ),
    "a constraint in the slot": (
        *(Text("ab"), Gen("a", greedy(2))),
        *(
            Text("c"),
            Gen("b", greedy(), Regex("[ab]+")),
            Gen("c", greedy(), Choices(("abab", "ba"))),
        ),
        *(
            Gen(
                "d",
                greedy(),
                JsonSchema('{"type": "object", "properties": {"a": {"type": "integer"}}}'),
            ),
        ),
    ),
    "a constraint of many rows": (
        *(
            Text("ab"),
            Fork(((Gen("a", greedy(2)), Gen("b", greedy(4), Regex("(ab|b){1,9}b"))),) * 24),
        ),
        *(Join(), Gen("c", greedy(2))),
    ),
    "grammars in a fork": (
        *(Text("ab"), Gen("a", greedy(2))),
        Fork(
            (
                (Text("c"), Gen("b", greedy(), Regex("[ab]{3}q?"))),
                (Gen("c", greedy(), Choices(("ab", "zz"))),),
            )
        ),
        *(Join(), Gen("d", greedy())),
    ),
    "a block": (
        *(
            Text("ab"),
            BLOCK,
            Text("ab"),
            Gen("a", greedy(3), Regex("[ab ]{1,2}")),
            Select("s", ("x", "yy", "no")),
        ),
        *(
            Gen("b", greedy(4), Regex("[ab:]{1,2}")),
            Gen("c", greedy(16)),
            GrammarEnd(),
            Text("b"),
            Gen("d", greedy()),
        ),
    ),
    "a fork in a block": (
        *(Text("ab"), BLOCK, Gen("a", greedy(2), Regex("[ab ]{1,2}"))),
        Fork(
            (
                (Select("s", ("x", "yy")), Gen("b", greedy(2), Regex("[ab]"))),
                (Text("x"), Gen("c", greedy())),
            )
        ),
        *(Text("x"), Gen("d", greedy(16)), GrammarEnd()),
    ),
    "selections": (
        *(
            Select("s", ("ab", "b a")),
            Select("t", ("a", "ab"), "unconditional_likelihood_normalized"),
        ),
        *(Gen("a", greedy(2)), Select("u", ("ab", "b")), Gen("b", greedy(2))),
    ),
    "a rollback": (
        Text("ab"),
        Mark(),
        Gen("a", greedy(2)),
        Rollback(1),
        Text("b"),
        Gen("b", greedy(2)),
    ),
    "special tokens": (
        Text("ab<end>"),
        Gen("a", greedy(2)),
        Text("b<end>b", special=False),
        Gen("b", greedy(2)),
    ),
}


def play(engine, nodes, *, extended):
    """Plays a program, given as a whole or node by node, each when the one before has been played
    or at once.
    """
    ended, found = Future(), []

    def sink(event):
        (found.append if isinstance(event, Played) else ended.set_result)(event)

    if extended is None:
        engine.run_program("", Program(nodes), sink=sink)
    else:
        program = engine.open_program(sink=sink)
        for node in nodes:
            program.extend((), (node,))
            if extended == "late":
                engine.stats()
        program.close()
    return ended.result(timeout=60), found


@pytest.mark.parametrize("extended", [None, "at once", "late"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_of_nodes_keeps_the_loop(engine, entered, name, extended):
    result, found = play(engine, PROGRAMS[name], extended=extended)
    assert isinstance(result, ProgramResult), result
    assert found


def test_no_request_keeps_the_loop(engine, entered):
    engine.generate("ab " * 50, {"max_new_tokens": 3, "stop": ["\x08"]})
    engine.complete(Prompt((Span("ab"), Span("b<end>", special=False))), greedy(3))
    engine.complete("ab", greedy(4), Regex("[ab]{2}[ab]*w?"))
    engine.select("ab", ["a", "ba"], unconditional=True)
    engine.score("ab", ["a", "ba"])


def test_long_forced_text_keeps_the_loop_for_a_piece_at_a_time(monkeypatch):
    spelled, encode_spans = [], Tokenizer.encode_spans

    def watched(self, spans, **options):
        if threading.current_thread().name == "sglang_lite-engine":
            spelled.append(sum(len(span.text) for span in spans))
        return encode_spans(self, spans, **options)

    monkeypatch.setattr(Tokenizer, "encode_spans", watched)
    begin = "<x>" + "ab ba, " * 100
    tags = StructuralTag(
        (Tag(begin, Regex("[ab]"), "!"),), ("<",), at_least_one=True, stop_after_first=True
    )
    with Engine.of(model(), constraint_backend="xgrammar") as engine:  # it forces text, not tokens
        found = engine.complete("ab", greedy(900, logit_bias=((ord("<"), 50.0),)), tags)
    assert found.text.startswith(begin)
    assert found.usage.forced_tokens > 100
    assert 0 < max(spelled) <= 256


def test_a_constrained_generation_still_goes_on_in_the_slot_of_the_one_before():
    nodes = (
        Text("ab"),
        Gen("a", greedy(300, ignore_eos=True)),
        Text("b"),
        Gen("b", greedy(4), Regex("[ab]+")),
    )
    with Engine.of(model(), prefix_cache=False) as engine:
        engine.complete("a", greedy(1), Regex("[ab]+"))
        _, found = play(engine, nodes, extended=None)
        assert found[-1].event.usage.cached_tokens == 300


def test_no_read_check_or_retry_keeps_the_loop(backend, entered):
    @sgl.function
    def program(s):
        s += sgl.user("ab" * 20)
        s += sgl.assistant(sgl.gen("a", max_tokens=4, check=lambda text: len(text) > 99, retries=2))

    @sgl.function
    def reads(s):
        s += "ab" + sgl.gen("a", max_tokens=4)
        for name in "bcd":
            s += (
                s["a"]
                + " and "
                + sgl.gen(name, dtype=int, max_tokens=4)
                + sgl.gen(name * 2, regex="[ab]{2}")
            )
        branches = s.fork(3)
        for branch in branches:
            branch += "c" + sgl.gen("e", max_tokens=2) + sgl.select("f", ["a", "b"])
        branches.join("concate_and_append")
        s += sgl.gen("g", max_tokens=2)

    with pytest.raises(sgl.SglError):
        program.run(backend=backend)["a"]
    assert isinstance(reads.run(backend=backend, seed=3)["g"], str)


def test_the_watch_sees_what_it_is_for(engine, entered):
    def sink(event):
        engine.tokenizer.encode("ab")
        done.set()

    done = threading.Event()
    engine.submit("ab", greedy(1), sink=sink)
    assert done.wait(60)
    assert entered
    entered.clear()
