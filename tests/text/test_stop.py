"""Stop strings: the outcome does not depend on how the text is cut."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.text.stop import StopMatcher

short = st.text(alphabet="ab\n", min_size=1, max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Brute force: the stop that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text(alphabet="ab\n", max_size=4), max_size=8), st.lists(short, max_size=3))
def test_any_cut_gives_the_same_result(pieces, stops):
    matcher = StopMatcher(tuple(stops))
    out = "".join(matcher.push(piece) for piece in pieces)
    if matcher.matched is None:
        out += matcher.flush()
    assert (out, matcher.matched) == expected("".join(pieces), stops)


@given(st.text(alphabet="ab", max_size=12), short)
def test_nothing_is_released_that_a_stop_could_still_take(text, stop):
    matcher = StopMatcher((stop,))
    released = ""
    for char in text:
        released += matcher.push(char)
        assert stop not in released
        assert expected(text, [stop])[0].startswith(released)


def test_no_stops_hold_nothing_back():
    assert StopMatcher(()).push("abc") == "abc"
