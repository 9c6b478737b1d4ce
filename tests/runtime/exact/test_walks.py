"""Drawn texts against brute force: all sequences of a tiny vocabulary's tokens, read by `re`."""

import collections
import random
from functools import cache

import numpy as np
import pytest

from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.reader import LanguageBytes, TextReader
from sglang_lite.protocol import ConstraintError, Regex
from sglang_lite.runtime.exact.beginnings import MassRow
from sglang_lite.runtime.exact.searches import Drawing, DrawKey, Likeliest
from sglang_lite.runtime.exact.text_limits import TextLimits
from sglang_lite.runtime.structured_output.outcomes import (
    FIRST_END,
    SortedVocabulary,
    TokenOutcomes,
)
from tests.chi_square import chi_square_fits
from tests.counts import some
from tests.free_reading import longest_match, read_pattern_masses

TOKENS = ["", "a", "b", "1", " ", ",", "ab", "b1", "a,", "1 ", "aab", "é"]
PATTERNS = [
    "a*",
    "[ab]{2,4}",
    "(ab|a)+",
    "a(b+1)?",
    "[a1]*b",
    "(a| )*(1|,)",
    "a{1,3}(, ?a{1,3})*",
    "(é|a)+",
    "[^,]{1,3}",
    ".?b?.?",
]


class Model:
    """Tiny model whose distributions are random, and a search's rows by it.

    Args:
        tokens: other tokens than TOKENS.
        following: other distributions, by the text so far.
    """

    def __init__(self, pattern, seed=0, scale=2.0, tokens=TOKENS, following=None):
        self.data = [token.encode() for token in tokens]
        self.outcomes = TokenOutcomes(
            TextReader(LanguageBytes(language_for_constraint(Regex(pattern)))),
            SortedVocabulary(self.data),
        )
        self.rows = self.steps = 0

        @cache
        def shares_after(ids):
            if following is not None:
                return self._spread(following("".join(tokens[i] for i in ids)))
            weights = np.exp(np.random.default_rng((seed, *ids)).normal(size=len(TOKENS)) * scale)
            return weights / weights.sum()

        self.following = shares_after

    def _spread(self, shares):
        probs = np.zeros(len(self.data))
        for text, share in shares.items():
            probs[self.data.index(text.encode())] = share
        return probs

    def search(self, seeds, limit=50, allows=lambda text: True):
        return Drawing(
            [DrawKey(seed, 5, 1.0) for seed in seeds],
            self.outcomes.reader.start,
            self.data,
            TextLimits(len, limit, allows),
        )

    def best(self, limit=50, allows=lambda text: True):
        limits = TextLimits(len, limit, allows)
        return Likeliest(1, self.outcomes.reader, self.data, limits, any_gap=False)

    def draw(self, search):
        while taken := search.take_beginnings():
            self.steps += 1
            for beginning in taken:
                self.rows += 1
                found = self.outcomes.find_outcomes(beginning.position)
                probs = self.following(beginning.tokens)
                sums = np.bincount(
                    found.build_classes(), weights=probs, minlength=FIRST_END + len(found.ends)
                )
                ends = sums[FIRST_END:].astype(np.float64)
                search.add_row(MassRow(beginning, found, ends, probs[found.live_tokens]))
        return search.draw()


def true_shares(model, pattern, limit=50, least=2e-8):
    masses, left = read_pattern_masses(pattern, TOKENS, model.following, least)
    masses = {
        text: mass for text, mass in masses.items() if text is not None and len(text) <= limit
    }
    total = sum(masses.values())
    return {text: mass / total for text, mass in masses.items()}, left / total, total


@pytest.mark.parametrize("pattern", PATTERNS)
def test_draws_have_the_probabilities_of_what_is_read(pattern):
    for seed in range(some(2, 10)):
        model = Model(pattern, seed)
        shares, left, _ = true_shares(model, pattern)
        assert left < 1e-3
        drawn = [each.text for each in model.draw(model.search(range(some(3000, 30_000))))]
        assert chi_square_fits(collections.Counter(drawn), shares), seed


def test_a_draw_depends_on_its_seed_alone():
    various = 0
    for pattern in PATTERNS:
        model = Model(pattern, 8, scale=0.5)
        together = [each.text for each in model.draw(model.search(range(40)))]
        alone = [model.draw(model.search([seed]))[0].text for seed in range(40)]
        assert together == alone
        various += len(set(alone)) > 3
    assert various >= 7


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_gap_bounds_the_error_of_the_shares(pattern):
    dice = random.Random(4)
    for seed in range(some(10, 100)):
        model = Model(pattern, seed)
        shares, left, total = true_shares(model, pattern)
        count = dice.choice([1, 5, 50])
        drawn = model.draw(model.search(range(count)))[0]
        found = {"probs": drawn.probs, **drawn.figures}
        distance = 0.5 * sum(
            abs(found["probs"].get(text, 0.0) - shares.get(text, 0.0))
            for text in {*found["probs"], *shares}
        )
        assert distance <= found["gap"] + left + 1e-9
        assert np.exp(found["log_mass"]) <= total * (1 + left) + 1e-9
        assert abs(sum(found["probs"].values()) - 1) < 1e-9


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_likeliest_text_is_found(pattern):
    for seed in range(some(30, 300)):
        for scale in (2.0, 0.7):
            model = Model(pattern, seed, scale)
            masses, left = read_pattern_masses(pattern, TOKENS, model.following, 1e-6)
            masses.pop(None, None)
            try:
                found = model.draw(model.best())[0]
            except ConstraintError:  # no clear answer
                assert max(masses.values()) < 2e-3
                continue
            assert masses[found.text] + left >= max(masses.values()) - 1e-12, seed
            assert model.rows < 400


