"""Counts of texts behind their beginnings, held against the texts themselves."""

import random

import pytest

from sglang_lite.constraints.formal.counting import count_texts, has_unused_text
from sglang_lite.constraints.formal.nodes import alternation, concat, literal
from sglang_lite.constraints.syntax.regex import parse


def texts_at_random(seed):
    rng = random.Random(seed)
    return sorted(
        {
            "".join(rng.choices('ab"\U0010ffff', k=rng.randint(1, 5)))
            for _ in range(rng.randint(1, 40))
        }
    )


@pytest.mark.parametrize("seed", range(20))
def test_listed_texts_and_an_automaton_of_them_are_counted_alike(seed):
    texts = texts_at_random(seed)
    half = len(texts) // 2
    nested = alternation([alternation(map(literal, texts[:half])), *map(literal, texts[half:])])
    spelled = concat(alternation(map(literal, texts)), parse("(?:)?"))  # no list of literals
    rng = random.Random(seed)
    for found in (count_texts(nested), count_texts(spelled)):
        assert found.count == len(texts)
        for beginning in {text[:end] for text in texts for end in range(len(text) + 1)} | {
            "c",
            "abc",
        }:
            behind = [text for text in texts if text.startswith(beginning)]
            assert found.count_with_prefix(beginning) == len(behind)
            assert found.prefix_counts(beginning)[-1] == len(behind)
            assert found.has_text(beginning) == (beginning in texts)
            used = rng.sample(texts, half)
            assert has_unused_text(found, beginning, used) == bool({*behind} - {*used})


def test_texts_without_end_have_no_count():
    found = count_texts(parse("a|ba*|bc"))
    assert found.count is None
    assert found.prefix_counts("bc") == [None, None, 1]
    assert found.count_with_prefix("a") == 1


def test_thousands_of_listed_texts_need_no_automaton():
    found = count_texts(
        alternation(
            literal(f'"a value with a long name, of which {i} is the number"') for i in range(5_000)
        )
    )
    assert found.count == 5_000
    assert found.count_with_prefix('"a value with a long name, of which 4') == 1_111
