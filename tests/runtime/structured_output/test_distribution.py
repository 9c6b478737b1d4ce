"""Draws under a constraint are those of the masked distribution: against brute force over small
languages.

The distribution of a text: at each place, the model's probabilities of the characters that some
text of the language has there, and of what may end it there, scaled up to 1. Forced text takes no
draw. Where a text is complete, all but its own characters end it, except for a letter behind a
letter and a digit behind a digit; unless it is a grammar's, so does what follows behind such an
end, as far as it is no beginning of a text.
"""

import collections
import itertools
import json
import math
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sglang_lite import Engine
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Choices, Ebnf, Generation, Lark, Regex, SamplingParams
from sglang_lite.runtime.drafting.guess import Guess
from sglang_lite.runtime.drafting.registry import DRAFTERS
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.constraints.test_generation import byte_alphabet
from tests.counts import some
from tests.runtime.scripted import FreeDrafts, ScriptedModel, hashes

DRAWS = some(2000, 4000)
EOS = 256  # after a token for each byte
LEAST = 1e-3  # p of the chi-square test
PROMPT = "x"
LIKELY = [*"abcdenortuwxyé0123456789.-,!".encode(), EOS]


def logits_of(states):
    """float32 [R, 257]: some 0 to 5, a function of all tokens before, and more for what the
    languages have.
    """
    with np.errstate(over="ignore"):
        odd = np.arange(1, EOS + 2, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        mixed = (np.asarray(states, dtype=np.uint64)[:, None] ^ np.uint64(0x5DEECE66D)) * odd
    logits = ((mixed >> np.uint64(40)) % np.uint64(1009)).astype(np.float32) / 200
    logits[:, LIKELY] += 3
    return logits


class ByteModel(ScriptedModel):
    def logits(self, hidden):
        return torch.from_numpy(logits_of(hidden[:, 0].numpy().view(np.uint64)))


def byte_model():
    alphabet = byte_alphabet()
    backend = Backend(
        models.BPE({alphabet[byte]: byte for byte in range(256)} | {"<end>": EOS}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = Tokenizer(
        backend, [*(bytes([byte]) for byte in range(256)), b"<end>"], [EOS], eos_ids=[EOS]
    )
    return LoadedModel("bytes", ByteModel(), tokenizer, EOS + 1, frozenset({EOS}), 512)


# ---------------------------------------------------------------------------------------- languages


def matching(pattern, alphabet, longest):
    texts = (
        "".join(chars)
        for n in range(longest + 1)
        for chars in itertools.product(alphabet, repeat=n)
    )
    return [text for text in texts if re.fullmatch(pattern, text)]


def words(seed):
    """Some words with common beginnings."""
    draw = random.Random(seed)
    return sorted(
        {"".join(draw.choices("abé", k=draw.randint(1, 5))) for _ in range(draw.randint(3, 25))}
    )


def languages():
    """Yields constraints, each with all its texts."""
    for pattern, alphabet, longest in (
        ("[ab]{1,4}", "ab", 4), ("a{0,6}b?", "ab", 7), ("(?=.*a)[abc]{3}", "abc", 3), ("(?!aa)[ab]{2,4}", "ab", 4),
        ("(ab|a)(bc|c)?", "abc", 4), ("[é-í]{1,2}", "éêëìí", 2), (r"[0-9]\.[05]", "0123456789.", 3), (r"(a|b\b)[-c]?", "abc-", 2),
    ):  # fmt: skip
        yield Regex(pattern), matching(pattern, alphabet, longest)
    yield Regex("hello (world|there|all)"), [f"hello {each}" for each in ("world", "there", "all")]
    yield (
        Regex("x=[01]{2},y=[01]"),
        [f"x={a}{b},y={c}" for a, b, c in itertools.product("01", repeat=3)],
    )
    for seed in range(5):
        yield Choices(tuple(words(seed))), words(seed)
    for seed in range(5, 8):
        yield Ebnf("root ::= " + " | ".join(map(json.dumps, words(seed)))), words(seed)
    yield (
        Ebnf('root ::= "(" root2 ")" | "[" root2 "]"\nroot2 ::= "" | "(" [01] ")" | "x"'),
        [f"{o}{inner}{c}" for o, c in ("()", "[]") for inner in ("", "(0)", "(1)", "x")],
    )
    yield (
        Lark('start: A B?\nA: "a" | "aa"\nB: /b{1,3}/'),
        [a + b for a in ("a", "aa") for b in ("", "b", "bb", "bbb")],
    )
    yield (
        Lark('start: ("y" | "no") ("!" | ",") ~ 0..2'),
        [
            w + "".join(end)
            for w in ("y", "no")
            for n in range(3)
            for end in itertools.product("!,", repeat=n)
        ],
    )
    for schema, values in (
        ({"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 21}, "minItems": 1, "maxItems": 1},
         [[each] for each in range(-3, 22)]),
        ({"enum": ["red", "rod", "ride", 1, None, True]}, ["red", "rod", "ride", 1, None, True]),
        ({"type": "string", "pattern": "^[ab]{0,3}$"}, matching("[ab]{0,3}", "ab", 3)),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
         [list(v) for n in range(4) for v in itertools.product([True, False], repeat=n)]),
        ({"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False},
         [{"a": a, **b} for a in "xy" for b in ({}, {"b": True}, {"b": False})]),
        ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 3, "minItems": 1},
         [list(v) for n in (1, 2, 3) for v in itertools.permutations([1, 2, 3], n)]),
        ({"anyOf": [{"const": "ab"}, {"type": "array", "items": {"const": 7}, "maxItems": 2}, {"type": "null"}]},
         ["ab", [], [7], [7, 7], None]),
        ({"type": "object", "additionalProperties": {"const": 0}, "propertyNames": {"enum": ["p", "q", "pq"]},
          "minProperties": 1, "maxProperties": 2},
         [dict.fromkeys(names, 0) for n in (1, 2) for names in itertools.combinations(["p", "q", "pq"], n)]),
        ({"type": "string", "format": "date", "pattern": "^2024-0[12]-[01]1$"},
         ["2024-01-01", "2024-01-11", "2024-02-01", "2024-02-11"]),
    ):  # fmt: skip
        yield json_schema(schema), [json.dumps(each, ensure_ascii=False) for each in values]


LANGUAGES = list(languages())


# ------------------------------------------------------------------------------------ distributions


def kind(char):
    """Whether a character is a digit or a letter, which a word or number goes on with; else None. A
    byte of a letter with case counts as one.
    """
    if len(char) == 1 and 0xC3 <= char[0] <= 0xD6:
        return "letter"
    text = char.decode("utf-8", "ignore")
    return "digit" if text.isdigit() else "letter" if text.upper() != text.lower() else None


def last_kind(text):
    return kind(text.decode()[-1:].encode())


def masked_distribution(texts, reads):
    """Probability of each text.

    Args:
        texts: all texts of a language.
        reads: whether a text may end further back.
    """
    encoded, found = [text.encode() for text in texts], collections.Counter()
    whole = set(encoded)
    queue: list[Any] = [(b"", None, 1.0)]  # with the end further back
    while queue:
        text, end, p = queue.pop()
        following = {each[len(text)] for each in encoded if each.startswith(text) and each != text}
        complete = text in whole
        last = last_kind(text) if complete else None
        ending = set()
        if complete:
            end = text
            ending = {i for i in range(256) if last is None or kind(bytes([i])) != last} | {EOS}
        elif end is not None:
            ending = set(range(EOS + 1))
        if not following:
            found[text.decode()] += p
            continue
        allowed = sorted(following | ending)
        logits = logits_of(hashes([*PROMPT.encode(), *text])[-1:])[0, allowed].astype(np.float64)
        shares = np.exp(logits - logits.max())
        for token, share in zip(allowed, shares / shares.sum()):
            if token in following:
                goes_back = reads and end is not None and (not complete or token in ending)
                queue.append((text + bytes([token]), end if goes_back else None, p * share))
            else:
                found[end.decode()] += p * share
    return found


def distribution(constraint, texts):
    return masked_distribution(texts, not isinstance(constraint, Ebnf | Lark))


def p_value(counts, probabilities, draws):
    """Of Pearson's chi-square test; what is expected fewer than 5 times is one cell."""
    cells, few, expected_few = [], 0, 0.0
    for text, p in probabilities.items():
        if p * draws < 5:
            few, expected_few = few + counts[text], expected_few + p * draws
        else:
            cells.append((counts[text], p * draws))
    cells += [(few, expected_few)] if expected_few else []
    if len(cells) < 2:
        return 1.0
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def drawn(engine, constraint, limit, **options):
    """How often each text was drawn, of DRAWS with fixed seeds."""
    counts, left = collections.Counter(), threading.Semaphore(0)

    def take(event):
        assert isinstance(event, Generation), event
        assert event.meta["shortened"] == []
        counts[event.text] += 1
        left.release()

    for seed in range(DRAWS):
        params = SamplingParams(max_tokens=limit, seed=seed, temperature=1.0, **options)
        engine.submit(PROMPT, params, constraint, sink=take)
    for _ in range(DRAWS):
        assert left.acquire(timeout=120)
    return counts


@pytest.fixture(scope="module", params=["safe", "off"])
def engine(request):
    with Engine.of(byte_model(), jump_forward=request.param, max_queued=DRAWS) as engine:
        yield engine


def test_the_test_itself():
    """Brute force sums to 1, the test accepts its own draws and refuses a distribution that is a
    little off.
    """
    assert len(LANGUAGES) == 30
    for constraint, texts in LANGUAGES:
        assert len(set(texts)) == len(texts)
        probabilities = distribution(constraint, texts)
        assert probabilities.keys() == set(texts)
        assert math.fsum(probabilities.values()) == pytest.approx(1)
        draws = random.Random(0).choices(list(probabilities), list(probabilities.values()), k=DRAWS)
        assert p_value(collections.Counter(draws), probabilities, DRAWS) > LEAST
    likeliest = max(probabilities, key=lambda text: probabilities[text])
    off = {text: p * 0.85 + 0.15 * (text == likeliest) for text, p in probabilities.items()}
    assert p_value(collections.Counter(draws), off, DRAWS) < LEAST


@pytest.mark.sampled(2)
@pytest.mark.parametrize("closing", ["far away", "at each token"])
@pytest.mark.parametrize("number", random.Random(0).sample(range(30), some(1, 30)))
def test_texts_are_drawn_from_the_masked_distribution(engine, number, closing):
    """With a limit that is far away, and with the length of the longest text, where each token is
    looked at.
    """
    constraint, texts = LANGUAGES[number]
    # and one that ends it
    limit = 400 if closing == "far away" else 1 + max(len(text.encode()) for text in texts)
    counts = drawn(engine, constraint, limit)
    probabilities = distribution(constraint, texts)
    assert counts.keys() <= probabilities.keys()
    assert p_value(counts, probabilities, DRAWS) > LEAST


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("constraint", "texts", "limit", "options"), [
    # The end of a fourth 1 is refused, where the number can go on. That of a fourth 12 is not.
    (json_schema({"type": "array", "items": {"enum": [1, 12, 13]}, "minItems": 4, "maxItems": 4}),
     [json.dumps(each) for each in itertools.product([1, 12, 13], repeat=4) if each != (1, 1, 1, 1)], 400, {"repeats": 3}),
], ids=["an equal item"])  # fmt: skip
def test_a_token_that_is_drawn_again_has_the_probabilities_without_the_refused_ones(
    engine, constraint, texts, limit, options
):
    counts = drawn(engine, constraint, limit, **options)
    probabilities = distribution(constraint, texts)
    assert counts.keys() <= probabilities.keys()
    assert p_value(counts, probabilities, DRAWS) > LEAST


class Wrong:
    """Drafter of one token that is often allowed, and right by chance alone."""

    name = "prompt"

    def can_draft(self, request):
        return True

    def make_guesser(self, request, known, chance):
        return lambda text, state: Guess(text[-1] + 1, 0)

    def learn_tokens(self, *_):
        pass


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("constraint", "texts"), [
    (Choices(("abcd", "abd", "bcc")), ["abcd", "abd", "bcc"]), (Regex("[3-7]{1,2}"), matching("[3-7]{1,2}", "34567", 2)),
], ids=["an enum", "digits"])  # fmt: skip
def test_wrong_drafts_do_not_bias_what_is_drawn(constraint, texts, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "prompt", lambda _: Wrong())
    settings = {"speculation": "prompt", "draft_tokens": 2, "max_queued": DRAWS}
    with Engine.of(byte_model(), **settings) as engine:
        engine.core.scheduler.drafts.drafting.cost = FreeDrafts()
        counts = drawn(engine, constraint, 400)
        counted = engine.core.scheduler.drafts.drafting.counts["prompt"]
    assert counted.drafted > counted.accepted > 0
    assert p_value(counts, distribution(constraint, texts), DRAWS) > 0.01