def test_many_unlikely_beginnings_can_lead_to_one_text():
    """After "a", each word ends in "a" being read, because no "!" follows."""
    words = [f" {x}{y}" for x in "bcdefghijklmn" for y in "bcdefghijklmn"]

    def following(text):
        if not text:
            return {"x.": 0.45, "a": 0.55}
        return dict.fromkeys(words, 1 / len(words)) if text == "a" else {"?": 1.0}

    tokens = ["", "x.", "a", "?", *words]
    model = Model(r"x\.|a( [b-n]+!)?", tokens=tokens, following=following)
    assert model.draw(model.best())[0].text == "a"
    drawn = collections.Counter(each.text for each in model.draw(model.search(range(400))))
    assert chi_square_fits(drawn, {"x.": 0.45, "a": 0.55})


def test_a_text_that_is_not_allowed_hides_no_other():
    def following(text):
        if not text:
            return {"x.?": 0.9979, "z.?": 0.0001, "y": 0.0020}
        return {"a.?": 0.45, "b.?": 0.40, "": 0.15}

    model = Model(
        r"x\.|z\.|y[ab]\.", tokens=["", "x.?", "z.?", "y", "a.?", "b.?"], following=following
    )
    for search in (model.best, lambda **limits: model.search([1], **limits)):
        found = model.draw(search(allows=lambda text: text != "x."))[0]
        assert found.text != "x."
        assert np.exp(found.figures["log_mass"]) < 0.0021
    assert model.draw(model.best(allows=lambda text: text != "x."))[0].text == "ya."


def test_beginnings_that_are_too_long_are_left_out_together():
    """Not one after another, which would take the loop's thread minutes."""
    words = [f"{x}{y}{z}" for x in "abcdefgh" for y in "abcdefgh" for z in "abcdefgh"]
    model = Model("x[a-h]+,", tokens=["", "x", ",", *words], following=lambda text: (
        {"x": 1.0} if not text else dict.fromkeys(words, 1 / len(words))
    ))  # fmt: skip
    search = model.search([1], limit=1)
    with pytest.raises(ConstraintError, match="would hardly write a text"):
        model.draw(search)
    assert model.rows == 2
    with pytest.raises(ConstraintError, match="would hardly write a text"):
        model.draw(model.best(limit=1))
    assert model.rows == 4


def test_texts_beyond_the_limit_are_not_drawn():
    model = Model("a+", 1)
    shares, _, _ = true_shares(model, "a+", limit=2)
    drawn = [each.text for each in model.draw(model.search(range(3000), limit=2))]
    assert {len(text) for text in drawn} == {1, 2}
    assert chi_square_fits(collections.Counter(drawn), shares)


def test_texts_that_are_not_allowed_are_not_drawn():
    model = Model("[ab]{2,4}", 2)
    masses, _ = read_pattern_masses("[ab]{2,4}", TOKENS, model.following, 1e-9)
    masses = {text: mass for text, mass in masses.items() if text and "aa" not in text}
    total = sum(masses.values())
    search = model.search(range(3000), allows=lambda text: "aa" not in text)
    drawn = collections.Counter(each.text for each in model.draw(search))
    assert chi_square_fits(drawn, {text: mass / total for text, mass in masses.items()})


def test_nothing_that_leads_nowhere_is_computed_twice():
    """A beginning is computed once, and no draw needs many rows."""
    model = Model("[ab]{2,4}", 5)
    found = model.draw(model.search(range(1000)))
    assert model.rows <= 200
    assert sum(each.figures["tries"] for each in found) / 1000 < 20


def test_a_language_that_the_model_would_not_write_ends_with_an_error():
    model = Model("1{400}", 0)
    with pytest.raises(ConstraintError, match=r"after 512 beginnings|would hardly write a text"):
        model.draw(model.search([1], limit=1000))
    with pytest.raises(ConstraintError, match="would hardly write a text"):
        model.draw(model.search([1], limit=10))


def test_the_reader_reads_what_re_reads():
    dice = random.Random(0)
    for pattern in PATTERNS:
        reader = TextReader(LanguageBytes(language_for_constraint(Regex(pattern))))
        for _ in range(some(500, 5000)):
            free = "".join(dice.choices("aab1 ,é日😀", k=dice.randint(0, 8)))
            data, count, position = free.encode(), 0, reader.start
            while count < len(data) and (after := reader.step(position, data[count])) is not None:
                position = after
                count += 1
            byte = data[count] if count < len(data) else None
            since = reader.count_bytes_since_text(position, byte)
            found = None if since is None else data[: count - since].decode()
            assert found == longest_match(pattern, free), (pattern, free)
