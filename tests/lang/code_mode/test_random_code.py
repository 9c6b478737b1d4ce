"""Random programs: what the checker lets through calls the tools with right names, arity and types, and
has the results that Python's own interpreter has. The oracle is `exec`, which shares no code.

All 2,000 of them: python -m tests.lang.code_mode.test_random_code 2000
"""

import sys
import threading

import pytest

import sglang_lite as sgl
from tests.lang.code_mode.random_code import CITIES, Maker, Tools

PLAIN = {"size": (str, int), "near": (str,), "mean": (tuple, int), "table": (bool,)}


def run_ours(text):
    """What a program returns or how it fails, its calls, and whether the checker let it through."""
    tools = Tools()
    code = sgl.CodeTools(tools.functions(), max_calls=10_000)
    try:
        program = code.parse(text)
    except sgl.CodeError as error:
        return ("refused", error.kind), tools.calls, False
    try:
        return ("value", code.run(program, threading.Event(), [])), tools.calls, True
    except sgl.CodeError as error:
        return ("error", error.kind), tools.calls, True


def run_python(text):
    tools = Tools()
    body = "\n".join(f"    {line}" for line in text.splitlines())
    names = {each.__name__: each for each in tools.functions()}
    try:
        exec(f"def program():\n{body}\n", names)
        return ("value", names["program"]()), tools.calls
    except Exception as error:
        return ("error", type(error).__name__), tools.calls


def is_well_typed(call):
    name, *arguments = call
    kinds = PLAIN.get(name, ())
    return len(kinds) == len(arguments) and all(
        type(value) is kind for value, kind in zip(arguments, kinds)
    )


def check(seed, wrong):
    """Checks one program. Returns whether it was run, and how it ended."""
    text = Maker(seed, wrong).program()
    ours, calls, ran = run_ours(text)
    assert all(map(is_well_typed, calls)), (text, calls)
    if not ran:
        assert not calls, text
        assert wrong, (text, ours)  # a program without mistakes is not refused
        return "refused"
    if ours == ("error", "limit"):
        return "limit"
    python, expected = run_python(text)
    if ours == ("error", "tool"):  # what the tool raised, or nothing that Python would do
        ours = ("error", "KeyError")
    assert ours == python, text
    assert calls == expected, text
    return ours[0]


@pytest.mark.parametrize("seed", range(40))
def test_a_program_does_what_python_does(seed):
    check(seed, 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_no_wrong_call_reaches_a_tool(seed):
    check(seed, 0.08)


def test_both_kinds_of_programs_are_among_them():
    ends = [check(seed, 0.08) for seed in range(30)]
    assert {"refused", "value"} <= {*ends}
    assert len(CITIES) == 3


if __name__ == "__main__":
    count = int(sys.argv[1])
    found = [check(seed, 0.08 * (seed % 2)) for seed in range(count)]
    print({end: found.count(end) for end in sorted({*found})})
