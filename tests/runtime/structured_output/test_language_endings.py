"""Completions have the fewest tokens, by brute force, and the limit that they were asked for."""

import itertools
import math
import random

import pytest

from sglang_lite.constraints.formal import automaton
from sglang_lite.constraints.formal.shortest_texts import ShortestTexts
from sglang_lite.constraints.kinds import language_of
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Choices, Constraint, Ebnf, Regex
from sglang_lite.runtime.structured_output.language_endings import (
    CompletedLanguage,
    LanguageCompletions,
    LanguageEndings,
)
from sglang_lite.runtime.structured_output.language_states import LanguageStates
from sglang_lite.runtime.structured_output.spelling import Spelling
from sglang_lite.runtime.structured_output.token_texts import TokenTexts

PIECES = ["a", "b", "c", "0", "1", '"', "{", "}", "[", "]", ":", ",", " ", ".", "é", '": ', ", ", '"]', "ab", "abc", "bca",
          '{"', "aaaa", "10", '", "', "cab", "abcabc", '"a": ', '"aaaa"}']  # fmt: skip
TOKENS = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES if len(piece.encode()) > 1)]
LANGUAGES: dict[str, Constraint] = {
    "twelve letters": Regex("[abc]{12}"),
    "a choice of longer words": Choices(("ca", "abcabc", "0101010")),
    "nesting": Ebnf('root ::= "[" root root "]" | "{" root "}" | [ab]+ "."'),
    "names": json_schema({"type": "object", "properties": {"a": {"enum": ["abc", "aaaa"]}}, "required": ["a"],
                          "additionalProperties": False}),
    "an intersection": Regex("(?=.*0)(?=.*b)[abc01]{3,9}"),
}  # fmt: skip


def brute_force(states, most):
    """Fewest tokens from each state that is reached with at most `most` tokens, where they are at most `most`."""
    tokens = range(len(TOKENS))
    after = {}
    new = {states.start}
    for _ in range(most):
        after |= {s: {a for t in tokens if (a := states.after_drawn(s, t)) is not None} for s in new}
        new = {a for s in new for a in after[s]} - after.keys()
    after |= {s: set() for s in new}
    fewest = {state: 0 for state in after if not state[1] and states.automaton.accepting(state[0])}
    for count in range(1, most + 1):
        fewest |= {s: count for s in after if s not in fewest and any(fewest.get(a) == count - 1 for a in after[s])}
    return fewest


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LANGUAGES)
def test_completions_have_the_fewest_tokens(name):
    language = language_of(LANGUAGES[name])
    states = LanguageStates(language, TOKENS, ())
    completions = LanguageCompletions(states, ShortestTexts(language.rules).lengths, TokenTexts(TOKENS, ()))
    expected = brute_force(states, 3)
    assert expected
    for state, fewest in expected.items():
        if state[1]:  # inside a character
            continue
        found = completions.within(state, fewest)
        assert found is not None, (state, fewest)
        assert len(found) == fewest
        assert completions.within(state, fewest - 1) is None
        at = state
        for token in found:
            at = states.after_drawn(at, token)
        assert states.automaton.accepting(at[0]), (state, found)
        assert completions.count(state) >= fewest


def endings_of(constraint):
    language = language_of(constraint)
    shortest = ShortestTexts(language.rules)
    start, texts = shortest.text(language.start).encode(), TokenTexts(TOKENS, ())
    return LanguageEndings(
        CompletedLanguage(
            lambda: LanguageStates(language, TOKENS, ()), TOKENS, start, shortest.lengths, shortest.longest_rest, texts
        )
    )


def walk(endings, dice):
    """Tokens of a random text, each with the least number of bytes that complete the text after it."""
    place, found = endings.start, []
    while len(found) < 60 and endings.text(place):
        after = [(token, endings.after(place, token)) for token in dice.sample(range(len(TOKENS)), 40)]
        after = [(token, to) for token, to in after if to is not None and endings.count(to) < math.inf]
        if after:
            token, place = dice.choice(after)
            found.append((token, len(endings.text(place))))
    return found


MANY_STATES = {  # a language, and the number of transitions that are kept
    "nesting": (Ebnf('root ::= "[" root root "]" | "{" root "}" | [abc] [0-9]{29}'), 500),
    "an intersection": (Regex("(?=.*0)(?=.*b)[abc01]{3,90}"), 200),
}


@pytest.mark.parametrize("name", MANY_STATES)
def test_texts_go_on_when_the_states_have_become_too_many(name, monkeypatch):
    """Texts go on by turns, so that some are many states behind others."""
    constraint, most = MANY_STATES[name]
    dice, endings = random.Random(3), endings_of(constraint)
    texts = [walk(endings, dice) for _ in range(9)]
    monkeypatch.setattr(automaton, "MAX_TRANSITIONS", most)
    endings = endings_of(constraint)
    places, states = [endings.start] * len(texts), set()
    turns = [row for row, text in enumerate(texts) for _ in text]
    dice.shuffle(turns)
    for row in turns:
        token, least = texts[row].pop(0)
        places[row] = endings.after(places[row], token)
        rest = endings.text(places[row])
        assert len(rest) == least
        assert endings.text(endings.advance(places[row], rest)) == b""
        states.add(places[row][1])
    assert len(states) > 1


def test_a_spelling_has_the_fewest_tokens():
    dice, spelling = random.Random(1), Spelling([*TOKENS, b"cccc"], {len(TOKENS)})
    known = set(TOKENS)
    for _ in range(200):
        text = "".join(dice.choices([*"abc01é", '"', ", "], k=dice.randrange(10))).encode()
        cuts = (sorted(each) for n in range(len(text)) for each in itertools.combinations(range(1, len(text)), n))
        splits = ([text[i:j] for i, j in itertools.pairwise([0, *each, len(text)])] for each in cuts)
        fewest = next((len(split) for split in splits if known.issuperset(split)), 0)
        found = spelling.tokens(text)
        assert found is not None
        assert b"".join(TOKENS[token] for token in found) == text
        assert len(found) == spelling.count(text) == fewest


def test_a_text_that_no_tokens_spell_has_no_spelling():
    spelling = Spelling([b"a", b"ab"], ())
    assert (spelling.tokens(b"aab"), spelling.tokens(b"b"), spelling.tokens(b"aba")) == ([0, 1], None, [1, 0])
    assert spelling.count(b"ba") is None
