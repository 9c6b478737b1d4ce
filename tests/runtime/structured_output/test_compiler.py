"""Constraints compiled by an engine: by which backend, within limits, once, and without harm to
anyone else.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import wait
from itertools import pairwise
from statistics import median

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.coerce import as_constraint
from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.memo import native_bytes
from sglang_lite.program.nodes import Gen, Program, Text
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Delta,
    Ebnf,
    Generation,
    InOrder,
    JsonSchema,
    Lark,
    ProgramResult,
    Regex,
    SamplingParams,
    StructuralTag,
    Tag,
)
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core import recount
from sglang_lite.runtime.structured_output import worker
from sglang_lite.runtime.structured_output.compiler import Compiler
from sglang_lite.runtime.structured_output.grammar_cache import strip_schema_blanks
from sglang_lite.runtime.structured_output.simple import can_compile_in_process
from sglang_lite.runtime.structured_output.timings import MAX_SAMPLES, Durations
from sglang_lite.server.sglang.server_args import translate_engine_settings
from tests.constraints import hostile
from tests.constraints.test_generation import random_model
from tests.counts import some
from tests.waiting import until

PARAMS = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
CONSTRAINTS: dict[str, Constraint] = {
    "regex": Regex("[a-f]{2,5}(, [a-f]{2,5}){1,2}"),
    "choices": Choices(("yes", "no", "maybe, maybe not")),
    "ebnf": Ebnf('root ::= "a" root "b" | "c"'),
    "lark": Lark('start: WORD ("," WORD)* "."\nWORD: /[a-d]{1,3}/'),
    "structural tag": StructuralTag((Tag("fg", Regex("[a-c]+"), "?"),), ("fg",)),
    "composed": InOrder((Choices(("ab", "cd")), Regex("[xyz]+"))),
    "schema": JsonSchema('{"enum": [null, true, false]}'),
}
REGULAR = ("regex", "choices", "lark", "composed", "schema")


def refuse(*_, **__):
    raise AssertionError("a process was started")


WARM_UP = Compiler.warm_up  # which the other tests' engines go without


class Sink:
    """Collects the events of one request."""

    def __init__(self):
        self.events, self._ended = [], threading.Event()

    def __call__(self, event):
        self.events.append(event)
        if not isinstance(event, Delta | sgl.protocol.Played):
            self._ended.set()

    def end(self):
        assert self._ended.wait(60)
        return self.events[-1]


def make(**config):
    """An engine of a model with random logits and 280 tokens."""
    return Engine.of(random_model(), **config)


@pytest.fixture
def begun(monkeypatch):
    """What an engine has begun for the first constraints."""
    begun = []
    monkeypatch.setattr(Compiler, "warm_up", lambda self: begun.extend(WARM_UP(self)) or begun)
    return begun


def test_an_engine_is_ready_for_its_first_constraints(monkeypatch, begun):
    """Neither an engine of grammars nor a process has yet to be started: on a CPU both are, in the
    first quiet second.
    """
    monkeypatch.setattr(recount, "QUIET_S", 0.001)
    large = JsonSchema('{"type": "object", "patternProperties": {"^a": {"type": "integer"}}}')
    assert not can_compile_in_process(large)
    with make() as engine:
        until(lambda: len(begun) == 2)
        assert len(wait(begun, timeout=60).done) == 2
        monkeypatch.setattr(subprocess, "Popen", None)
        monkeypatch.setattr("sglang_lite.runtime.structured_output.compiler.make_engine", None)
        for constraint in (Regex("[ab]c"), large):
            assert engine.compile_grammar(constraint).matcher().engine.name == "llguidance"


def test_no_plain_generation_waits_for_an_engine_of_grammars(monkeypatch, begun):
    """It takes a second or two of the interpreter. The first constraint begins both, as no second
    is quiet here.
    """
    monkeypatch.setattr(recount, "QUIET_S", 1000.0)
    with make() as engine:
        engine.complete("ab", PARAMS)
        assert not begun
        engine.complete("ab", PARAMS, Regex("[ab]c"))
        assert len(begun) == 2


@pytest.fixture(scope="module", params=["auto", "llguidance", "xgrammar", "outlines"])
def any_engine(request):
    with make(constraint_backend=request.param) as engine:
        yield engine


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_every_backend_keeps_a_constraint_or_refuses_it_by_its_name(any_engine, kind):
    constraint, backend = CONSTRAINTS[kind], any_engine.config.constraint_backend
    if backend == "outlines" and kind not in REGULAR:
        with pytest.raises(ConstraintError, match="outlines"):
            any_engine.complete("ab", PARAMS, constraint)
        return
    for seed in range(some(1, 4)):
        generation = any_engine.complete(
            "ab", SamplingParams(max_tokens=60, temperature=1.0, seed=seed), constraint
        )
        assert generation.finish_reason == "length" or matches(constraint, generation.text)
        chosen = generation.meta["constraint_backend"]
        assert chosen == ("llguidance" if backend == "auto" else backend)


def test_a_process_that_has_loaded_its_engine_is_kept(any_engine, monkeypatch):
    """Xgrammar brings torch along, which takes seconds."""
    first, second = (InOrder((Choices((text, "b")), Regex("[xyz]+"))) for text in ("a", "c"))
    any_engine.complete("ab", PARAMS, first)
    monkeypatch.setattr(worker.subprocess, "Popen", refuse)
    assert isinstance(any_engine.complete("ab", PARAMS, second), Generation)


@pytest.mark.parametrize("any_engine", ["auto"], indirect=True)
def test_an_answer_says_which_engine_held_it(any_engine):
    for constraint in (TAGS, CONSTRAINTS["ebnf"], CONSTRAINTS["schema"]):
        assert (
            any_engine.complete("ab", PARAMS, constraint).meta["constraint_backend"] == "llguidance"
        )
    assert "constraint_backend" not in any_engine.complete("ab", PARAMS).meta
    (answer,) = any_engine.generate(
        ["ab"], {"ebnf": CONSTRAINTS["ebnf"].grammar, "max_new_tokens": 5}
    )
    assert answer["meta_info"]["constraint_backend"] == "llguidance"


def test_sglangs_name_of_the_backend_is_known():
    assert translate_engine_settings({"grammar_backend": "xgrammar"}) == {
        "constraint_backend": "xgrammar"
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"constraint_backend": "none"},
        {"compile_timeout_s": 0},
        {"compile_timeout_s": True},
        {"compile_timeout_s": float("inf")},
        {"compile_memory_mb": 1},
        {"compile_memory_mb": 1.5e3},
    ],
)
def test_bad_settings_are_refused_by_name(bad):
    with pytest.raises(sgl.ParameterError, match=next(iter(bad))):
        EngineConfig.make(**bad)


def test_the_compiler_is_busy_while_it_compiles(monkeypatch):
    seen: list[bool] = []
    build = Compiler.build
    monkeypatch.setattr(
        Compiler, "build", lambda self, of: seen.append(self.is_busy()) or build(self, of)
    )
    with make() as engine:
        compiler = engine.core.compiler
        seen.clear()
        assert not compiler.is_busy()
        engine.complete("ab", PARAMS, Regex("a+"))
        engine.complete("ab", PARAMS, LARGER)
        with pytest.raises(ConstraintError):
            engine.complete("ab", PARAMS, Regex("(a"))
        assert seen == [True, True]  # the larger one elsewhere
        until(lambda: not compiler.is_busy())


def test_a_constraint_is_compiled_once():
    with make() as engine:
        spelled = JsonSchema('{"enum": [null, "a b"]}'), JsonSchema(' {"enum" :\n[null , "a b"]}')
        for constraint in (*spelled, *spelled, Regex("a+"), Regex("a+"), Regex("a")):
            engine.complete("ab", PARAMS, constraint)
        for _ in range(2):
            with pytest.raises(ConstraintError, match="contradicts itself"):
                engine.complete("ab", PARAMS, Choices(()))
        stats = engine.stats()
        assert (stats["grammars_compiled"], stats["grammars_cached"]) == (4, 5)


def test_blanks_inside_of_strings_make_another_schema():
    with make() as engine:
        for schema in (
            '{"const": "a , b"}',
            '{"const": "a, b"}',
            r'{"const": "\" , "}',
            r'{"const": "\","}',
        ):
            engine.compile_grammar(JsonSchema(schema))
        for _ in range(2):
            with pytest.raises(ConstraintError):
                engine.compile_grammar(JsonSchema('{"const": tr ue}'))
        assert engine.stats()["grammars_compiled"] == 5


def test_a_program_waits_for_all_its_grammars_and_names_the_bad_one():
    gens = [Gen(kind, PARAMS, CONSTRAINTS[kind]) for kind in ("choices", "ebnf", "regex")]
    with make() as engine:
        sink = Sink()
        engine.run_program("ab", Program((Text("c"), *gens)), sink=sink)
        assert isinstance(sink.end(), ProgramResult)
        for _ in range(2):  # refused, and refused from memory
            sink = Sink()
            engine.run_program("ab", Program((*gens, Gen(None, PARAMS, Regex("(")))), sink=sink)
            assert isinstance(sink.end(), ConstraintError)


# ------------------------------------------------------------------------------------------- limits

# What is compiled in a process of its own, in a moment.
TAGS = StructuralTag((Tag("<f>", Regex("[ab]"), "</f>"),), ("<f",))
LARGER = Ebnf('root ::= "a"{2,3} "b"')


@pytest.fixture
def stuck(monkeypatch, tmp_path):
    """In the worker, preparing a constraint with `zz` in it never ends."""
    (tmp_path / "sitecustomize.py").write_text(
        "from sglang_lite.runtime.structured_output import ruled_grammar\n"
        "mask_rules_of = ruled_grammar.extract_mask_rules\n"
        "def slow(constraint):\n"
        "    while 'zz' in repr(constraint):\n"
        "        pass\n"
        "    return mask_rules_of(constraint)\n"
        "ruled_grammar.extract_mask_rules = slow\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return Ebnf('root ::= "zz"{2,3}')


def test_a_constraint_that_takes_too_long_fails_alone_and_the_process_is_replaced(stuck):
    with make(compile_timeout_s=0.5) as engine:
        sinks = [Sink() for _ in range(3)]
        for sink, constraint in zip(sinks, (stuck, LARGER, Regex("a+"))):
            engine.submit("ab", PARAMS, constraint, sink=sink)
        assert isinstance(sinks[1].end(), Generation)
        assert isinstance(sinks[2].end(), Generation)
        error = sinks[0].end()
        assert isinstance(error, ConstraintError)
        assert "took more than 0.5 s" in str(error)
        assert "compile_timeout_s" in error.hint
        for constraint in (InOrder((Regex("a"), Regex("b"))), InOrder((Regex("b"), Regex("b")))):
            assert isinstance(engine.complete("ab", PARAMS, constraint), Generation)
        with pytest.raises(ConstraintError, match=r"more than 0\.5 s"):  # it is tried again
            engine.complete("ab", PARAMS, stuck)


def test_only_time_on_the_cpu_counts(monkeypatch, tmp_path):
    """A worker that has to wait, as on a busy machine, for longer than a constraint may take."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\n"
        "from sglang_lite.runtime.structured_output import ruled_grammar\n"
        "mask_rules_of = ruled_grammar.extract_mask_rules\n"
        "ruled_grammar.extract_mask_rules = lambda given: threading.Event().wait(0.6) or mask_rules_of(given)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with make(compile_timeout_s=0.4) as engine:
        assert isinstance(engine.complete("ab", PARAMS, LARGER), Generation)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the system does not say what time a process has had"
)
def test_a_process_that_does_nothing_in_its_start_fails_one_constraint_and_is_replaced(
    monkeypatch, tmp_path
):
    (tmp_path / "hangs").write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    (tmp_path / "hangs").chmod(0o755)
    with make() as engine:
        with monkeypatch.context() as started:
            started.setattr(sys, "executable", str(tmp_path / "hangs"))
            started.setattr(worker, "STILL_SECONDS", 0.3)
            with pytest.raises(ConstraintError, match="does not start"):
                engine.complete("ab", PARAMS, LARGER)
        assert isinstance(engine.complete("ab", PARAMS, LARGER), Generation)


