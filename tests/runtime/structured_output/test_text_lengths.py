"""The fewest and the most tokens of a grammar's texts, held against all sequences of tokens."""

import random

import pytest

from sglang_lite import Engine
from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.earley import recognises
from sglang_lite.constraints.formal.lengths import most_bytes
from sglang_lite.constraints.formal.nodes import references
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Choices, Constraint, ConstraintError, Ebnf, Lark, Regex
from sglang_lite.runtime.structured_output import fewest_tokens
from sglang_lite.runtime.structured_output.base import masks_allow_tokens, next_mask
from sglang_lite.runtime.structured_output.token_rests import TokenRests
from sglang_lite.runtime.structured_output.utf8 import byte_ranges, character_set_pattern
from sglang_lite.runtime.structured_output.vocabulary import list_allowed_tokens
from tests.constraints.random_grammars import grammar
from tests.constraints.random_regexes import pattern
from tests.constraints.suites import maskbench
from tests.constraints.test_generation import TOKENS as RANDOM_TOKENS
from tests.constraints.test_generation import enforced_schemas, random_model
from tests.counts import some

FEW = 400  # texts of one number of tokens that are tried
PIECES = ["a", "b", "c", "0", "1", '"', "{", "}", "[", "]", ":", ",", " ", ".", "é", '": ', ", ", '"]', "ab", "abc", "bca",
          '{"', "aaaa", "10", '", "', "cab", "abcabc", '"a": ', '"aaaa"}', "{}", '": 1', '1, "']  # fmt: skip
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(piece.encode() for piece in PIECES if len(piece.encode()) > 1),
]
CALCULATOR = Lark("""
start: sum
sum: product | sum "+" product | sum "-" product
product: atom | product "*" atom
atom: NUMBER | "-" atom | "(" sum ")"
NUMBER: /[0-9]+/
""")
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
# and characters of which one of their shortest texts is
LANGUAGES: dict[str, tuple[Constraint, str]] = {
    "twelve letters": (Regex("[abc]{12}"), "abc"),
    "a choice of longer words": (Choices(("ca", "abcabc", "0101010")), "abc01"),
    "nesting": (Ebnf('root ::= "[" root root "]" | "{" root "}" | [ab]+ "."'), "[]{}ab."),
    "an intersection": (Regex("(?=.*0)(?=.*b)[abc01]{3,9}"), "abc01"),
    "characters of several bytes": (Regex("[é-ü€😀-😂]{2}x?"), "é"),
    "what begins with itself": (Ebnf('root ::= root "," item | item item\nitem ::= [a-c]{2}'), "abc,"),
}  # fmt: skip


def fewest_of_all(is_text, tokens, most, before=b"", many=20_000):
    """Fewest tokens of a text, tried in order of their number; None if no text has at most `most`,
    or if there are too many to try.
    """
    new = {before}
    for count in range(most + 1):
        if any(is_text(each.decode()) for each in new if _is_whole(each)):
            return count
        new = {text + token for text in new for token in tokens}
        if len(new) > many:
            return None
    return None


def member_of(language):
    if len(language.rules) == 1 and not references(body := language.rules[language.start]):
        return lambda text: accepts(body, text)
    return lambda text: recognises(language, text)


