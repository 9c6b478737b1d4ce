"""Matchers that share what is known of their states allow what a matcher alone allows."""

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

from sglang_lite.constraints.formal.nodes import ANY_TEXT, Language
from sglang_lite.protocol import Ebnf, JsonSchema, Regex
from sglang_lite.runtime.structured_output.base import next_mask
from sglang_lite.runtime.structured_output.language_states import LanguageStates
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from sglang_lite.runtime.structured_output.mask_cache import MaskCache
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller
from sglang_lite.runtime.structured_output.prefixed import start_matcher_after_text

PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}, '
    '"tags": {"type": "array", "items": {"enum": ["a", "é", "€"]}}}, "required": ["name", "age"]}'
)
ANYTHING = Language("text", {"text": ANY_TEXT})
CONSTRAINTS = [
    JsonSchema(PERSON),
    Regex("(?s).*"),
    Regex("[é-ü€😀-😂]{1,6}x?"),
    Regex(r"a|ab|abc*"),
    Regex(r"(yes|no)[.!]"),
    Ebnf('root ::= "(" root ")" | [0-9]+'),
    Ebnf('root ::= root "+" [0-9]+ | [0-9]+'),  # begins with itself: nothing is shared
]


@pytest.fixture(scope="module", params=[1, 3], ids=["one thread", "threads"])
def threads(request):
    return request.param


@pytest.fixture(scope="module")
def llguidance(engine, threads):
    tokenizer = engine.tokenizer
    return LlguidanceEngine(tokenizer, engine.vocab_size, sorted(tokenizer.eos_ids), threads)


@pytest.fixture(scope="module")
def filler(threads):
    filler = MaskFiller(threads)
    yield filler
    filler.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
def test_shared_masks_are_those_of_a_matcher_alone(llguidance, filler, constraint):
    dice = random.Random(3)
    shared = [grammar.matcher() for grammar in [llguidance.compile(constraint)] for _ in range(24)]
    alone = [llguidance.compile(constraint).matcher() for _ in shared]
    assert any(m.states is not None for m in shared)
    words = (llguidance.vocab_size + 31) // 32
    masks = np.zeros((len(shared), words), np.int32)
    for step in range(25):
        filler.fill(shared, masks[: len(shared)].__setitem__)
        left = []
        for i, (ours, theirs) in enumerate(zip(shared, alone)):
            mask = next_mask(theirs)
            assert np.array_equal(masks[i], mask), step
            if step % 4 == i % 4:
                assert ours.find_forced_tokens() == theirs.find_forced_tokens()
                assert ours.complete == theirs.complete
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(dice.choice(tokens[: dice.choice((4, len(tokens)))]))
            assert ours.accept(token)
            assert theirs.accept(token)
            assert ours.finished == theirs.finished
            if not ours.finished:
                left.append((ours, theirs))
        shared, alone = [a for a, _ in left], [b for _, b in left]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
def test_copies_go_their_own_ways(llguidance, constraint):
    dice = random.Random(4)
    grammar = llguidance.compile(constraint)
    found: list[tuple[Any, tuple[int, ...]]] = []
    # so many share what is known of their states
    found += [(grammar.matcher(), ()) for _ in range(6)]
    for _ in range(40):
        before, tokens = dice.choice(found)
        if before.finished:
            continue
        matcher, new = before.copy(), before.find_forced_tokens()
        if not new or len(tokens) % 2:
            mask = next_mask(before)
            new = dice.choices(
                np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[:9].tolist()
            )
        matcher.find_forced_tokens()
        assert matcher.accept_all(new)
        found.append((matcher, (*tokens, *new)))
    for matcher, tokens in found:
        alone = llguidance.compile(constraint).matcher()
        assert all(map(alone.accept, tokens))
        assert np.array_equal(next_mask(matcher), next_mask(alone))
        assert matcher.find_forced_tokens() == alone.find_forced_tokens()
        assert (matcher.complete, matcher.finished) == (alone.complete, alone.finished)


