"""Shortest texts, held against a search of all texts by length."""

import json
import random

import pytest

from sglang_lite.constraints.formal.automaton import Automaton, accepts, shortest_path_from
from sglang_lite.constraints.formal.shortest_search import UNKNOWN
from sglang_lite.constraints.formal.shortest_texts import ShortestTexts
from sglang_lite.constraints.json_schema.quotes import quote
from sglang_lite.constraints.json_schema.write_strings import quote_strings
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.protocol import ConstraintError, Ebnf, Regex
from tests.constraints.random_grammars import grammar
from tests.constraints.random_regexes import pattern
from tests.counts import some


def check(constraint):
    """Returns whether the shortest text was compared."""
    language = language_for_constraint(constraint)
    automaton = Automaton(language.rules[language.start], rules=language.rules)
    texts = ShortestTexts(language.rules)
    text = texts.find_shortest_text(language.start)
    assert text is not None
    assert len(text) == texts.lengths[language.start]
    assert automaton.accepting(automaton.run(automaton.start, text))
    if len(text) > 12:  # the search by length takes too long
        return False
    assert len(shortest_path_from(automaton, automaton.start)) == len(text)
    return True


@pytest.mark.parametrize(
    ("kind", "drawn"), [(Regex, pattern), (Ebnf, grammar)], ids=["patterns", "grammars"]
)
def test_of_random_languages(kind, drawn):
    checked = 0
    for seed in range(some(40, 600)):
        try:
            checked += check(kind(drawn(random.Random(seed))))
        except (ConstraintError, RecursionError):  # has no text, or begins with itself
            continue
    assert checked > 25


@pytest.mark.parametrize(("written", "length"), [
    ("(?=.*[0-9])(?=.*[a-z]).{2,40}", 2), ("(?!aa).{3}", 3), ("(?=[ab]*a)(?=.*bbb)[ab]{2,}", 4), ("(?!xa?x)x[ab]*x", 3), ("a|bc{3}", 1), ("a*", 0),
])  # fmt: skip
def test_of_intersections_and_complements(written, length):
    language = language_for_constraint(Regex(written))
    texts = ShortestTexts(language.rules)
    assert texts.lengths[language.start] == length
    assert len(texts.find_shortest_text(language.start) or "") == length


@pytest.mark.parametrize("document", ["\n -  a bc", "no blank, nor", "ab\n\n", '\\ "', "  é"])
def test_of_quotes(document):
    texts = ShortestTexts({"": quote_strings(quote(document).node)})
    spans = [document[i:j] for i in range(len(document)) for j in range(i + 1, len(document) + 1)]
    known = [
        json.dumps(span, ensure_ascii=False)
        for span in spans
        if accepts(quote(document).node, span)
    ]
    assert texts.lengths[""] == min(map(len, known))
    assert texts.find_shortest_text("") in known


def test_what_takes_too_much_work_is_unknown():
    parts = "".join(f"(?=(..){{{n}}}.{{0,{n}}}$)" for n in (31, 37, 41, 43))
    language = language_for_constraint(Regex(parts + ".*"))
    length = ShortestTexts(language.rules).lengths[language.start]
    assert length in (UNKNOWN, 86)


def test_rules_that_begin_with_themselves_have_a_text():
    language = language_for_constraint(
        Ebnf('root ::= root "+" term | term\nterm ::= root | "(" root ")" | [0-9]')
    )
    assert ShortestTexts(language.rules).find_shortest_text(language.start) == "0"


def test_a_text_that_is_too_long_is_not_written():
    doubled = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))
    texts = ShortestTexts(
        language_for_constraint(Ebnf(f'root ::= r0\n{doubled}\nr60 ::= "a"')).rules
    )
    assert texts.lengths["root"] == 2**60
    assert texts.find_shortest_text("root") is None
