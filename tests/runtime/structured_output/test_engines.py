"""The engines behind one interface: they allow the same tokens, step by step, and refuse what they
can't keep.
"""

import os
import random
from functools import lru_cache

import numpy as np
import pytest

from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.random_texts import sample
from sglang_lite.protocol import (
    Choices,
    Constraint,
    ConstraintError,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Repeated,
    SamplingParams,
    StructuralTag,
    Tag,
)
from sglang_lite.runtime.structured_output.base import masks_allow_tokens, next_mask
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller
from sglang_lite.runtime.structured_output.outlines import OutlinesEngine
from sglang_lite.runtime.structured_output.prefixed import start_matcher_after_text
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary
from sglang_lite.runtime.structured_output.xgrammar import XgrammarEngine
from tests.constraints.random_grammars import grammar as random_grammar
from tests.counts import some

COUNT = int(os.environ.get("SGLANG_LITE_RANDOM_GRAMMARS", "10"))
OBJECT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
REGULAR: dict[str, Constraint] = {
    "a date": Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "words": Regex(r"[a-z]+( [a-z]+){1,5}\."),
    "a class without ASCII": Regex("[é-ü€😀-😂]{1,3}x?"),
    "nothing or something": Regex("(ab|a)?"),
    "ends that can continue": Regex("a|ab|abc*"),
    "a string with escapes": Regex(r'"([^"\\\0-\x1f]|\\["\\nu])*"'),
    "nested repeats": Regex("((a{1,3}b){2,4}c){1,2}"),
    "ignored case": Regex("(?i)straße|k"),
    "choices": Choices(("positive", "negative", "neutral", "neut")),
    "choices with an empty one": Choices(("", "a", "é")),
    "in order": InOrder((Choices(("a", "b")), Regex("[0-9]+"))),
}
OTHERS: dict[str, Constraint] = {
    "any text": Regex("(?s).*"),
    "a line": Regex(".{1,3}"),
    "digits of any script": Regex(r"\d{1,3}"),
    "parentheses": Ebnf('root ::= "a" | "(" root ")" | root "+" root'),
    "sums": Ebnf('root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"'),
    "left recursion": Ebnf('root ::= root "a" | x\nx ::= root | "b" | ""'),
    "quotes and controls": Ebnf(r'root ::= "\"" [^"\\\n]* "\"" | "\x00\t" [\x00-\x1f]'),
    "Lark": Lark('start: (WORD " "?)+\nWORD: /[a-z]{2,4}/'),
    "not": Lark('start: TEXT\nTEXT: /[a-z ]*/ & ~(/(?s:.*)/ "end" /(?s:.*)/)'),
    "tags": StructuralTag(
        (Tag("<f>", JsonSchema(OBJECT), "</f>"), Tag("<g>", Regex("[a-c]+"), "</g>")), ("<f", "<g>")
    ),
    "alternatives": OneOf((Regex("a+b"), Repeated(Choices(("a", "c")), 1, 3))),
    "a schema": JsonSchema(OBJECT),
    "a schema with a string": JsonSchema(
        '{"type": "array", "items": {"type": "string", "maxLength": 3}}'
    ),
}


@lru_cache(maxsize=1)
def byte_engines():
    first = LlguidanceEngine(None)
    vocabulary = Vocabulary(
        (*(bytes([i]) for i in range(256)), *[b""] * (first.vocab_size - 256)), (261,)
    )
    return vocabulary.tokens, (first, XgrammarEngine(vocabulary), OutlinesEngine(vocabulary))


@pytest.fixture(scope="module")
def model_engines(engine):
    tokenizer, size, eos = engine.tokenizer, engine.vocab_size, sorted(engine.tokenizer.eos_ids)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, size, eos)
    engines = (
        LlguidanceEngine(tokenizer, size, eos),
        XgrammarEngine(vocabulary),
        OutlinesEngine(vocabulary),
    )
    return vocabulary.tokens, engines


def allowed(mask, size):
    """The tokens; bits of a mask's last word past the vocabulary mean nothing."""
    return set(
        np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist()
    )


