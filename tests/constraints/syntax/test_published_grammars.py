"""Grammars that others have published: what we read in each is what other libraries read in it."""

import contextlib
import re
import textwrap
from random import Random

import pytest
from llguidance.gbnf_to_lark import any_to_lark

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.random_texts import sample
from sglang_lite.protocol import ConstraintError, Ebnf, Lark
from tests.constraints.engine import accepts, compiled
from tests.constraints.lark_grammars import OWN
from tests.constraints.readers import (
    NotRead,
    by_lark,
    by_llguidance,
    by_xgrammar,
    drawn_by_llguidance,
    edited,
)
from tests.constraints.suites import DATA

TEXTS = 30
LONGEST = 40
REFUSED = {
    "dynamic_complete": "lookbehind",
    "indented_tree": "comes from a postlexer",
    "lark": "lookahead",
    "template_lark": "lookahead",
    "verilog": "lookahead",
}
PUBLISHED = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((DATA / "lark").glob("*.lark"))
}
LARKS = {name: text for name, text in PUBLISHED.items() if name not in REFUSED}
LARKS |= {name: textwrap.dedent(text) for name, text in OWN.items()}
GBNFS = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((DATA / "gbnf").glob("*.gbnf"))
}
# What llguidance does not read at all, and where its greedy lexer ends a word later than a
# derivation may.
UNKNOWN_TO_LLGUIDANCE = {"assembler", "extended and replaced", "negative_priority", "templates"}
GREEDY = {"turtle_dsl"}


def texts_of(constraint, rng, lark_text):
    """Texts of the grammar, texts that llguidance draws from it, and some with a changed character.
    None begins or ends with what is ignored: we allow it after each terminal, `lark` before the
    first as well, llguidance between two.
    """
    found = sorted((sample(constraint, rng) for _ in range(TEXTS)), key=len)[: TEXTS // 3]
    with contextlib.suppress(NotRead):
        found += [drawn_by_llguidance(lark_text, rng, LONGEST) for _ in range(TEXTS // 3)]
    found += [edited(rng, rng.choice(found)) for _ in range(TEXTS - len(found))]
    ignored = (
        " \t\n\r\f" if "%ignore WS\n" in lark_text else " \t" if "%ignore" in lark_text else ""
    )
    return [text.strip(ignored) if ignored else text for text in found]


def agreed(constraint, texts, readers):
    """Texts that belong to a grammar, after all readers have said so."""
    grammar, refusal = compiled(constraint)
    assert refusal is None
    ours = [text for text in texts if accepts(grammar, text)]
    assert ours == [text for text in texts if matches(constraint, text)]
    for reads in readers:
        assert [text for text in texts if reads(text)] == ours
    assert ours
    return ours


def test_there_are_enough():
    assert len(LARKS) >= 30
    assert len(GBNFS) == 8


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", LARKS)
def test_a_lark_grammar_is_read_as_others_read_it(name):
    text = LARKS[name]
    constraint = Lark(text)
    texts = texts_of(constraint, Random(name), text)
    ours = agreed(
        constraint,
        texts,
        [by_lark(text), by_xgrammar(to_gbnf(language_for_constraint(constraint)))],
    )
    if name in UNKNOWN_TO_LLGUIDANCE:
        with pytest.raises(NotRead):
            by_llguidance(text)
        return
    theirs = [each for each in texts if by_llguidance(text)(each)]
    assert set(theirs) <= set(ours) if name in GREEDY else theirs == ours


@pytest.mark.parametrize("name", GBNFS)
def test_llama_cpps_grammars_are_read_as_others_read_them(name):
    text = GBNFS[name]
    as_lark = in_lark(text)
    texts = texts_of(Ebnf(text), Random(name), as_lark)
    for_xgrammar = re.sub(r"::=\s*\|", '::= "" |', text)  # it wants something before each bar
    agreed(Ebnf(text), texts, [by_xgrammar(for_xgrammar), by_lark(as_lark), by_llguidance(as_lark)])


def in_lark(text):
    """GBNF in the part of Lark's syntax that the `lark` package reads, too: no rule is a terminal,
    which could be empty or take the longest text.
    """
    found = any_to_lark(text).replace("%llguidance {}", "").replace(': ""', ":")
    for name in re.findall(r"^([A-Z_]+):", found, re.MULTILINE):
        found = re.sub(rf"\b{name}\b", name.lower(), found)
    found = re.sub(r"\]/\{0,(\d+)\}", r"]{1,\1}/?", found)
    return re.sub(r"/\{(\d+),(\d+)\}", r"/~\1..\2", found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_beyond_the_dialect_is_refused_by_name(name):
    with pytest.raises(ConstraintError, match=REFUSED[name]):
        language_for_constraint(Lark(PUBLISHED[name]))
