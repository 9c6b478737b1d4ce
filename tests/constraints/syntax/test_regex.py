"""The regex dialect against its definition: Python's re."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.constraints.emit.regex import to_rust_regex
from sglang_lite.constraints.formal.automaton import accepts, is_empty
from sglang_lite.constraints.formal.nodes import CharSet
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.syntax.regex import parse, parse_schema_pattern
from sglang_lite.protocol import ConstraintError, Regex
from tests.constraints import engine
from tests.constraints.python_regex import to_python

PATTERNS = [
    "abc", "a|b|", "(?:ab)+c?", "[a-c]{2,4}", r"\d+\.\d{2}", r"\w+@\w+\.(com|org)", "(?i)hello", "(?i:a)b", "x{,3}",
    "x{2,}", "[^a-z]", "[]a-]", r"\x41\u0042\U00000043", r"[\d\-x]+", "^abc$", r"\Aab\Z", "^a|^b", "a$|b$", "(^a|b)c$",
    "(?P<year>[0-9]{4})-(?P<month>[01][0-9])", "a{", "{}", "(?s).", ".", r"\s\S", r"a*?b+?", r"[\b]", "(?s:.)x(?-i:y)",
    r"\.\*\\", "é+", "[α-ω]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_language_is_that_of_python(pattern):
    ours = re.compile(to_python(parse(pattern)))
    theirs = re.compile(pattern)
    texts = [
        "",
        "a",
        "b",
        "ab",
        "abc",
        "HELLO",
        "Ab",
        "xxx",
        "3.14",
        "me@x.org",
        "1999-12",
        "a{",
        "{}",
        "\n",
        "]",
        "\b",
    ]
    rng = random.Random(0)
    texts += [sample(Regex(pattern), rng) for _ in range(20)]
    texts += [t[:-1] for t in texts] + [t + "x" for t in texts]
    for text in texts:
        assert bool(ours.fullmatch(text)) == bool(theirs.fullmatch(text)), text


def _escape(random):
    """An escape that may be octal, a backreference or nothing."""
    digits = "".join(
        random.choices("0123456789", weights=[3, 2, 1, 1, 1, 1, 1, 2, 1, 1], k=random.randint(1, 4))
    )
    return "\\" + random.choice(
        [digits, digits, digits, *"abfnrtvdDwWsS.-^", "x4a", "u0041", "N{BULLET}", "N{x}", "q"]
    )


def _quantifier(random):
    least, most = (random.choice(["", "", "0", "1", "2", "02"]) for _ in range(2))
    return random.choice(
        ["", f"{{{least},{most}}}", f"{{{least}}}", f"{{{least}, {most}}}", *"*+?"]
    )


@pytest.mark.parametrize("seed", range(300))
def test_escapes_and_quantifiers_are_pythons(seed):
    rng = random.Random(seed)

    def piece():
        escape = _escape(rng)
        atom = rng.choice(
            [escape, escape, f"[{escape}{_escape(rng)}]", f"[^{escape}]", f"({escape})", "a", ""]
        )
        return atom + _quantifier(rng) + rng.choice(["", "", "", "?", _quantifier(rng)])

    pattern = "".join(piece() for _ in range(rng.randint(1, 3)))
    try:
        theirs = re.compile(pattern)
    except re.error:
        with pytest.raises(ConstraintError):
            parse(pattern)
        return
    if re.search(r"\+\+|[*?}]\+|\\[1-9]|\\b", pattern):  # what is outside the dialect, or may be
        try:
            node = parse(pattern)
        except ConstraintError:
            return
    node = parse(pattern)
    texts = [] if is_empty(node) else [sample(Regex(pattern), rng) for _ in range(6)]
    texts += [
        "".join(rng.choices("a\0\1\7\x08\n\x40\x410128{},", k=rng.randrange(5))) for _ in range(20)
    ]
    for text in texts + [text[:-1] for text in texts] + [text + "0" for text in texts]:
        assert accepts(node, text) == bool(theirs.fullmatch(text)), (pattern, text)


@pytest.mark.parametrize(
    "pattern", [r"\07", r"\012", r"\00", r"\101", r"\0128", r"[\0-\7]", r"[\101\60]{2}", r"[\18]*"]
)
def test_octal_escapes_mean_the_same_in_patterns_of_schemas(pattern):
    node, schema = parse(pattern), parse_schema_pattern(f"^{pattern}$")
    for text in [sample(Regex(pattern), random.Random(seed)) for seed in range(10)] + [
        "A",
        "A0",
        "0",
        "\0" + "12",
        "\n8",
    ]:
        assert accepts(node, text) == accepts(schema, text) == bool(re.fullmatch(pattern, text))


def test_repeats_without_counts():
    assert accepts(parse("a{,}"), "aaa")
    assert accepts(parse("a{,}"), "")
    assert not accepts(parse("a{,}"), "a{,}")
    assert accepts(parse("a{}"), "a{}")
    # ECMA-262 has it as a text, Python as a repeat
    with pytest.raises(ConstraintError, match="minimum count"):
        parse_schema_pattern("a{,}")


@given(st.text(max_size=3))
def test_classes_hold_exactly_pythons_characters(text):
    for pattern in (
        r"\w*",
        r"\W*",
        r"\d*",
        r"\D*",
        r"\s*",
        r"\S*",
        ".*",
        "(?i)[k-s]*",
        r"[^\w\s]*",
    ):
        assert bool(re.fullmatch(to_python(parse(pattern)), text)) == bool(
            re.fullmatch(pattern, text)
        ), pattern


_ATOMS = [
    "a",
    "b",
    "ab",
    ".",
    "[ab]",
    "[^a]",
    "(a|b)",
    "(?:ab|)",
    "[a-c-]",
    r"\.",
    r"\x61",
    "é",
    r"\d",
    r"\w",
    r"[\W_]",
    "(?i:A)",
]


def _pattern(random, depth=0):
    def piece():
        atom = (
            f"({_pattern(random, depth + 1)})"
            if depth < 2 and random.random() < 0.2
            else random.choice(_ATOMS)
        )
        return atom + random.choice(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "*?"])

    return "|".join(
        "".join(piece() for _ in range(random.randrange(4)))
        for _ in range(random.choice([1, 1, 2]))
    )


def _texts(pattern, random):
    texts = [sample(Regex(pattern), random) for _ in range(6)]
    texts += ["".join(random.choices("abAé1_.-\n", k=random.randrange(5))) for _ in range(20)]
    return texts + [text[:-1] for text in texts] + [text + "b" for text in texts]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(80))
def test_random_patterns_match_what_pythons_do_here_and_in_the_engine(seed):
    rng = random.Random(seed)
    pattern = _pattern(rng)
    node, grammar = parse(pattern), engine.byte_engine().compile(Regex(pattern))
    for text in _texts(pattern, rng):
        matches = bool(re.fullmatch(pattern, text))
        assert accepts(node, text) == matches, (pattern, text)
        assert engine.accepts(grammar, text) == matches, (pattern, text)


@pytest.mark.parametrize("seed", range(80))
def test_patterns_of_schemas_are_searched_for(seed):
    rng = random.Random(seed)
    body = _pattern(rng).replace("{,2}", "{0,2}")
    pattern = rng.choice(["{}", "^{}", "{}$", "^{}$", "^a|{}", "(^|,)({})", "(?:{})(b|$)"]).format(
        body
    )
    node = parse_schema_pattern(pattern)
    for text in _texts(body, rng):
        if text.isascii():  # where \\d and \\w mean the same in ECMA-262
            assert accepts(node, text) == bool(re.search(pattern.replace("$", r"\Z"), text)), (
                pattern,
                text,
            )


def test_patterns_of_schemas_have_the_class_escapes_of_ecma_262():
    assert accepts(parse(r"\d\w"), "٣é")
    assert not accepts(parse_schema_pattern(r"^\d"), "٣")
    assert not accepts(parse_schema_pattern(r"^\w"), "é")
    assert accepts(parse_schema_pattern(r"^[\w-.]+$"), "a-.")
    assert accepts(parse_schema_pattern(r"^\u{1F600}\/$"), "😀/")
    assert not accepts(parse_schema_pattern("^.$"), "\u2028")
    assert not accepts(parse_schema_pattern("[]"), "a")
    with pytest.raises(ConstraintError, match="minimum count"):
        parse_schema_pattern("a{,2}")


@pytest.mark.parametrize("depth", [60, 99])
def test_groups_may_be_deep(depth):
    pattern = "(?:a" * depth + ")?" * depth
    grammar = engine.byte_engine().compile(Regex(pattern))
    for count in (0, 1, depth, depth + 1):
        assert engine.accepts(grammar, "a" * count) == (count <= depth)


def test_unicode_categories():
    assert accepts(parse(r"\p{Uppercase_Letter}\p{Letter}"), "Éa")
    assert re.fullmatch(to_python(parse(r"\p{Lu}\p{Ll}+\P{L}\p{^Nd}")), "Éa!?")
    assert not re.fullmatch(to_python(parse(r"\p{Lu}")), "é")


def test_rust_text_leaves_nothing_to_flags():
    assert (
        to_rust_regex(parse("(?i)ab.")) == r"[Aa][Bb][\x{0}-\x{9}\x{B}-\x{D7FF}\x{E000}-\x{10FFFF}]"
    )


def test_an_empty_class_matches_nothing():
    node = parse(r"[^\s\S]")
    assert node == CharSet(())
    assert not re.fullmatch(to_python(node), "a")


REFUSED = {
    "(": "missing )", ")": "unmatched", "a**": "multiple repeat", "*a": "nothing to repeat", r"(a)\1": "backreference",
    "[z-a]": "bad character range", r"[\d-x]": "bad character range", "(?<=ab)c": "one character", "(?<!a|)b": "one character",
    "[abc": "unterminated", "a{3,2}": "min repeat", r"\q": "not supported", "a+++": "multiple repeat",
    "(?L)a": "flag 'L'", "(?-a:b)": "contradict", "(?au)b": "contradict", "(?P<1>a)": "group name", "(?P=a)": "backreference",
    "(?(1)a|b)": "conditional", "(?>a*?)b": "lazy repeats", "(?>a?b?)b": "atomic", "(?:ab?){2,3}+b": "possessive",
    "a{99999}": "go up to", "\\": "backslash", r"\x4": "hexadecimal", r"\ud800": "surrogate", r"\p{Zzz}": "category",
    "\ud800": "surrogate", "(" * 101 + ")" * 101: "nest deeper", "^*": "nothing to repeat", r"\b?": "nothing to repeat",
    "a" * 50_001: "the limit is", "(?#x": "comment",
}  # fmt: skip


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_not_supported_is_refused_with_its_place(pattern):
    with pytest.raises(ConstraintError, match=re.escape(REFUSED[pattern])) as caught:
        parse(pattern)
    assert str(caught.value).startswith("regex: ")


def test_the_caret_stands_under_the_fault():
    with pytest.raises(ConstraintError) as caught:
        parse("ab(?(1)c)")
    _, shown, caret = caught.value.message.split("\n")
    assert shown[caret.index("^")] == "("