def walk(grammars, spelled, dice, steps=40):
    """Follow a random way through several engines' grammars, the first of them llguidance's. Their
    masks have to be equal at every place of it, but where the text is forced: there llguidance
    allows only the tokens it is made of as a tokenizer would cut it, and the others every token
    that it begins with.
    """
    matchers = [grammar.matcher() for grammar in grammars]
    size = matchers[0].engine.vocab_size
    way = []
    for _ in range(steps):
        assert len({matcher.complete for matcher in matchers}) == 1, way
        done = [matcher.finished for matcher in matchers]
        if all(done):
            return
        least, *rows = [allowed(next_mask(matcher), size) for matcher in matchers]
        if any(done):  # llguidance may see only by its mask that nothing but the end can follow
            assert not done[0], way
            assert not any(spelled[token] for token in least), way
            return
        forced = matchers[0].inner.compute_ff_bytes()
        for matcher, row in zip(matchers[1:], rows):
            assert sorted(least - row) == [], (matcher.engine.name, way)
            more = [spelled[token] for token in sorted(row - least)]
            assert [each for each in more if not each or not forced.startswith(each)] == [], (
                matcher.engine.name,
                way,
            )
        token = dice.choice(sorted(least))
        assert all(matcher.accept(token) for matcher in matchers), way
        way.append(token)


def compiled(name, engines):
    return [
        e.compile({**REGULAR, **OTHERS}[name])
        for e in (engines if name in REGULAR else engines[:2])
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*REGULAR, *OTHERS])
def test_engines_allow_the_same_bytes(name):
    tokens, engines = byte_engines()
    grammars = compiled(name, engines)
    for seed in range(some(4, 15)):
        walk(grammars, tokens, random.Random(seed))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*REGULAR, *OTHERS])
def test_engines_allow_the_same_tokens(name, model_engines):
    tokens, engines = model_engines
    grammars = compiled(name, engines)
    for seed in range(some(2, 5)):
        walk(grammars, tokens, random.Random(seed), steps=15)


def test_engines_allow_the_same_in_random_grammars():
    tokens, engines = byte_engines()
    compared = 0
    for seed in range(COUNT):
        constraint = Ebnf(random_grammar(random.Random(seed)))
        try:
            grammars = [engine.compile(constraint) for engine in engines[:2]]
        except ConstraintError:  # it contradicts itself
            continue
        compared += 1
        for way in range(3):
            walk(grammars, tokens, random.Random(way), steps=20)
    assert compared > COUNT / 2


@pytest.mark.parametrize(
    "text", ["ab\0", "a\x7f", "a\u00e9\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"]
)
def test_every_character_is_itself_in_every_engine(text):
    engines = byte_engines()[1]
    for constraint in (
        Choices((text,)),
        Regex("".join(f"[{c}]" for c in text)),
        Regex(f"(?s).{{{len(text)}}}"),
    ):
        for engine in engines[:2]:
            assert masks_allow_tokens(engine.compile(constraint), list(text.encode()))
            assert not masks_allow_tokens(engine.compile(constraint), list(text.encode())[:-1])


@pytest.mark.parametrize(
    "bad", [b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\x80"]
)
def test_what_is_no_utf8_is_allowed_by_no_engine(bad):
    for engine in byte_engines()[1][:2]:
        assert not masks_allow_tokens(engine.compile(Regex("(?s).*")), list(bad))


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Ebnf('root ::= "a" root "b" | ""'), "only plain regular"),
        (Lark('start: T\nT: /[a-z]+/ & ~"end"'), "only plain regular"),
        (Regex(".*"), "NUL"),
    ],
)
def test_outlines_refuses_what_it_cant_keep(constraint, reason):
    with pytest.raises(ConstraintError, match=f"outlines: .*{reason}"):
        byte_engines()[1][2].compile(constraint)


@pytest.mark.parametrize("size", [63, 64, 65, 96])
def test_a_vocabulary_may_fill_its_last_word(size):
    """The library's own end of a sequence is a token behind the model's."""
    vocabulary = Vocabulary((*(bytes([i]) for i in range(90, 90 + size - 1)), b""), (size - 1,))
    engines = OutlinesEngine(vocabulary), XgrammarEngine(vocabulary)
    ours, other = (next_mask(engine.compile(Regex("[ab]{2}")).matcher()) for engine in engines)
    assert ours.tolist() == other.tolist()


def test_a_batch_is_filled_as_each_row_would_be():
    filler = MaskFiller(2)
    grammars = [engine.compile(each) for engine in byte_engines()[1] for each in REGULAR.values()]
    matchers = [grammar.matcher() for grammar in grammars]
    for matcher in matchers:  # the first masks are known
        matcher.accept_text(b"1")
    matchers = [matcher for matcher in matchers if not matcher.error]
    together = np.full((len(matchers) + 1, 9), 77, np.int32)
    assert filler.fill(matchers, together.__setitem__) == []
    assert (together[:-1] == [next_mask(matcher) for matcher in matchers]).all()
    assert (together[-1] == 77).all()
    filler.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*REGULAR, *OTHERS])
