"""Patterns of public Python code: those that are not refused match what Python's `re` matches."""

import random
import re
import warnings

import pytest

from sglang_lite.constraints.formal.automaton import accepts, is_empty
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.protocol import ConstraintError, Regex
from tests.constraints import engine
from tests.constraints.suites import regexes

REGEXES = list(regexes())
TAKEN = [row["pattern"] for row in REGEXES if not row["refused"]]


def test_at_most_the_marked_ones_are_refused():
    refused = []
    for row in REGEXES:
        try:
            parse(row["pattern"])
        except ConstraintError:
            refused.append(row["pattern"])
    assert refused == [row["pattern"] for row in REGEXES if row["refused"]], (
        "the mark only goes one way"
    )
    assert len(REGEXES) == 390
    assert len(refused) <= 35


@pytest.mark.sampled(40)
@pytest.mark.parametrize("number", range(len(TAKEN)))
def test_what_is_taken_means_what_python_means(number):
    pattern, rng = TAKEN[number], random.Random(number)
    with warnings.catch_warnings(action="ignore"):  # of sets that Python may read otherwise one day
        theirs = re.compile(pattern)
    node = parse(pattern)
    if is_empty(node):  # it looks behind its start or ahead of its end
        assert not any(map(theirs.fullmatch, ("", "a", "1", "-", "\n", pattern)))
        return
    grammar = engine.byte_engine().compile(Regex(pattern))
    samples = [sample(Regex(pattern), rng) for _ in range(4)]
    for text in {each for s in samples for each in (s, s[:-1], s[1:], s + "a", s + "\n", "-" + s)}:
        matches = bool(theirs.fullmatch(text))
        assert accepts(node, text) == matches, text
        assert engine.accepts(grammar, text) == matches, text