def _is_whole(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def found_fewest(language, tokens, before=b""):
    return fewest_tokens.fewest_tokens(
        language.rules, language.start, TokenRests(tokens, ()), None, before
    )


@pytest.mark.parametrize(
    ("kind", "drawn", "letters"), [(Regex, pattern, "abcdeé€01"), (Ebnf, grammar, "abcx")]
)
def test_random_languages(kind, drawn, letters):
    checked = 0
    for seed in range(some(40, 600)):
        dice = random.Random(seed)
        try:
            language = language_for_constraint(kind(drawn(dice)))
        except ConstraintError:  # has no text
            continue
        is_text = member_of(language)
        words = [
            "".join(dice.choices(letters, k=dice.choice([1, 1, 2, 2, 3, 4]))).encode()
            for _ in range(7)
        ]
        tokens = sorted(
            {word[dice.randrange(len(word)) * (dice.random() < 0.3) :] for word in words}
        )
        expected = fewest_of_all(is_text, tokens, 4, many=FEW)
        if expected is not None:
            assert found_fewest(language, tokens) == expected, (seed, tokens)
            checked += 1
        before = dice.choice(words)[: dice.randrange(3)]
        expected = fewest_of_all(is_text, tokens, 4, before, many=FEW)
        if expected is not None and _is_whole(before):
            assert found_fewest(language, tokens, before) == expected, (seed, tokens, before)
    assert checked > 15


@pytest.mark.parametrize("name", LANGUAGES)
def test_languages_with_many_tokens(name):
    constraint, letters = LANGUAGES[name]
    language = language_for_constraint(constraint)
    own = [token for token in TOKENS if set(token) <= set(letters.encode())]
    expected = fewest_of_all(member_of(language), own, 4)
    assert found_fewest(language, TOKENS) == expected is not None


@pytest.mark.parametrize("before", ["", "{", "[ab.", "[a.b", "[a.b.", "a."])
def test_what_was_written_does_not_count(before):
    language = language_for_constraint(LANGUAGES["nesting"][0])
    own = [token for token in TOKENS if set(token) <= set(b"[]{}ab.")]
    expected = fewest_of_all(member_of(language), own, 4, before.encode())
    assert found_fewest(language, TOKENS, before.encode()) == expected is not None


def test_nothing_follows_what_no_text_begins_with():
    assert found_fewest(language_for_constraint(Regex("ab?")), TOKENS, b"c") is None


def test_a_search_that_takes_too_much_work_tells_what_it_knows(monkeypatch):
    monkeypatch.setattr(fewest_tokens, "MAX_WORK", 200)
    language = language_for_constraint(
        Regex("".join(f"(?=[a-z]*{letter})" for letter in "abcdefghij") + "[a-z]+")
    )
    assert 0 <= found_fewest(language, TOKENS) <= 10


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0xD7FF), (0x41, 0x2000), (0xE9, 0x10FFFF), (0x1F600, 0x1F602)]
)
def test_bytes_of_characters(low, high):
    ranges = ((low, min(high, 0xD7FF)), (0xE000, high)) if high > 0xD7FF > low else ((low, high),)
    assert all(first <= last for sequence in byte_ranges(ranges) for first, last in sequence)
    dice = random.Random(low)
    for code in [low, high, *(dice.randrange(0x110000) for _ in range(some(300, 20_000)))]:
        if not 0xD800 <= code <= 0xDFFF:
            text = chr(code).encode()
            assert (character_set_pattern(ranges).fullmatch(text) is not None) == (
                low <= code <= high
            ), code


@pytest.mark.parametrize(("constraint", "most"), [
    (Choices(("a", "abracadabra", "é")), 11), (Regex("[é-ü]{2,9}x"), 19), (Regex("a*"), None), (Regex("(a|bc){0,3}"), 6),
    (Ebnf('root ::= "(" root ")" | "x"'), None), (Ebnf('root ::= x x\nx ::= "a" | "bc"'), 4),
    (Ebnf('root ::= root | "ab"'), 2), (Regex("(?=.{2,3}$)[a-z]+"), 9), (Regex("(?!a)[ab]{2}"), 2),
])  # fmt: skip
def test_most_bytes(constraint, most):
    found = most_bytes((language := language_for_constraint(constraint)).rules, language.start)
    assert found == most or (most is not None and found is not None and most <= found <= 3 * most)


def test_random_texts_have_no_more_bytes():
    for seed in range(some(40, 600)):
        try:
            language = language_for_constraint(Regex(pattern(random.Random(seed))))
        except ConstraintError:
            continue
        most = most_bytes(language.rules, language.start)
        texts = ("".join(random.Random(i).choices("abcdeé01", k=i % 9)) for i in range(200))
        for text in texts:
            if most is not None and len(text.encode()) > most:
                assert not recognises(language, text), (seed, text)