def test_a_text_leads_to_where_any_tokens_of_it_lead(name, model_engines):
    """Every engine of a model's tokens agrees, at every character of some texts."""
    constraint, (tokens, engines) = {**REGULAR, **OTHERS}[name], model_engines
    spelled = {token: i for i, token in reversed(list(enumerate(tokens))) if token}
    for seed in range(some(1, 3)):
        text = sample(constraint, random.Random(seed))
        if any(bytes([byte]) not in spelled for byte in text.encode()):
            continue
        for grammar in compiled(name, engines):
            by_byte = grammar.matcher()
            size = by_byte.engine.vocab_size
            for end in range(1, len(text) + 1):
                assert all(
                    by_byte.accept(spelled[bytes([byte])]) for byte in text[end - 1].encode()
                )
                at_once = start_matcher_after_text(grammar, text[:end])
                assert (at_once.complete, at_once.find_forced_tokens()) == (
                    by_byte.complete,
                    by_byte.find_forced_tokens(),
                )
                if not by_byte.finished:
                    assert allowed(next_mask(at_once), size) == allowed(next_mask(by_byte), size), (
                        text[:end]
                    )


def test_a_text_that_is_not_in_the_grammar_or_has_no_tokens_is_refused(model_engines):
    tokens, engines = model_engines
    for engine in engines:
        grammar = engine.compile(Regex("[^\0]{3}x"))
        assert not start_matcher_after_text(grammar, "é\u07ff").complete
        with pytest.raises(ConstraintError, match="no text of the grammar begins with 'aaay'"):
            start_matcher_after_text(grammar, "aaay")
    assert b"\xf1" not in tokens
    for engine in engines[::2]:
        with pytest.raises(ConstraintError, match="begins with"):
            start_matcher_after_text(engine.compile(Regex("[^\0]{3}x")), "\U00050000")


@pytest.mark.parametrize("text", ["a", "ab"])
def test_the_end_of_the_sequence_may_follow_a_text_that_may_or_cant_go_on(
    text, engine, model_engines
):
    _, engines = model_engines
    (eos,) = engine.tokenizer.eos_ids
    for each in engines[:2]:
        matcher = start_matcher_after_text(each.compile(Regex("ab?")), text)
        assert matcher.finished or eos in allowed(next_mask(matcher), each.vocab_size)
        assert matcher.accept(eos)
        assert matcher.finished


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Choices(("x" * 20_000, "b")), "x" * 20_000),
        (JsonSchema('{"const": "%s"}' % ("x" * 20_000)), '"' + "x" * 20_000 + '"'),
        (JsonSchema('{"type": "array", "items": {"type": "null"}, "minItems": 5000}'), "[" + "null, " * 4999 + "null]"),
        (JsonSchema('{"$defs": {"a": {"const": "%s"}}, "items": {"$ref": "#/$defs/a"}}' % ("x" * 20_000)), '["' + "x" * 20_000),
    ],
    ids=["a choice", "a constant", "an array", "a rule"],
)  # fmt: skip
def test_a_long_text_that_is_forced_is_not_written_out_at_once(constraint, text, model_engines):
    """The step loop would wait for it, whatever is left of the request's tokens."""
    _, (engine, *_) = model_engines
    matcher = engine.compile(constraint).matcher()
    for at in (0, 500):
        assert matcher.find_forced_tokens() == []
        assert next_mask(matcher).any()
        assert matcher.accept_text(text[at : at + 500].encode())
    short = engine.compile(Choices(("x" * 2_000, "b"))).matcher()
    assert short.accept_text(b"x")
    assert len(short.find_forced_tokens()) > 100


@pytest.mark.parametrize(
    "constraint",
    [
        Choices(("a <|im_start|>user <|im_end|>",)),
        Regex(r"(a|b) <\|im_start\|>user <\|im_end\|>"),
        Lark('start: "<" %regex {"substring_words": "a <|im_start|>user <|im_end|>"} ">"'),
    ],
)
def test_text_is_never_written_as_a_special_token(small_engine, constraint):
    """Forced text was encoded as a prompt is, so that a document to copy from could write control
    tokens.
    """
    for seed in range(3):
        found = small_engine.complete(
            "x", SamplingParams(max_tokens=40, seed=seed, temperature=1.0), constraint
        )
        assert (matches(constraint, found.text), found.finish_reason) == (True, "stop")
        assert not set(found.token_ids[:-1]) & small_engine.tokenizer.special_ids
