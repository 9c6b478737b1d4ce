"""The grammar of programs: what it allows, what it forbids, and that all its texts are in the language
that programs are parsed in.
"""

import random
import threading
from dataclasses import dataclass
from typing import Literal

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.byte_matcher import ByteMatcher
from sglang_lite.constraints.matching import validate
from sglang_lite.constraints.random_texts import sample
from tests.lang.code_mode.random_code import Tools


@dataclass
class City:
    name: str
    population: int


def look_up(city: str, unit: Literal["people", "millions"] = "people") -> City:
    return City(city, len(city) * 1000)


def rate(scores: list[float], weights: dict[str, int] = {}, ok: bool | None = None) -> float:  # noqa: B006 # read by a schema
    return sum(scores)


CODE = sgl.CodeTools([look_up, rate])
LONG = """total = 0
names = []
for city in ["Rome", "Oslo"]:
    found = look_up(city, unit="people")
    # only large ones
    if found.population > 3000:
        total += found.population
        names.append(f"{found.name}: {found.population:,}")
    elif total == 2:
        total -= 1
    else:
        total = -total * 2 ** 3

for i, x in enumerate([1, 2]):
    total += x
a = [x + 1 for x in [1, 2] if x > 1]
d = {"a": 1}
d["b"] = len(names[0:1])
r = rate([1.5, 2, total / 2], {"a": 1}, ok=True)
r = rate(scores=[-1.0], ok=None)
if r > 1 and not a:
    return [total, ", ".join(names), r]
else:
    return {"x": sum(x for x in a), "y": look_up("x", "people").name.upper()}"""
GOOD = [
    "return 1",
    "return rate([])",
    "return rate([1, 2.5], ok=True)",
    'return max(["a"], key=len).lower()',
    "return sorted([[1], [1, 2]], key=len)",
    'return sorted(["a"], key=lambda x: look_up(x).population, reverse=True)',
    "return sorted([1, 2], key=lambda x: -x, reverse=True)",
    "key = 1\nreturn max(key, key)",
    LONG,
    f"```python\n{LONG}\n```",
]
BAD = [
    'return rate(["a"])', "return rate()", 'return lookup("x")', "return look_up(1)", 'return look_up("x", "y")',
    'return look_up("x", units="people")', 'return look_up("a", "people", "people")', "import os", "return x._y",
    'return "a".__class__', "x = 1", 'return look_up("x", city="x")', "return 2 ** x", "return 2 ** 65",
    "return f'{x!r}'", "return max([1], key=sum)", "return sum([1], key=len)", "return max([1], reverse=True)",
    "x = lambda y: y\nreturn 1", "return rate(lambda x: x)", "return max([1], key=lambda x, y: x)", "print(1)", "return lambda: 1", "while True:\n    x = 1\nreturn 1", "rate = 1\nreturn 1",
    "if x:\n  y = 1\nreturn 1", "return rate([1], {'a': 1.5})", "return look_up",
    # what small models slid into: sentences and other statements that became one long name
    "Thesum = 1\nreturn 1", "defmain = 1\nreturn 1", "print_all = 1\nreturn 1", "a" * 41 + " = 1\nreturn 1",
    "if a:\n    if b:\n        if c:\n            if d:\n                x = 1\nreturn 1",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_programs_are_texts_of_the_grammar(text):
    validate(CODE.constraint, text)
    CODE.parse(text)


@pytest.mark.parametrize("text", BAD)
def test_other_texts_are_not(text):
    with pytest.raises(sgl.ValueValidationError):
        validate(CODE.constraint, text)


def test_an_engine_can_follow_it():
    matcher = ByteMatcher(sgl.CodeTools(Tools().functions()).constraint)
    assert matcher is not None


@pytest.mark.parametrize("seed", range(25))
def test_every_text_of_the_grammar_is_in_the_language(seed):
    tools = Tools()
    code = sgl.CodeTools(tools.functions())
    text = sample(code.constraint, random.Random(seed))
    kind = None
    try:
        code.run(code.parse(text), threading.Event(), [])
    except sgl.CodeError as error:
        kind = error.kind
    assert kind != "syntax", text
    names = {"size": (str, int), "near": (str,), "mean": (tuple, int), "table": (bool,)}
    assert all(tuple(map(type, call[1:])) == names[call[0]] for call in tools.calls)
