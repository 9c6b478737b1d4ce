"""Stop strings and patterns: the outcome does not depend on how the text is cut."""

import itertools
from collections.abc import Sequence

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

import sglang_lite as sgl
from sglang_lite.text.stop import StopMatcher

short = st.text(alphabet="ab\n", min_size=1, max_size=3)
pieces = st.lists(st.text(alphabet="ab\n", max_size=4), max_size=8)
PATTERNS = [
    "ab", "a+b", "b{2}", "a.b", "(?s)a.b", "^b", "(?m)^b", "b$", r"a\b", r"\Ba", "(?<=ab)a", "(?<!a)b\n", "a(?=b)",
    "a(?!b)", "(?>a|ab)b", "a++b", r"(a|b)\1", "(?i)AB", "[^a]a", "a*", "b|aab", "|ba", "(?:ab)?", r"\n\Z", "a.*b|\n",
]  # fmt: skip


def compiled(*patterns: str) -> dict[str, regex.Pattern[str]]:
    return {pattern: regex.compile(pattern) for pattern in patterns}


def expected(text: str, stops: list[str], patterns: list[str] = []) -> tuple[str, str | None]:  # noqa: B006
    """Brute force over the prefixes: the first that has a match, and of its matches the one that
    begins first.
    """
    for end in range(1, len(text) + 1):
        prefix = text[:end]
        found = [(prefix.find(s), end, s) for s in stops if s in prefix]
        for pattern in patterns:
            matches = (regex.compile(pattern).match(prefix, at) for at in range(end))
            found += [(*m.span(), pattern) for m in matches if m and m.group()][:1]
        if found:
            start, _, name = min(found)
            return prefix[:start], name
    return text, None


def outcome(
    pieces: list[str], stops: list[str], patterns: Sequence[str] = ()
) -> tuple[str, str | None]:
    matcher = StopMatcher(tuple(stops), compiled(*patterns))
    out = "".join(matcher.push(piece) for piece in pieces)
    if matcher.matched is None:
        out += matcher.flush()
    return out, matcher.matched


@given(pieces, st.lists(short, max_size=3))
def test_any_cut_gives_the_same_result(pieces, stops):
    assert outcome(pieces, stops) == expected("".join(pieces), stops)


@given(
    pieces,
    st.lists(short, max_size=2),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
)
@example(["a", "a", "b"], [], ["a.*z|b"])
@example(["ab", "b"], ["bb"], ["b{2}"])
def test_any_cut_gives_the_same_result_with_patterns(pieces, stops, patterns):
    assert outcome(pieces, stops, patterns) == expected("".join(pieces), stops, patterns)


@given(st.text(alphabet="ab", max_size=12), short)
def test_nothing_is_released_that_a_stop_could_still_take(text, stop):
    matcher = StopMatcher((stop,))
    released = ""
    for char in text:
        released += matcher.push(char)
        assert stop not in released
        assert expected(text, [stop])[0].startswith(released)


def test_only_what_may_still_match_is_held_back():
    matcher = StopMatcher(("END",), compiled(r"\d{3}-\d", "(?<=Q)x"))
    assert [matcher.push(p) for p in ("abc", "E", "Q", " 12", "3-", "y", "55")] == [
        "abc",
        "",
        "EQ",
        " ",
        "",
        "123-y",
        "",
    ]
    assert matcher.flush() == "55"
    assert StopMatcher(()).push("abc") == "abc"


def test_what_was_matched_is_told_apart_from_the_pattern():
    matcher = StopMatcher((), compiled("[0-9]+x"))
    assert matcher.push("ab12") + matcher.push("3xyz") == "ab"
    assert (matcher.matched, matcher.matched_text) == ("[0-9]+x", "123x")


def test_a_pattern_sees_what_was_skipped_but_does_not_match_in_it():
    matcher = StopMatcher((), compiled("(?<=ab)c|b"))
    assert matcher.append_unmatched("ab") == "ab"
    assert matcher.push("c") == ""
    assert matcher.matched is not None


def test_a_busy_machine_gives_no_pattern_up(monkeypatch):
    clock = itertools.count(step=10)
    monkeypatch.setattr("sglang_lite.text.stop.time.perf_counter", lambda: next(clock))
    matcher = StopMatcher((), compiled("[a-d]{2}"))
    assert matcher.push("xyz") + matcher.push("abq") == "xyz"


def test_a_pattern_that_backtracks_for_ever_is_given_up():
    with pytest.raises(sgl.ParameterError, match=r"stop_regex: .*took longer"):
        StopMatcher((), compiled("(?:a|aa)+b")).push("a" * 60)
