"""Hostile constraints (hostile.py) give a result or a clear error, within bounds of work and
memory.
"""

import re
import subprocess
import sys
import time

import pytest

import sglang_lite as sgl
from sglang_lite.constraints import matching, memo
from sglang_lite.constraints.byte_matcher import ByteMatcher
from sglang_lite.constraints.emit import lexemes
from sglang_lite.constraints.json_schema.formulas import ValidAt
from sglang_lite.constraints.json_schema.normal_form import load_schema_document, normalise
from sglang_lite.constraints.json_schema.reader import SchemaReader
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import ConstraintError, Ebnf, InOrder, Regex
from tests.constraints.hostile import AMBIGUOUS, BROKEN, KEPT, REFUSED, alternatives

g = sgl.grammar
PARTS = 8  # of all constraints, after which memory is looked at


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", KEPT)
def test_it_is_kept(name):
    constraint, valid, invalid = KEPT[name]
    assert g.check(constraint).refused == ()
    assert [text for text in valid if not g.matches(constraint, text)] == []
    assert [text for text in invalid if g.matches(constraint, text)] == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    constraint, message = REFUSED[name]
    if constraint is None:
        constraint = Regex("a")
        for _ in range(300):
            constraint = InOrder((constraint, Regex("b")))
    report = g.check(constraint)
    assert len(report.refused) > 0
    assert report.example is None
    assert re.search(message, report.refused[0][1])


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_refused_where_it_is_written(name):
    write, message = BROKEN[name]
    with pytest.raises(ConstraintError, match=message):
        write()


@pytest.mark.parametrize(
    "aim",
    [
        5,
        {"type": "x"},
        {"minimum": "x"},
        {"multipleOf": 0},
        {"properties": 5},
        {"not": {"type": "x"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_what_only_a_reference_leads_to_has_to_be_a_schema(aim, keyword):
    whole = (
        {keyword: "#/default"},
        {"properties": {"a": {"$ref": "#/examples/0"}}, "examples": [{keyword: "#/default"}]},
    )
    for ask in (
        g.json_schema,
        g.check,
        lambda schema: g.matches(schema, "1"),
        lambda schema: g.validate(schema, "1"),
    ):
        for schema in whole:
            with pytest.raises(ConstraintError, match="at /default"):
                ask({**schema, "default": aim})


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_text_is_read_in_so_many_ways_at_most(name):
    grammar, text = AMBIGUOUS[name]
    with pytest.raises(ConstraintError, match="too many ways"):
        ByteMatcher(Ebnf(grammar)).push(text)


@pytest.mark.parametrize("ask", [g.matches, matching.matches, g.validate])
def test_whoever_reads_it_is_told(ask):
    grammar, text = AMBIGUOUS["groups that may be empty"]
    with pytest.raises(ConstraintError, match="too many ways"):
        ask(Ebnf(grammar), text)


def test_there_are_many():
    assert len({*KEPT, *REFUSED, *BROKEN, *AMBIGUOUS}) >= 60


def test_no_refusal_looks_at_a_clock(monkeypatch):
    schema = json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "^a.*b"}},
            "minProperties": 1,
        }
    )
    grammar = Ebnf('root ::= x "ab"* x\nx ::= "a" | "(" x ")" "b"?')
    memo.clear()
    known = normalise(schema).language, lexemes.split_into_lexemes(language_for_constraint(grammar))
    memo.clear()
    hours = iter(range(0, 10**9, 3_600))
    for clock in ("monotonic", "perf_counter", "time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: next(hours))
    assert (
        normalise(schema).language,
        lexemes.split_into_lexemes(language_for_constraint(grammar)),
    ) == known


def test_work_is_counted_alike_whatever_is_remembered():
    patterns = {"patternProperties": {f"a{i}.*b": {"const": i} for i in range(3)}}
    document = load_schema_document(json_schema({**alternatives(4), "allOf": [patterns]}))

    def work():
        reader = SchemaReader(document, assert_format=True)
        reader.values(ValidAt(document.start))
        return reader.algebra.work

    memo.clear()
    assert work() == work() > 1_000


def test_what_is_remembered_is_bounded_by_bytes():
    store = memo.BoundedCache(1_000)
    for i in range(100):
        store.put_entry(i, "x", 90)
    assert store.bytes <= 1_000
    assert store.find_entry(99) == ("x",)
    assert store.find_entry(0) is None
    store.put_entry("large", "y", 10_000)  # nothing is worked out again and again for being large
    assert store.find_entry("large") == ("y",)
    assert store.find_entry(99) is None


@pytest.mark.sampled(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_memory_is_given_back(part):
    code = """
import gc, sys
sys.path.insert(0, sys.argv[1])
import sglang_lite as sgl
from sglang_lite.constraints import memo
from tests.constraints.hostile import KEPT, REFUSED
def resident():
    gc.collect()
    memo.trim()
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
sgl.grammar.matches({"type": "integer"}, "1")
before = resident()
for constraint, *_ in [*KEPT.values(), *REFUSED.values()][int(sys.argv[2]) :: int(sys.argv[3])]:
    if constraint is not None:
        sgl.grammar.check(constraint)
print(resident() - before)
"""
    root = sgl.__file__.rpartition("/sglang_lite/")[0]
    command = [sys.executable, "-c", code, root, str(part), str(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150
