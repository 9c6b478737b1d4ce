"""Shortest completions, held against a search of all texts by length."""

import json
import random

import pytest

from sglang_lite.constraints.formal.automaton import Automaton, accepts, shortest_accepted
from sglang_lite.constraints.formal.shortest import Shortest
from sglang_lite.constraints.formal.shortest_search import UNKNOWN
from sglang_lite.constraints.formal.shortest_texts import ShortestTexts
from sglang_lite.constraints.formal.terms import DEAD
from sglang_lite.constraints.json_schema.quotes import quote
from sglang_lite.constraints.json_schema.write_strings import quoted
from sglang_lite.constraints.kinds import language_of
from sglang_lite.protocol import ConstraintError, Ebnf, Regex
from tests.constraints.random_grammars import grammar
from tests.constraints.random_regexes import pattern
from tests.counts import some


def states_on_the_way(automaton, rng, count=12):
    """States that a random text goes through."""
    state, found = automaton.start, [automaton.start]
    for _ in range(count):
        after = [s for c in automaton.classes if (s := automaton.step(state, c)) != DEAD]
        if not after:
            break
        state = rng.choice(after)
        found.append(state)
    return found


def check(constraint, rng):
    """Returns how many states were compared."""
    language = language_of(constraint)
    automaton = Automaton(language.rules[language.start], rules=language.rules)
    texts = ShortestTexts(language.rules)
    shortest, checked = Shortest(automaton, texts.lengths), 0
    text = texts.text(language.start)
    assert text is not None
    assert len(text) == shortest.length(automaton.start)
    assert automaton.accepting(automaton.run(automaton.start, text))
    for state in states_on_the_way(automaton, rng):
        length = shortest.length(state)
        if length > 12:  # the search by length takes too long
            continue
        text = shortest.text(state)
        assert len(text) == length
        assert automaton.accepting(automaton.run(state, text))
        assert len(shortest_accepted(automaton, state)) == length
        assert shortest.tokens(state, len) == length
        checked += 1
    return checked


@pytest.mark.parametrize(("kind", "drawn"), [(Regex, pattern), (Ebnf, grammar)], ids=["patterns", "grammars"])
def test_of_random_languages(kind, drawn):
    checked = 0
    for seed in range(some(40, 600)):
        try:
            checked += check(kind(drawn(random.Random(seed))), random.Random(seed))
        except (ConstraintError, RecursionError):  # has no text, or begins with itself
            continue
    assert checked > 50


def test_a_text_that_has_begun_ends_like_the_shortest_one():
    """In the same characters where several would do: they may have other numbers of tokens."""
    language = language_of(Regex("(a|b)[0-9a-f]{4}-[0-9A-F]{3}[^x]"))
    automaton = Automaton(language.rules[language.start], rules=language.rules)
    texts = ShortestTexts(language.rules)
    text = texts.text(language.start)
    assert text is not None
    state = automaton.start
    for i, char in enumerate(text):
        assert Shortest(automaton, texts.lengths).text(state) == text[i:]
        state = automaton.run(state, char)


@pytest.mark.parametrize(("written", "length"), [
    ("(?=.*[0-9])(?=.*[a-z]).{2,40}", 2), ("(?!aa).{3}", 3), ("(?=[ab]*a)(?=.*bbb)[ab]{2,}", 4), ("(?!xa?x)x[ab]*x", 3), ("a|bc{3}", 1), ("a*", 0),
])  # fmt: skip
def test_of_intersections_and_complements(written, length):
    language = language_of(Regex(written))
    automaton = Automaton(language.rules[language.start], rules=language.rules)
    texts = ShortestTexts(language.rules)
    assert Shortest(automaton, texts.lengths).length(automaton.start) == length
    assert len(texts.text(language.start) or "") == length


@pytest.mark.parametrize(("kind", "drawn"), [(Regex, pattern), (Ebnf, grammar)], ids=["patterns", "grammars"])
def test_no_shortest_completion_is_longer_than_the_longest_rest(kind, drawn):
    checked = 0
    for seed in range(some(60, 1000)):
        try:
            language = language_of(kind(drawn(random.Random(seed))))
            texts = ShortestTexts(language.rules)
            rest = texts.longest_rest
            automaton = Automaton(language.rules[language.start], rules=language.rules)
            lengths = [
                Shortest(automaton, texts.lengths).length(s) for s in states_on_the_way(automaton, random.Random(seed))
            ]
        except (ConstraintError, RecursionError):
            continue
        if rest.nests or UNKNOWN in lengths:
            continue
        assert max(lengths) <= rest.length, (seed, lengths)
        checked += 1
    assert checked > 15


def test_the_longest_rest_counts_what_opens_later():
    language = language_of(Regex("(a|b(ccc(dd|eeee)){2})?f"))
    assert ShortestTexts(language.rules).longest_rest == (1 + 5 * 2 + 1, False)
    nested = language_of(Ebnf('root ::= "(" root root ")" | "x"'))
    assert ShortestTexts(nested.rules).longest_rest == (4, True)


@pytest.mark.parametrize("document", ["\n -  a bc", "no blank, nor", "ab\n\n", '\\ "', "  é"])
def test_of_quotes(document):
    texts = ShortestTexts({"": quoted(quote(document).node)})
    spans = [document[i:j] for i in range(len(document)) for j in range(i + 1, len(document) + 1)]
    known = [json.dumps(span, ensure_ascii=False) for span in spans if accepts(quote(document).node, span)]
    assert texts.lengths[""] == min(map(len, known))
    assert texts.text("") in known


def test_what_takes_too_much_work_is_unknown():
    parts = "".join(f"(?=(..){{{n}}}.{{0,{n}}}$)" for n in (31, 37, 41, 43))
    language = language_of(Regex(parts + ".*"))
    automaton = Automaton(language.rules[language.start], rules=language.rules)
    length = Shortest(automaton, ShortestTexts(language.rules).lengths).length(automaton.start)
    assert length in (UNKNOWN, 86)


def test_rules_that_begin_with_themselves_have_a_text():
    language = language_of(Ebnf('root ::= root "+" term | term\nterm ::= root | "(" root ")" | [0-9]'))
    assert ShortestTexts(language.rules).text(language.start) == "0"


def test_a_text_that_is_too_long_is_not_written():
    doubled = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60))
    texts = ShortestTexts(language_of(Ebnf(f'root ::= r0\n{doubled}\nr60 ::= "a"')).rules)
    assert texts.lengths["root"] == 2**60
    assert texts.text("root") is None