def test_a_token_that_is_not_allowed_is_refused(llguidance, filler):
    grammar = llguidance.compile(Regex("[a-c]+"))
    matchers = [grammar.matcher() for _ in range(20)]
    masks = np.zeros((20, (llguidance.vocab_size + 31) // 32), np.int32)
    good, bad = llguidance.encode("a")[0], llguidance.encode("z")[0]
    for _ in range(3):
        filler.fill(matchers, masks.__setitem__)
        assert all(matcher.accept(good) for matcher in matchers)
    assert not any(matcher.accept(bad) for matcher in matchers)
    assert all(matcher.error for matcher in matchers)


def test_masks_are_kept_within_bounds():
    states = LanguageStates(ANYTHING, [b"a"], ())
    cache = MaskCache(100)
    for i in range(50):
        cache.cache_mask(states, (i, b""), np.zeros(5, np.int32))
    assert sorted(states.masks) == [(i, b"") for i in range(45, 50)]


def test_what_is_known_of_languages_is_kept_within_bounds(llguidance, engine, threads, monkeypatch):
    """One that is dropped takes its masks along, and the next matchers begin it anew."""
    monkeypatch.setattr("sglang_lite.runtime.structured_output.llguidance.LANGUAGE_BYTES", 50_000)
    tokenizer = engine.tokenizer
    small = LlguidanceEngine(tokenizer, engine.vocab_size, sorted(tokenizer.eos_ids), threads)
    grammars = [small.compile(Regex(f"[a-z ]+{i}")) for i in range(30)]
    seen = []
    for grammar in grammars:
        matcher = [grammar.matcher() for _ in range(20)][-1]
        seen.append(weakref.ref(matcher.states))
        for _ in range(100):
            mask = next_mask(matcher)
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert matcher.accept(int(tokens[-1]))
        grammar.matcher()  # whoever comes next sees how far it has grown
    del matcher
    gc.collect()
    left = [number for number, each in enumerate(seen) if each() is not None]
    assert 0 < len(left) < 15
    assert left == list(range(30 - len(left), 30))
    first = grammars[0].matcher()
    assert first.states is not None
    assert np.array_equal(
        next_mask(first), next_mask(llguidance.compile(Regex("[a-z ]+0")).matcher())
    )


def test_bytes_of_a_character_are_a_place_of_their_own():
    euro = "€".encode()
    states = LanguageStates(ANYTHING, [euro[:1], euro[1:], b"\xff", b"a", b"<end>"], {4})
    begun = states.state_after_token(states.start, 0)
    assert begun not in (states.start, None)
    assert (
        states.state_after_token(begun, 1)
        == states.start
        == states.state_after_token(states.start, 3)
    )
    assert (
        states.state_after_token(begun, 3)
        is states.state_after_token(states.start, 2)
        is states.state_after_token(states.start, 4)
        is None
    )


def test_texts_that_never_meet_are_followed_no_longer(monkeypatch, llguidance, filler):
    monkeypatch.setattr("sglang_lite.runtime.structured_output.language_states.TRIAL", 5)
    grammar = llguidance.compile(Ebnf('root ::= "(" root ")" | "[" root "]" | "x"'))
    matchers = [grammar.matcher() for _ in range(12)]
    masks = np.zeros((12, (llguidance.vocab_size + 31) // 32), np.int32)
    opening = [llguidance.encode(text)[0] for text in "(["]
    for step in range(8):  # each spells a number of its own
        filler.fill(matchers, masks.__setitem__)
        assert all(matcher.accept(opening[i >> step % 4 & 1]) for i, matcher in enumerate(matchers))
    assert any(matcher.states is not None for matcher in matchers)
    assert all(matcher.state is None for matcher in matchers)


def test_requests_that_go_on_from_a_text_share_masks_too(llguidance):
    grammar = llguidance.compile(Regex("name: [a-zé]+, born [12][0-9]{3}"))
    alone = start_matcher_after_text(grammar, "name: zoé, b")
    matchers = [
        start_matcher_after_text(grammar, f"name: {name}, b") for name in ("ann", "bob", "zoé") * 8
    ]
    shared = [matcher for matcher in matchers if matcher.states is not None]
    assert len(shared) > 12
    assert len({matcher.state_key for matcher in shared}) == 1
    for _ in range(4):
        mask = next_mask(alone)
        token = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
        for matcher in shared:
            assert np.array_equal(next_mask(matcher), mask)
            assert matcher.find_forced_tokens() == alone.find_forced_tokens()
            assert matcher.accept(token)
        assert alone.accept(token)


def test_what_fails_for_one_matcher_is_not_kept_for_others_in_its_place(
    llguidance, filler, monkeypatch
):
    grammar = llguidance.compile(JsonSchema(PERSON))
    shared = [grammar.matcher() for _ in range(12)][-3:]
    for token in llguidance.encode('{"name": "'):
        for matcher in shared:
            next_mask(matcher)
            assert matcher.accept(token)
    assert len({matcher.state_key for matcher in shared}) == 1
    right = llguidance.masks(shared[:1])[0]
    bad, make = shared[-1], type(llguidance).masks

    def masks(self, matchers):
        if bad in matchers:
            raise RuntimeError("broken")
        return make(self, matchers)

    shared[0].states.masks.pop(bad.state, None)
    monkeypatch.setattr(type(llguidance), "masks", masks)
    found = np.zeros((3, len(right)), np.int32)
    assert filler.fill(shared, found.__setitem__) == []
    assert (found[:2] == right).all()
    assert not found[2].any()


@pytest.mark.parametrize("constraint", [
    Regex("ab"), Ebnf('root ::= "ab" tail\ntail ::= ""'), Ebnf('root ::= "a" middle\nmiddle ::= "b" tail\ntail ::= end\nend ::= ""'),
    Ebnf('root ::= "ab" tail\ntail ::= "" | "c"'),
], ids=str)  # fmt: skip
def test_the_end_is_known_whether_or_not_the_parser_has_seen_the_text(constraint, engine):
    made = LlguidanceEngine(
        engine.tokenizer, engine.vocab_size, sorted(engine.tokenizer.eos_ids), tracked=True
    )
    grammar = made.compile(constraint)
    seen = grammar.matcher()
    unseen = grammar.matcher()
    for token in made.encode("ab"):
        next_mask(seen)
        assert seen.accept(token)
    next_mask(seen)  # the parser consumes the text
    for token in made.encode("ab"):
        assert unseen.accept(token)  # by masks that are known
    assert unseen.finished == seen.finished