# -------------------------------------------------------------------------------------- of grammars


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model()) as engine:
        yield engine


@pytest.mark.parametrize(("constraint", "expected"), [
    (CALCULATOR, (1, None)), (Regex("[a-z]{12}"), (1, 12)),
    (Choices(("no", "undetermined")), (1, 12)), (json_schema({"type": "boolean"}), (1, 5)),
])  # fmt: skip
def test_with_the_tokens_of_a_model(small_engine, constraint, expected):
    found = small_engine.compile_grammar(constraint).lengths()
    assert (found.fewest, found.most) == expected


def schemas():
    yield from (schema for _, schema in enforced_schemas(some(20, 200)))
    for _, schema, _ in maskbench(some(60, 2)):
        yield json_schema(schema)


def test_every_schema_has_a_length_and_its_shortest_known_text_is_no_shorter(small_engine):
    checked = 0
    for constraint in schemas():
        try:
            compiled = small_engine.compile_grammar(constraint)
        except ConstraintError:
            continue
        found = compiled.lengths()
        assert found.fewest is not None
        assert found.most is None or found.most >= found.fewest
        checked += 1
    assert checked > 15


def witness(compiled, tokens, allowed):
    """Tokens of a text with the fewest, of which each leaves one less; None if there is none.

    Args:
        compiled: grammar.
        tokens: bytes of all tokens.
        allowed: function that returns the tokens that may follow others.
    """
    found, written = [], ""
    for left in range(compiled.lengths().fewest, 0, -1):
        options = [
            (tokens[each], each)
            for each in allowed(found)
            if _is_whole(tokens[each]) and tokens[each]
        ]
        options.sort(key=lambda option: (-len(option[0]), option[0]))
        decoded = ((text.decode(), token) for text, token in options)
        following = (
            (text, token)
            for text, token in decoded
            if compiled.lengths(written + text).fewest == left - 1
        )
        text, token = next(following, ("", None))
        if token is None:
            return None
        found, written = [*found, token], written + text
    return found


SMALL = {
    "an object": json_schema({**OBJECT, "additionalProperties": False}),
    "any order": json_schema({**OBJECT, "additionalProperties": False}, order="any"),
    "a number": json_schema({"type": "integer", "minimum": 100}),
    "an array": json_schema({"type": "array", "items": {"enum": ["ab", 10]}, "minItems": 2}),
    "a calculation": CALCULATOR,
    "nesting": LANGUAGES["nesting"][0],
    "a date": json_schema({"type": "string", "format": "date"}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMALL)
def test_a_limit_of_the_fewest_tokens_admits_a_text(engine, name):
    compiled = engine.compile_grammar(SMALL[name])
    others = compiled.as_combinable()

    def allowed(tokens):
        matcher = others.matcher()
        assert matcher.accept_all(tokens)
        return [] if matcher.finished else list_allowed_tokens(next_mask(matcher))

    found = witness(compiled, [*RANDOM_TOKENS, b""], allowed)
    assert found is not None
    assert masks_allow_tokens(others, found)


PARTS = {
    "a regex": (Regex("id-[0-9]{4}(red|green)?"), "id-1", (2, 8)),
    "an object": (json_schema({**OBJECT, "additionalProperties": False}), '{"a": 1', None),
    "the whole": (Choices(("yes", "no")), "yes", (0, 0)),
}


@pytest.mark.parametrize("name", PARTS)
def test_behind_a_beginning(engine, name):
    constraint, begin, expected = PARTS[name]
    compiled = engine.compile_grammar(constraint)
    found = compiled.lengths(begin)
    assert expected is None or (found.fewest, found.most) == expected
    matcher = compiled.as_combinable().matcher()
    assert matcher.accept_text(begin.encode())
