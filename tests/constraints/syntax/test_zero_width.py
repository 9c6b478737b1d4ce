"""Lookahead and word boundaries mean what Python's `re` means by them."""

import itertools
import random
import re
import sys

import pytest

import sglang_lite as sgl
from sglang_lite.constraints import memo
from sglang_lite.constraints.byte_matcher import write_llguidance_grammar
from sglang_lite.constraints.formal.automaton import accepts, is_empty
from sglang_lite.constraints.formal.shortest_texts import ShortestTexts
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.syntax.regex import parse, parse_schema_pattern
from sglang_lite.protocol import ConstraintError, Regex
from tests.constraints.random_regexes import pattern_with_assertions

SHORT = [
    "".join(chars) for count in range(1, 5) for chars in itertools.product("ab1-\n", repeat=count)
]
TEXTS = ["".join(chars) for count in range(5) for chars in itertools.product("ab1 -", repeat=count)]
PATTERNS = [
    "(?=a)a*", "(?!a)[ab1]+", "^(?=.*1)(?=.*a).{2,3}$", "(?!.*--)[a-]+", "(?:a(?!b)|b){1,4}?", "a(?=b)b", "a(?=b)",
    "(?!a$)a*", "(?=a|b$).*", "^(?!a$|b$).+$", "(?=(?!aa)a).*", r"\ba", r"a\b", r"a\b-\b1", r"\b", r"a\Bb", r"a\B",
    r"(?:\bab|1\b| ){0,3}", r"^\b(?=a).*\b$", r"(?:a(?!1)){0,4}", r"(?:\b.){2}", r"[ab]*\b[ -]?\b[1a]+", r"(?i)(?=A)a.",
    "(?!)", "(?=)a", "(?<=a)b|a(?<=a)b", "(?<![-b]).+", "(?:(?<!b)a|b)+", "(?<!^)a|b", "(?:(?!--).)*", "(?:(?!--).)*--",
    r"(?:a\b|[ -])+", r"(?:\w+\b[ -]?)*", "(?:-(?!-)|[ab])*a?", "(?:(?:a(?=b)|b)*1)*", "(?:(?=a)|b)*a", "a^b|(?:^|-)a",
    "(?:a(?!$))*b?", "(?:a$|b)+", "(?:a|(?<=a)b|(?<!a)1)*", "(?:(?!ab|b1)[ab1])+", "(?:(?=.*1)a?b?)*1",
]  # fmt: skip
# Beyond ECMA-262, which patterns of schemas are of.
PYTHONS = [
    "a++a", "a*+b", "a?+a", "[ab]++1", "(?>a|ab)1", "(?>ab|a)1", "(?>a*)b", "(?:a|b1)*+-", "(?:a|ab)*+1", "a{1,2}+a", "(?>)a",
    "(?>a+)a*", "(?:a++|b?)*", "(?x) a b # c\n |1", "(?x: a )b ", r"(?x)\ [ #]?", "a(?#b)*", "(?a)\\w+", "(?ai)[k]",
    "(?=a)*a", "(?<=a)*a", "(?m)(?:^a$ ?|b)*", "a$|b",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PYTHONS)
def test_pythons_additions_mean_what_python_means(pattern):
    node = parse(pattern)
    for text in [*TEXTS, "a\n", "é", "K", "K", "k", "#", "a#"]:
        assert accepts(node, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(400))
def test_random_patterns_match_what_python_matches_or_are_refused(seed):
    rng = random.Random(seed)
    pattern = pattern_with_assertions(rng)
    try:
        theirs = re.compile(pattern)
    except re.error:
        with pytest.raises(ConstraintError):
            parse(pattern)
        return
    try:
        node = parse(pattern)
    except ConstraintError as error:
        assert re.search("atomic group|can't be repeated", str(error))  # noqa: PT017 # most are not refused
        return
    # whether \B is in the empty text depends on the version
    for text in SHORT if r"\B" in pattern else ["", *SHORT]:
        assert accepts(node, text) == bool(theirs.fullmatch(text)), (pattern, text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_matches_what_python_matches(pattern):
    node = parse(pattern)
    for text in TEXTS:
        assert accepts(node, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_schemas_pattern_is_found_where_python_finds_it(pattern):
    node = parse_schema_pattern(pattern)
    for text in TEXTS:
        assert accepts(node, text) == bool(re.search(pattern, text)), text


def test_words_are_of_ascii_in_schemas_and_of_unicode_in_regexes():
    assert accepts(parse(r"a\bé?"), "a")
    assert not accepts(parse(r"a\bé?"), "aé")
    assert accepts(parse_schema_pattern(r"^a\bé?$"), "aé")


def test_what_contradicts_itself_is_nothing():
    assert is_empty(parse("(?!a)a"))
    assert is_empty(parse_schema_pattern(r"^(?=b)a"))


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:(?=(?:[ab]{9}){9}1|\w{8}).)*",
        r"(?:a\b){51,}",
        "(?:(?=a).){0,51}",
        r"(?:\b(?:\w{99}|-))*",
    ],
)
def test_what_is_too_large_is_refused_at_its_place(pattern):
    with pytest.raises(ConstraintError, match="can't be repeated") as caught:
        parse(pattern)
    _, shown, caret = caught.value.message.split("\n")
    assert shown[caret.index("^") :].startswith(("(?!", r"\b", "(?="))


@pytest.mark.parametrize(
    "pattern", ["(?:(?=a)[a-c]){49}", "(?:(?!b)[a-c]){1,50}", r"(?:\b\w+\b ){25}"]
)
def test_as_many_as_the_limit_allows_are_compiled(pattern):
    texts = ["", "a", "a" * 49, "a" * 50, "ab", "ac", "b", "ab " * 25, "ab " * 24, "ab  " * 25]
    assert sgl.grammar.check(Regex(pattern)).refused == ()
    for text in texts:
        assert sgl.grammar.matches(Regex(pattern), text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize("part", [r"\b\w+\b ", r"\b-?a?", "(?!--)[-a]?"])
def test_work_does_not_double_with_each_round(part):
    """Texts after a round are parts of several others, so there are far more ways to them than
    texts.
    """
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"
        # at most 1.2 million, with what only the first pattern of a process takes
        assert calls < 2_000_000

    memo.clear()
    sys.setprofile(count)
    try:
        language = language_for_constraint(Regex(f"(?a)(?:{part}){{16}}"))
        text = write_llguidance_grammar(language, ShortestTexts(language.rules).longest_forced)
    finally:
        sys.setprofile(None)
    assert len(text) < 1_000_000
