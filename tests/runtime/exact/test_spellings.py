"""Spellings of a text against brute force: all sequences of a tiny vocabulary's tokens."""

import random

import numpy as np
import pytest

from sglang_lite.runtime.exact.beginnings import MassRow
from sglang_lite.runtime.exact.spellings import GAP, SpellingSearch
from sglang_lite.runtime.structured_output.outcomes import DEAD, LIVE, SortedVocabulary
from sglang_lite.runtime.structured_output.spelling_tokens import SPELLED, find_spelling_tokens
from tests.counts import some

TOKENS = ["", "a", "b", "ab", "ba", "aab", "abb", "bb", " ", " a", "é", "éa", "b", "\xff"]
DATA = [token.encode() for token in TOKENS[:-1]] + [b"\xff", b"\xff\xff", b"\xc3", b"\xa9"]
VOCABULARY = SortedVocabulary(DATA)
TEXTS = ["a", "ab", "aabb", " a", "ababb", "é", "aé", " ", "bbbbb"]


def following(seed, ids):
    weights = np.exp(np.random.default_rng((seed, *ids)).normal(size=len(DATA)) * 2)
    return weights / weights.sum()


def spellings_by_hand(text, seed):
    """Probability of each sequence of tokens whose last one spells the end of the text."""
    found = {}
    open_: list[tuple[tuple[int, ...], bytes, float]] = [((), b"", 1.0)]
    while open_:
        ids, spelled, mass = open_.pop()
        for token, share in enumerate(following(seed, ids)):
            longer = spelled + DATA[token]
            if not DATA[token]:
                continue
            if longer.startswith(text):
                found[*ids, token] = mass * share
            elif text.startswith(longer):
                open_.append(((*ids, token), longer, mass * share))
    return found


def search_spellings(text, seed, *, greedy, given_up=()):
    usual = [DATA.index(bytes((byte,))) for byte in text if bytes((byte,)) in DATA]
    search = SpellingSearch(
        text, usual, lambda left: find_spelling_tokens(VOCABULARY, left), DATA, greedy=greedy
    )
    while taken := search.take_beginnings():
        for beginning in taken:
            if beginning.tokens in given_up:
                search.give_up(beginning)
                continue
            outcomes = search.outcomes_after(beginning)
            live = following(seed, beginning.tokens)[outcomes.live_tokens]
            search.add_row(MassRow(beginning, outcomes, np.zeros(0), live))
    return search.list_spellings()


@pytest.mark.parametrize("text", TEXTS)
def test_masses_are_those_of_all_spellings(text):
    for seed in range(some(30, 300)):
        expected = spellings_by_hand(text.encode(), seed)
        found = search_spellings(text.encode(), seed, greedy=False)
        total = sum(expected.values())
        seen = {found.tokens_of(i): float(mass) for i, mass in enumerate(found.masses)}
        for tokens, mass in seen.items():
            assert mass == pytest.approx(expected[tokens])
        assert found.gap <= GAP
        known = sum(seen.values())
        assert -1e-12 <= total - known <= known * found.gap / (1 - found.gap) + 1e-12
        for i, tokens in enumerate(seen):
            spelled = b"".join(DATA[token] for token in tokens)
            assert spelled.startswith(text.encode())
            after = DATA[tokens[-1]][found.skipped[i] :]
            assert spelled == text.encode() + after


@pytest.mark.parametrize("text", TEXTS)
def test_the_likeliest_spelling_is_found_with_fewer_rows(text):
    fewer = 0
    for seed in range(some(30, 300)):
        expected = spellings_by_hand(text.encode(), seed)
        found = search_spellings(text.encode(), seed, greedy=True)
        best = found.tokens_of(int(found.masses.argmax()))
        assert expected[best] == pytest.approx(max(expected.values()))
        all_rows = search_spellings(text.encode(), seed, greedy=False).rows
        assert found.rows <= all_rows
        fewer += all_rows - found.rows
    assert fewer > 0 or len(text) <= 2


def test_what_has_no_row_is_left_out():
    text = b"ab"
    first = DATA.index(b"a")
    found = search_spellings(text, 1, greedy=False, given_up={(first,)})
    expected = spellings_by_hand(text, 1)
    missing = sum(mass for tokens, mass in expected.items() if tokens[0] == first)
    assert 0 < missing <= float(found.masses.sum()) * found.gap / (1 - found.gap)
    assert all(found.tokens_of(i)[0] != first for i in range(len(found.masses)))


def test_tokens_that_spell_a_text():
    dice = random.Random(0)
    for _ in range(some(200, 2000)):
        text = b"".join(dice.choices(DATA[1:], k=dice.randint(1, 3)))
        found = find_spelling_tokens(VOCABULARY, text)
        live = dict(zip(found.live_tokens.tolist(), found.live_positions.tolist(), strict=True))
        classes = found.build_classes()
        for token, data in enumerate(DATA):
            if data and data.startswith(text):
                assert live[token] == SPELLED
            elif data and text.startswith(data):
                assert live[token] == len(data)
            else:
                assert token not in live
            assert classes[token] == (LIVE if token in live else DEAD)
