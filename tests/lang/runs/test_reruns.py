"""Random programs that run again or branch from a node, against a plain reading of docs/saving.md:
nodes with equal prompts, names that are set again, rollbacks, checks that refuse, and bodies that
decide by what they have read.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

import pytest

import sglang_lite as sgl

COUNT = int(os.environ.get("SGLANG_LITE_RERUNS", "40"))
NAMES, CHOICES = ("x", "y", "z"), ("left", "right", "<6>")
Step: TypeAlias = tuple[Any, ...]  # name of the step, and its arguments; steps inside are lists


def some_steps(draw: Random, depth: int = 0) -> list[Step]:
    return [a_step(draw, depth) for _ in range(draw.randint(1, 4 if depth else 6))]


def a_step(draw: Random, depth: int) -> Step:
    name = draw.choice(NAMES)
    kinds = ["text", "gen", "gen", "checked", "select", "several", "hand"]
    match draw.choice(kinds if depth > 1 else [*kinds, "lost", "copy", "fork", "if"]):
        case "text":
            return "text", draw.choice("ab")
        case "hand":
            return "hand", name, draw.choice(["by", "hand"])
        case "lost":
            return "lost", some_steps(draw, depth + 1)
        case "copy":
            return "copy", some_steps(draw, depth + 1)
        case "if":
            return "if", name, some_steps(draw, depth + 1), some_steps(draw, depth + 1)
        case "fork":
            steps = [some_steps(draw, depth + 1) for _ in range(draw.randint(1, 3))]
            return "fork", steps, draw.choice(["gather_variable", "concate_and_append"])
        case kind:
            return kind, name


def accepted(text: str) -> bool:
    return text[1:-1].isdigit() and int(text[1:-1]) % 3 != 0


def is_even(value: object) -> bool:
    return sum(map(ord, str(value))) % 2 == 0


@sgl.function
def program(s, steps):
    play(s, steps)


def play(s: Any, steps: list[Step]) -> None:
    for step in steps:
        match step:
            case "text", text:
                s += text
            case "gen", name:
                s += sgl.gen(name)
            case "checked", name:
                s += sgl.gen(name, check=accepted, retries=9)
            case "select", name:
                s += sgl.select(name, CHOICES)
            case "several", name:
                s += sgl.select(name, CHOICES, multi=True)
            case "hand", name, value:
                s[name] = value
            case "lost", inside:
                with s.checkpoint() as c:
                    play(s, inside)
                    c.rollback()
            case "copy", inside:
                with s.copy() as branch:
                    play(branch, inside)
            case "if", name, then, otherwise:
                play(s, then if name in s and is_even(s[name]) else otherwise)
            case "fork", insides, mode:
                branches = s.fork(len(insides))
                for branch, inside in zip(branches, insides):
                    play(branch, inside)
                branches.join(mode)
        s.sync()  # so that the backend is asked in the order of the steps


class RefusedError(Exception):
    """The value is not possible for its node."""


@dataclass
class Moment:
    """State of a branch after a name was set.

    Attributes:
        node: path of the node that has set the name, or "".
    """

    name: str
    node: str
    text: str
    values: dict[str, Any]


@dataclass
class Plain:
    """Branch of a program, as the documents say."""

    run: PlainRun
    path: str = ""
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)  # set since the fork
    moments: list[Moment] = field(default_factory=list)
    count: int = 0

    def set(self, name: str, value: Any, node: str = "") -> None:
        self.values[name] = self.own[name] = value
        self.moments.append(Moment(name, node, self.text, dict(self.values)))

    def next_node(self) -> str:
        self.count += 1
        return f"{self.path}/{self.count}"

    def play(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case "text", text:
                    self.text += text
                case "hand", name, value:
                    self.set(name, value)
                case "lost", inside:
                    before = self.text, dict(self.values), dict(self.own), list(self.moments)
                    self.play(inside)
                    self.text, self.values, self.own, self.moments = before
                case "copy", inside:
                    (branch,) = self.fork([inside])
                    for name, value in branch.own.items():
                        node = next(
                            each.node for each in reversed(branch.moments) if each.name == name
                        )
                        self.set(name, value, node)
                case "if", name, then, otherwise:
                    self.play(
                        then if name in self.values and is_even(self.values[name]) else otherwise
                    )
                case "fork", insides, mode:
                    branches = self.fork(insides)
                    if mode == "concate_and_append":
                        self.text += "".join(branch.text[len(self.text) :] for branch in branches)
                    for name in dict.fromkeys(name for branch in branches for name in branch.own):
                        self.set(name, [branch.own.get(name) for branch in branches])
                case kind, name:
                    node = self.next_node()
                    value = self.run.answer(node, kind, self.text)
                    self.text += value if isinstance(value, str) else ", ".join(value)
                    self.set(name, value, node)

    def fork(self, insides: list[list[Step]]) -> list[Plain]:
        node = self.next_node()
        branches = []
        for i, inside in enumerate(insides):
            branches.append(
                Plain(
                    self.run,
                    f"{node}.{i}",
                    self.text,
                    dict(self.values),
                    moments=list(self.moments),
                )
            )
            branches[-1].play(inside)
        return branches

    def last(self, name: str, *, in_text: bool = False) -> Moment | None:
        """Last moment at which a node, or one of this branch, has set the name."""
        found = [each for each in self.moments if each.name == name and each.node]
        return next(
            (each for each in reversed(found) if not in_text or each.node.count("/") == 1), None
        )


@dataclass
class PlainRun:
    """Run of a program, as the documents say.

    Attributes:
        known: answers by node, question and prompt: those of the runs before, and then of this one.
        given: node with a given answer, and the answer or None.
    """

    numbers: itertools.count[int]
    known: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    given: tuple[str, str | None] = "", None
    log: dict[tuple[str, str, str], Any] = field(default_factory=dict)

    def answer(self, node: str, kind: str, prompt: str) -> Any:
        question = node, "gen" if kind == "checked" else kind, prompt
        if node == self.given[0] and self.given[1] is not None:
            found = self.valid(self.given[1], kind)
        elif question in self.known and (kind != "checked" or accepted(self.known[question])):
            found = self.known[question]
        else:
            found = self.fresh(kind)
        self.log[question] = found
        return found

    def valid(self, text: str, kind: str) -> Any:
        parts = text.split(", ")
        if (
            (kind == "checked" and not accepted(text))
            or (kind == "select" and text not in CHOICES)
            or (
                kind == "several"
                and (not set(parts) <= set(CHOICES) or len(set(parts)) < len(parts))
            )
        ):
            raise RefusedError
        return parts if kind == "several" else text

    def fresh(self, kind: str) -> Any:
        if kind == "several":
            left, found = list(CHOICES), list[str]()
            while left:
                number = next(self.numbers)
                options = [*left, *(["\n"] if found else [])]
                picked = options[number % len(options)]
                if picked == "\n":
                    break
                found.append(picked)
                left.remove(picked)
            return found
        if kind == "select":
            return CHOICES[next(self.numbers) % len(CHOICES)]
        return next(text for n in self.numbers if accepted(text := f"<{n}>") or kind == "gen")


def numbered() -> tuple[sgl.ScriptedBackend, itertools.count[int]]:
    numbers = itertools.count(1)

    def answer(call: Any) -> str:
        number = next(numbers)
        return call.choices[number % len(call.choices)] if call.choices else f"<{number}>"

    return sgl.ScriptedBackend(answer), numbers


def values_of(state: Any) -> dict[str, Any]:
    return {name: state[name] for name in (*NAMES, "more") if name in state}


@pytest.mark.parametrize("seed", range(COUNT))
def test_reruns_and_branches_are_what_the_documents_say(seed, tmp_path):
    draw = Random(seed)
    steps = some_steps(draw)
    backend, numbers = numbered()
    state = program.run(steps, backend=backend, seed=draw.choice([None, 1]))
    run = PlainRun(itertools.count(1))
    plain = Plain(run)
    plain.play(steps)
    for _ in range(5):
        assert (state.text(), values_of(state)) == (plain.text, plain.values)
        assert next(numbers) == next(run.numbers)  # equally many answers were asked for
        name = draw.choice([*NAMES, "never"])
        if draw.random() < 0.3:
            state.save(tmp_path / "state")
            state = sgl.load(tmp_path / "state", program, backend=backend)
            run.known = {}
        if draw.random() < 0.4:
            check_branches(state, plain, name)
            continue
        value = draw.choice([None, "<5>", "<6>", "left", "right", "left, <6>", "right, left, up"])
        target = plain.last(name)
        node = "" if target is None else target.node
        known = {
            question: each
            for question, each in {**run.known, **run.log}.items()
            if question[0] != node
        }
        again = PlainRun(run.numbers, known, (node, value))
        new = Plain(again)
        try:
            if target is None:
                raise RefusedError
            new.play(steps)
        except RefusedError:
            with pytest.raises(sgl.ParameterError):
                state.rerun(name, value)
        else:
            state, run, plain = state.rerun(name, value), again, new


def check_branches(state: Any, plain: Plain, name: str) -> None:
    moment = plain.last(name, in_text=True)
    if moment is None:
        with pytest.raises(sgl.ParameterError, match="no node of this text set"):
            state.fork_at(name)
        return
    for branch in state.fork_at(name, 2):
        assert (branch.text(), values_of(branch)) == (moment.text, moment.values)
        branch["more"] = 1
        branch += " on"
        (inner,) = branch.fork_at(name)
        assert (inner.text(), values_of(inner)) == (moment.text, moment.values)
    assert (state.text(), values_of(state)) == (plain.text, plain.values)
