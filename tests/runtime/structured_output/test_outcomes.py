"""Masses of texts against brute force: all sequences of a tiny vocabulary's tokens, in float64."""

import random
from functools import cache

import numpy as np

from sglang_lite.constraints.reader import TextReader, TextTree
from sglang_lite.runtime.exact.beginnings import MassRow
from sglang_lite.runtime.exact.mass_tree import MassTree
from sglang_lite.runtime.structured_output.outcomes import (
    FIRST_END,
    SortedVocabulary,
    TokenOutcomes,
)
from tests.counts import some
from tests.free_reading import read_masses


def random_case(dice):
    """Texts, tokens of which the first is the end, and a model of these tokens."""
    letters = dice.choice(["ab", "a ", "a1,", "né"])
    pieces = {"".join(dice.choices(letters, k=dice.randint(1, 3))) for _ in range(5)}
    tokens = ["", *letters, *sorted(pieces - set(letters))][:6]
    texts = sorted(
        {"".join(dice.choices(letters, k=dice.randint(0, 5))) for _ in range(dice.randint(1, 6))}
    )
    seed = dice.getrandbits(32)

    @cache
    def following(ids):
        weights = np.exp(np.random.default_rng((seed, *ids)).normal(size=len(tokens)) * 2)
        return weights / weights.sum()

    return texts, tokens, following


def compute_masses(texts, tokens, following, gap):
    """The tree's masses and gap, the branches computed one after another."""
    data = [token.encode() for token in tokens]
    outcomes = TokenOutcomes(TextReader(TextTree(texts)), SortedVocabulary(data))
    tree = MassTree(outcomes.reader.start, [])
    while taken := tree.take_branches(gap, 1000):
        for branch in taken:
            found, probs = outcomes.find_outcomes(branch.position), following(branch.tokens)
            sums = np.bincount(
                found.build_classes(), weights=probs, minlength=FIRST_END + len(found.ends)
            )
            ends = sums[FIRST_END:].astype(np.float64)
            tree.add_row(MassRow(branch, found, ends, probs[found.live_tokens]), data)
    return {text.decode(): mass for text, mass in tree.masses.items()}, tree.gap


def test_masses_are_those_of_all_sequences():
    dice = random.Random(2)
    spelled_otherwise = 0
    for case in range(some(300, 3000)):
        texts, tokens, following = random_case(dice)
        expected, _ = read_masses(texts, tokens, following)
        masses, gap = compute_masses(texts, tokens, following, 0.0)
        assert gap == 0
        for text in texts:
            assert abs(masses.get(text, 0.0) - expected.get(text, 0.0)) < 1e-9, (case, text)
        spelled_otherwise += _share_of_other_spellings(masses, texts, tokens, following) >= 0.2
    assert spelled_otherwise >= 10  # the usual spelling alone would fail


def _share_of_other_spellings(masses, texts, tokens, following):
    """Greatest share of a text's mass that isn't that of its spelling in fewest tokens, whatever
    follows it.
    """
    shares = [0.0]
    for text in texts:
        if masses.get(text, 0.0) < 1e-6:
            continue
        ways = [((), "")]
        spelled = []
        while ways:
            ids, written = ways.pop(0)
            if written == text:
                spelled.append(ids)
            ways += [
                ((*ids, i), written + token)
                for i, token in enumerate(tokens)
                if token and text.startswith(written + token)
            ]
        each = [
            float(np.prod([following(ids[:k])[token] for k, token in enumerate(ids)]))
            for ids in spelled
        ]
        if sum(each):
            shares.append(1 - each[0] / sum(each))
    return max(shares)


def test_the_gap_bounds_the_error():
    dice = random.Random(3)
    open_cases = 0
    for case in range(some(200, 2000)):
        texts, tokens, following = random_case(dice)
        expected, _ = read_masses(texts, tokens, following)
        total = sum(mass for text, mass in expected.items() if text is not None)
        masses, gap = compute_masses(texts, tokens, following, dice.choice([0.5, 0.1, 0.01]))
        known = sum(masses.values())
        if not known or not total:
            continue
        open_cases += gap > 0
        distance = 0.5 * sum(
            abs(masses.get(text, 0.0) / known - expected.get(text, 0.0) / total) for text in texts
        )
        assert distance <= gap + 1e-9, case
        assert known <= total + 1e-9
        assert total <= known / (1 - gap) + 1e-9
    assert open_cases > 50
