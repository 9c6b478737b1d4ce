"""Masks lack each token that writes a name of an object again, whatever the tokens are, and no
other.
"""

import random
from itertools import product

import numpy as np
import pytest

from sglang_lite.constraints.byte_matcher import ByteMatcher
from sglang_lite.protocol import ConstraintError, Ebnf
from sglang_lite.runtime.structured_output.base import LoneMatcher, TextLengths, next_mask
from sglang_lite.runtime.structured_output.ending_tokens import EndingTokens
from sglang_lite.runtime.structured_output.ruled_grammar import with_mask_rules
from sglang_lite.runtime.structured_output.vocabulary import build_token_mask
from tests.counts import some

JSON = Ebnf(r"""
root ::= object
value ::= object | array | string | "1"
object ::= "{" (member ("," member)*)? "}"
member ::= string ": "? value | string ":" value
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([ab] | "\\\"")* "\""
""")
WORDS = (
    '"a":1,"a',
    '"a":1,"a":',
    '":1,"a"',
    '":1,"a":',
    '":1,"ab":',
    '{"a":{"a":',
    '","',
    '":"',
    '"b": [1],"b": 1',
    'b":1}},"b":',
    '\\"b":1',
    ',"a"',
)
TOKENS = [
    *("".join(each) for n in (1, 2, 3) for each in product('"ab:,{}[]1\\ ', repeat=n)),
    *WORDS,
]


def repeats(text):
    """Whether an object of a beginning of JSON has a name twice: read character by character."""
    opened, at, expects_name = [], 0, False
    while at < len(text):
        char, at = text[at], at + 1
        if char in "{[":
            opened.append(set() if char == "{" else None)
            expects_name = char == "{"
        elif char in "}]":
            opened.pop()
            expects_name = False
        elif char == ",":
            expects_name = opened[-1] is not None
        elif char == '"':
            start = at
            while at < len(text) and text[at] != '"':
                at += 2 if text[at] == "\\" else 1
            at += 1
            if expects_name and at <= len(text):
                if text[start:at] in opened[-1]:
                    return True
                opened[-1].add(text[start:at])
                expects_name = False
    return False


class Plain(LoneMatcher):
    """Matcher of JSON alone, by bytes."""

    finished = complete = False
    error = ""

    def __init__(self):
        self.at = ByteMatcher(JSON)

    def tokens(self):
        try:
            allowed = set(self.at.filter(TOKENS))
        except ConstraintError:
            return []
        return [token for token, text in enumerate(TOKENS) if text in allowed]

    def cached_mask(self):
        return build_token_mask(self.tokens(), 32 * (len(TOKENS) // 32 + 1))

    def accept(self, token):
        self.at.push(TOKENS[token])
        return True


class PlainGrammar:
    size = 0
    sources = ()

    def __init__(self):
        self.made = []

    def matcher(self):
        self.made.append(Plain())
        return self.made[-1]

    def as_combinable(self):
        return self

    def lengths(self, written=""):
        return TextLengths()

    def endings(self):
        return None


def shown(matcher):
    return np.flatnonzero(
        np.unpackbits(next_mask(matcher).view(np.uint8), bitorder="little")
    ).tolist()


@pytest.mark.parametrize(
    "tokens",
    [['{"', "a", "b"], ['{"a', 'b":', '1,"', "a", "b"], ['{"b', '":1', ',"', "a", "b", "a"]],
)
def test_of_a_name_that_grows(tokens):
    index, grammar, text = EndingTokens([text.encode() for text in TOKENS], ()), PlainGrammar(), ""
    matcher = with_mask_rules(grammar, index, ()).matcher()
    for token in tokens:
        text += token
        shown(matcher)
        assert matcher.accept(TOKENS.index(token))
        assert shown(matcher) == [
            each for each in grammar.made[0].tokens() if not repeats(text + TOKENS[each])
        ], text


def test_of_random_texts():
    index, removed = EndingTokens([text.encode() for text in TOKENS], ()), 0
    for seed in range(some(8, 200)):
        dice, grammar, text = random.Random(seed), PlainGrammar(), ""
        matcher = with_mask_rules(grammar, index, ()).matcher()
        for _ in range(14):
            left, allowed = shown(matcher), grammar.made[0].tokens()
            assert left == [token for token in allowed if not repeats(text + TOKENS[token])], text
            removed += len(allowed) - len(left)
            if not left:
                break
            words = [token for token in left if token >= len(TOKENS) - len(WORDS)]
            token = dice.choice(words if words and dice.random() < 0.5 else left)
            assert matcher.accept(token)
            text += TOKENS[token]
    assert removed > 100
