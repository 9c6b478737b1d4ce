"""Automata by derivatives, against Python's re."""

import itertools
import re
import select
import threading

import pytest

from sglang_lite.constraints.formal.automaton import (
    Automaton,
    accepts,
    cached_automaton,
    is_empty,
    useful_states,
)
from sglang_lite.constraints.formal.nodes import (
    ANY_TEXT,
    NOTHING,
    complement,
    intersection,
    literal,
)
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.protocol import ConstraintError

PATTERNS = [
    "",
    "a",
    "a*",
    "(a|b)*abb",
    "[ab]{2,3}",
    "a?b?c?",
    "(ab|a)(bc|c)?",
    "[^a]",
    ".*a.{2}",
    "(a*b*)*",
    "a{0}",
]
WORDS = ["".join(word) for length in range(5) for word in itertools.product("abc", repeat=length)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_language_is_that_of_the_expression(pattern):
    for word in WORDS:
        assert accepts(parse(pattern), word) == bool(re.fullmatch(pattern, word)), word


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(PATTERNS, 2)))
def test_intersections_and_complements(a, b):
    both, outside = intersection(parse(a), parse(b)), complement(parse(a))
    for word in WORDS:
        in_a, in_b = bool(re.fullmatch(a, word)), bool(re.fullmatch(b, word))
        assert accepts(both, word) == (in_a and in_b)
        assert accepts(outside, word) != in_a


def test_emptiness():
    assert is_empty(intersection(parse("[a-z]{1,60}"), parse("[A-Z]{1,60}")))
    assert is_empty(intersection(parse("(aa)*"), parse("a(aa)*")))
    assert not is_empty(complement(parse(".{0,3000}")))
    assert is_empty(intersection(complement(ANY_TEXT), literal("x")))
    assert is_empty(intersection(parse("a{3}"), complement(parse("a+"))))
    assert not is_empty(intersection(parse("a+"), complement(parse("a{1,300}"))))


def test_whether_a_state_leads_to_a_text_is_worked_out_once(monkeypatch):
    machine = Automaton(intersection(parse("(ab)*c|(abb)*d"), parse("(ab)*|.*d")))
    states = list(machine.reachable_transitions(machine.start))
    useful = useful_states(machine, machine.start)
    assert [machine.accepts_some_text(state) for state in states] == [
        state in useful for state in states
    ]
    assert 1 < len(useful) < len(states)
    monkeypatch.delattr(Automaton, "step")
    assert [machine.accepts_some_text(state) for state in states] == [
        state in useful for state in states
    ]


def test_a_lone_surrogate_is_in_no_language_and_in_no_complement():
    assert not accepts(ANY_TEXT, "\ud800")
    assert not accepts(complement(literal("a")), "\ud800")
    assert accepts(complement(literal("a")), "é")


def test_what_needs_too_many_states_is_refused():
    with pytest.raises(ConstraintError, match="too complex"):
        is_empty(intersection(parse("(a|b)*a(a|b){20}"), complement(parse("(a|b)*a(a|b){20}x?"))))


def test_equal_states_are_one():
    found = cached_automaton(parse("(a|b)*(c|c)"))
    assert len(found.reachable_transitions(found.start)) == 2
    assert found.run(found.start, "abab") == found.start
    assert complement(NOTHING) == ANY_TEXT


def let_others_run(frame, event, _):
    """A trace that gives up Python's lock at each line of the automaton."""
    select.select([], [], [], 0)
    return let_others_run if frame.f_code.co_filename.endswith("automaton.py") else None


def test_threads_that_share_an_automaton_find_the_same():
    """Whoever finds a state finds all that is known of it, whatever other threads are adding."""
    node = complement(parse("(a|b)*a(a|b){2}c"))
    words = WORDS[::23]
    expected = [accepts(node, word) for word in words]
    problems = []

    def look(machine, start):
        start.wait()
        try:
            assert [
                machine.accepting(machine.run(machine.start, word)) for word in words
            ] == expected
        except BaseException as error:
            problems.append(error)

    for _ in range(15):
        machine, start = Automaton(node), threading.Barrier(4)
        threads = [threading.Thread(target=look, args=(machine, start)) for _ in range(4)]
        threading.settrace(let_others_run)
        try:
            for thread in threads:
                thread.start()
        finally:
            threading.settrace(None)
        for thread in threads:
            thread.join()
    assert not problems
