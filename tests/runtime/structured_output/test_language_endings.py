"""Places in the texts of a language: they are found however many states texts have led to."""

import random

import pytest

from sglang_lite.constraints.formal import automaton
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.protocol import Ebnf, Regex
from sglang_lite.runtime.structured_output.language_endings import LanguageEndings, RenewedStates
from sglang_lite.runtime.structured_output.language_states import LanguageStates

PIECES = ["a", "b", "c", "0", "1", '"', "{", "}", "[", "]", ":", ",", " ", ".", "é", '": ', ", ", '"]', "ab", "abc", "bca",
          '{"', "aaaa", "10", '", "', "cab", "abcabc", '"a": ', '"aaaa"}']  # fmt: skip
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(piece.encode() for piece in PIECES if len(piece.encode()) > 1),
]


def endings_of(constraint):
    return LanguageEndings(
        RenewedStates(lambda: LanguageStates(language_for_constraint(constraint), TOKENS, ()))
    )


def walk(endings, dice):
    """Tokens of a random text, each with the characters that may come after it."""
    place, found = endings.start, []
    while len(found) < 60 and (after := _after(endings, place, dice)):
        token, place = dice.choice(after)
        found.append((token, _characters(endings, place)))
    return found


def _after(endings, place, dice):
    after = [
        (token, endings.place_after_token(place, token))
        for token in dice.sample(range(len(TOKENS)), len(TOKENS))
    ]
    return [(token, to) for token, to in after if to is not None]


def _characters(endings, place):
    return sorted(char for char, _ in endings.characters(place))


MANY_STATES = {  # a language, and the number of transitions that are kept
    "nesting": (Ebnf('root ::= "[" root root "]" | "{" root "}" | [abc] [0-9]{29}'), 200),
    "an intersection": (Regex("(?=.*0)(?=.*b)[abc01]{3,90}"), 100),
}


@pytest.mark.parametrize("name", MANY_STATES)
def test_texts_go_on_where_few_states_are_kept(name, monkeypatch):
    """Texts go on by turns, so that some are many states behind others."""
    constraint, most = MANY_STATES[name]
    dice, endings = random.Random(3), endings_of(constraint)
    texts = [walk(endings, dice) for _ in range(9)]
    monkeypatch.setattr(automaton, "MAX_TRANSITIONS", most)
    endings = endings_of(constraint)
    places = [endings.start] * len(texts)
    turns = [row for row, text in enumerate(texts) for _ in text]
    dice.shuffle(turns)
    for row in turns:
        token, following = texts[row].pop(0)
        places[row] = endings.place_after_token(places[row], token)
        assert _characters(endings, places[row]) == following
