"""Tokens that would complete a bad word, against a search of the whole output."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_lite as sgl
from sglang_lite.runtime.requests.bad_words import BadWords
from sglang_lite.runtime.tokens.tokenizer import NoTokenizer

TOKENS = st.lists(st.integers(0, 2), max_size=6)
WORDS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4)
IDS = {" ": 0, "a": 1, "b": 2}


class Letters(NoTokenizer):
    """Tokenizer with a token for each letter."""

    knows_text = True

    def encode(self, text, *, first=True):
        assert not first, "words continue a text"
        return [IDS[letter] for letter in text]


@given(WORDS, TOKENS)
def test_an_ending_completes_a_word(words, output):
    found = BadWords.of_texts(words, Letters(len(IDS))).find_endings(
        np.array(output, dtype=np.int32)
    )
    letters = "".join(" ab"[token] for token in output)
    spelled = [*words, *(f" {word}" for word in words)]
    expected = {
        token for letter, token in IDS.items() if (letters + letter).endswith(tuple(spelled))
    }
    assert set(found) == expected


def test_words_need_a_tokenizer():
    with pytest.raises(sgl.ParameterError, match="bad_words: are texts"):
        BadWords.of_texts(("a",), NoTokenizer(8))
    assert not BadWords.of_texts((), NoTokenizer(8)).lengths