def test_a_process_that_has_grown_is_replaced(monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(
        worker.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    monkeypatch.setattr(worker, "MAX_GROWN", -(1 << 40))
    with make() as engine:
        engine.complete("ab", PARAMS, LARGER)
        assert started[0].poll() is not None
        monkeypatch.setattr(worker, "MAX_GROWN", 1 << 40)
        for constraint in (InOrder((Regex("a"), Regex("b"))), InOrder((Regex("b"), Regex("b")))):
            engine.complete("ab", PARAMS, constraint)
        assert len(started) == 2


def test_a_request_whose_constraint_is_being_compiled_can_be_aborted(stuck):
    with make(compile_timeout_s=60) as engine:
        sink = Sink()
        engine.submit("ab", PARAMS, stuck, sink=sink).abort()
        assert isinstance(sink.end(), sgl.RequestAbortedError)
        program = Sink()
        gen = Gen(None, PARAMS, stuck)
        engine.run_program("ab", Program((gen,)), sink=program).abort()
        assert isinstance(program.end(), sgl.RequestAbortedError)
    assert len(sink.events) == len(program.events) == 1


def test_the_process_that_compiles_goes_last_from_its_first_import_on(monkeypatch, tmp_path):
    """Nice counts among processes of one session only. Ctrl-C goes to a group, of which it has its
    own.
    """
    told = tmp_path / "told"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'sglang_lite':\n"
        "            own = os.getpgid(0) == os.getpid()\n"
        f"            open({str(told)!r}, 'w').write(f'{{os.nice(0)}} {{os.getsid(0)}} {{own}}')\n"
        "sys.meta_path.insert(0, Finder)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with make() as engine:
        assert isinstance(engine.complete("ab", PARAMS, LARGER), Generation)
    assert told.read_text() == f"{min(os.nice(0) + 10, 19)} {os.getsid(0)} True"


def test_closing_the_engine_ends_what_is_being_compiled_and_its_process(stuck, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(
        worker.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    engine = make(compile_timeout_s=60)
    sinks = [Sink() for _ in range(4)]
    for i, sink in enumerate(sinks):
        engine.submit("ab", PARAMS, InOrder((stuck, *[Regex("a")] * i)), sink=sink)
    engine.close()
    assert [type(sink.end()) for sink in sinks] == [sgl.EngineClosedError] * 4
    assert all(process.returncode is not None for process in started)  # waited for


def test_a_process_that_needs_too_much_memory_fails_its_constraint_alone():
    with make(compile_memory_mb=256, compile_timeout_s=600) as engine:
        greedy = Choices(tuple(f"choice {i}" for i in range(300_000)))
        with pytest.raises(ConstraintError, match="256 MB"):
            engine.complete("ab", PARAMS, greedy)
        assert isinstance(engine.complete("ab", PARAMS, LARGER), Generation)


def test_what_is_small_and_plain_needs_no_process(monkeypatch):
    monkeypatch.setattr(worker.subprocess, "Popen", refuse)
    model = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 50}, "of": {"$ref": "#/$defs/o"},
        "at": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "list": {"type": "array", "items": {"type": "number"}}},
        "required": ["name"], "additionalProperties": false, "$defs": {"o": {"enum": ["a", "b"]}}}"""
    with make() as engine:
        for constraint in (
            Regex(r"[a-z]{1,20}\d{4}"),
            Choices(("a", "b")),
            CONSTRAINTS["ebnf"],
            JsonSchema(model),
        ):
            assert can_compile_in_process(constraint)
            assert isinstance(engine.complete("ab", PARAMS, constraint), Generation)


@pytest.mark.parametrize("name", hostile.KEPT)
def test_what_is_meant_to_break_constraints_is_simple_or_not(name):
    assert can_compile_in_process(as_constraint(hostile.KEPT[name][0])) in (True, False)


def test_a_repeat_without_counts_counts_nothing():
    assert can_compile_in_process(Regex("((a*)*){,}"))
    with make() as engine:
        assert isinstance(engine.complete("ab", PARAMS, Regex("((a*)*){,}")), Generation)


def test_refused_constraints_are_remembered_within_bytes(monkeypatch):
    monkeypatch.setattr("sglang_lite.runtime.structured_output.grammar_cache.CACHED_BYTES", 200_000)
    with make() as engine:
        compiler = engine.core.compiler
        for i in range(8):
            with pytest.raises(ConstraintError):
                engine.complete("ab", PARAMS, Regex("a" * 60_000 + str(i)))
        assert 60_000 < compiler.cache.bytes < 300_000


@pytest.mark.skipif(not native_bytes(), reason="the C library does not tell what is allocated")
def test_kept_grammars_count_with_what_they_were_seen_to_take():
    """By its text, of 3,000 characters, this one would count with an eighth of what it takes."""
    schema: object = {"type": "string", "maxLength": 10**6}
    for _ in range(6):
        schema = {
            "anyOf": [{"type": "array", "items": schema, "minItems": 20, "maxItems": 10**4}, schema]
        }
    constraint = JsonSchema(json.dumps(schema))
    with make(threads=2) as engine:
        compiler = engine.core.compiler
        compiler.compile_in_background(constraint).result()
        counted, others, seen = compiler.cache.bytes, [], [native_bytes()]
        for _ in range(20):
            others.append(compiler.build(constraint))
            seen.append(native_bytes())
        # Not their mean: what other tests left may be freed meanwhile.
        taken = median(after - before for before, after in pairwise(seen))
        # With two threads a grammar that loads quickly may have four parsers, and counts with all
        # of them.
        assert any(0.5 < counted / (parsers * taken) < 2 for parsers in (1, 4))


@pytest.mark.parametrize(
    "bad", [Regex("(a"), Ebnf('root ::= "a"{2,3} b')], ids=["here", "by a worker"]
)
def test_a_refused_constraint_keeps_nothing_of_those_who_asked_for_it(bad):
    """An error that is raised again and again has all their frames in its traceback."""
    with make() as engine:
        sinks = [Sink() for _ in range(20)]
        for sink in sinks:
            engine.submit("ab", PARAMS, bad, sink=sink)
            assert isinstance(sink.end(), ConstraintError)
            with pytest.raises(ConstraintError):
                engine.play("ab", Program((Gen("x", PARAMS, bad),)))
            with pytest.raises(ConstraintError):
                engine.compile_grammar(bad)
        error = engine.core.compiler.compile_in_background(bad).exception()
        assert error is not None
        assert error.__traceback__ is None
        assert error is not engine.core.compiler.compile_in_background(bad).exception()
        engine.complete("ab", PARAMS)
        kept = [weakref.ref(sink) for sink in sinks]
        del sink, sinks
        gc.collect()
        assert [each() for each in kept] == [None] * 20


def test_schemas_are_compared_without_their_blanks_unless_they_are_long():
    for count in (10, 3_000):
        schema = JsonSchema('{ "const" : "%s" }' % ("x\\n \\" * count))
        assert strip_schema_blanks(schema).schema == schema.schema.replace('{ "', '{"').replace(
            '" : "', '":"'
        ).replace('" }', '"}')
    long = JsonSchema('{ "const" : "%s" }' % ("x" * 100_000))
    assert strip_schema_blanks(long) is long


def test_what_a_grammar_took_to_load_is_given_back(monkeypatch):
    trimmed = threading.Semaphore(0)
    monkeypatch.setattr("sglang_lite.runtime.structured_output.compiler.trim", trimmed.release)
    with make() as engine:
        engine.complete("ab", PARAMS, Regex("a+"))
        engine.complete("ab", PARAMS, LARGER)
        assert trimmed.acquire(timeout=60)
    assert not trimmed.acquire(blocking=False)


def test_the_process_that_compiles_loads_no_torch():
    code = (
        "import sys, sglang_lite.runtime.structured_output.worker, sglang_lite.runtime.structured_output.llguidance\n"
        "print([name for name in ('torch', 'transformers', 'xgrammar', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rows_of_several_engines_and_of_none_run_side_by_side():
    with make() as engine:
        sinks = [Sink() for _ in range(24)]
        kinds = ("regex", None, "schema", "ebnf")
        for i, sink in enumerate(sinks):
            params = SamplingParams(max_tokens=40, temperature=1.0, seed=i)
            engine.submit("ab", params, CONSTRAINTS.get(kinds[i % 4]), sink=sink)  # type: ignore[arg-type]  # None for none
        for i, sink in enumerate(sinks):
            generation = sink.end()
            assert isinstance(generation, Generation)
            if kinds[i % 4] and generation.finish_reason == "stop":
                assert matches(CONSTRAINTS[kinds[i % 4]], generation.text)


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("a" * 201),
        Regex("(a{1,99}){1,99}"),
        Regex("a{99999999999999999999}"),
        Ebnf('root ::= "a"{1,9}'),
        Choices(("a" * 30_000,)),
        Lark('start: "a"'),
        JsonSchema('{"allOf": [true]}'),
        JsonSchema('{"items": {"properties": {"a": {"pattern": "x"}}}}'),
        JsonSchema('{"anyOf": [{"type": "null"}, {"not": {}}]}'),
        JsonSchema('{"maxLength": 100000}'),
        JsonSchema('{"minItems": true, "maxItems": 5e9}'),
        JsonSchema("[" * 3000),
        JsonSchema("{"),
        JsonSchema("3"),
        InOrder((Regex("a"),)),
    ],
)
def test_what_may_multiply_does(constraint):
    assert not can_compile_in_process(constraint)


def test_the_engine_tells_what_masks_cost():
    names = [
        f"{what}_{which}_s" for what in ("mask", "mask_wait") for which in ("p50", "p99", "max")
    ]
    with make() as engine:
        engine.complete("x", PARAMS)
        assert [engine.stats()[name] for name in names] == [0.0] * 6
        engine.complete("x", PARAMS, CONSTRAINTS["ebnf"])
        found = [engine.stats()[name] for name in names]
        assert 0 < found[0] <= found[1] <= found[2] < 10
        assert found[3:] == found[:3]  # a CPU computes nothing meanwhile


def test_only_the_last_durations_are_summed_up():
    seconds = Durations()
    for value in range(2 * MAX_SAMPLES):
        seconds.add_duration(float(value))
    assert seconds.summary("x") == {
        "x_p50_s": pytest.approx(1.5 * MAX_SAMPLES, abs=1), "x_p99_s": pytest.approx(1.99 * MAX_SAMPLES, abs=1), "x_max_s": 2 * MAX_SAMPLES - 1,
    }  # fmt: skip
