"""A lexer of substrings keeps all that it has seen: it counts as memory of its grammar, and is
replaced in time.
"""

from typing import Annotated

import numpy as np

import sglang_lite as sgl
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.protocol import Regex
from sglang_lite.runtime.structured_output import llguidance
from sglang_lite.runtime.structured_output.base import next_mask
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from tests.waiting import until

WORDS = [f"{number} is the number after {number - 1}." for number in range(1, 800)]


def written(grammar, engine, text):
    """A matcher behind a text, all of whose masks allow the text."""
    matcher = grammar.matcher()
    for token in engine.encode(text):
        mask = next_mask(matcher)
        assert mask[token // 32] >> (token % 32) & 1
        assert matcher.accept(token)
    return matcher


def test_of_a_long_document(engine, monkeypatch):
    monkeypatch.setattr(llguidance, "MAX_GROWN", 1_000_000)
    made = LlguidanceEngine(engine.tokenizer, engine.vocab_size, sorted(engine.tokenizer.eos_ids))
    constraint = value_type(Annotated[str, sgl.quote(" ".join(WORDS), min_words=2)]).constraint
    assert constraint is not None
    grammar = made.compile(constraint)
    before = grammar.size
    matchers = []
    while grammar.size <= before + 1_000_000:
        matchers.append(written(grammar, made, '"' + " ".join(WORDS[len(matchers) :][:3])))
    assert len(matchers) > 2
    matchers.append(grammar.matcher())  # sees that it has grown
    until(lambda: grammar.size < before + 100_000)
    after = written(grammar, made, '"' + " ".join(WORDS[:3]))
    assert np.array_equal(next_mask(after), next_mask(matchers[0]))
    for matcher in matchers[:3]:  # those of the old lexer go on
        assert matcher.accept(made.encode('"')[0])
        assert matcher.complete


def test_of_other_grammars_counts_nothing(engine):
    made = LlguidanceEngine(engine.tokenizer, engine.vocab_size, sorted(engine.tokenizer.eos_ids))
    grammar = made.compile(Regex("[a-z ]+"))
    before = grammar.size
    written(grammar, made, "the quick brown fox")
    assert grammar.size == before
