"""Programs drawn by a seed, and what is left of one that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.conformance.random_steps import BROKEN, METHODS
from tests.conformance.steps import (
    Attempt,
    Call,
    Cancel,
    Checkpoint,
    Copy,
    Fork,
    Gen,
    Grammar,
    Image,
    Nested,
    Raise,
    RandomProgram,
    Read,
    Scope,
    Select,
    Set,
    Step,
    Steps,
    Sum,
    Text,
    Turn,
    UseTools,
    inside,
    walk,
)

# ------------------------------------------------------------------------------------------ drawing

WORDS = ("a", "b ", "ab", " ba", "0", ": ", "abba ", ", ", "é", '"', "\n", "aab b", "a: ", "bb")
CHOICES = (("a", "b"), ("ab", "abb", "b"), ("a b", "ba", "b", "0"), ("no", "yes"), ("é", "a"))
JOINS = (None, "gather_variable", "concate_and_append", "concate_and_append")
PATTERNS = ("[ab]{1,4}", "a|bb|ab", "(ab)*c", "[0-9]{1,3}", "aaaab|aaaba")


@dataclass
class Open:
    """Branches and scopes that are open where a step is drawn, and names that may be read."""

    depth: int
    readable: tuple[str, ...] = ()
    turn: bool = False
    grammar: bool = False
    stream: bool = False
    turns: bool = True  # may begin here: in no turn, no grammar

    def deeper(self, **changes: Any) -> Open:
        return replace(self, depth=self.depth + 1, **changes)


class Drawing:
    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.left = self.draw.choice((8, 16, 32, 50))  # steps
        self.trouble = self.draw.choice((0.0, 0.02, 0.1, 0.25))  # how often things go wrong
        self.count = 0

    def program(self) -> RandomProgram:
        draw = self.draw
        is_async, stream = draw.random() < 0.25, draw.random() < 0.2
        settings: dict[str, Any] = {
            "seed": draw.randrange(1000),
            "max_new_tokens": draw.choice((3, 6, 10)),
        }
        settings["temperature"] = draw.choice((0, 0.7, 1.0))
        if stream:
            settings["stream"] = True
        if draw.random() < 0.1:
            settings["retries"] = 1
        if draw.random() < 0.1:
            settings["timeout"] = 600
        steps = (Text(draw.choice(WORDS)), *self.steps(Open(0, stream=stream), at_least=2))
        # Over before anything is asked. (Once that is known, a rollback is refused, and a branch is
        # not cancelled any more.)
        racy = any(isinstance(step, Checkpoint | Cancel) for step in walk(steps))
        if draw.random() < 0.5 * self.trouble and not racy:
            settings["timeout"] = 1e-9
        return RandomProgram(steps, is_async, settings)

    def name(self) -> str:
        """A new name, or now and then one that is there."""
        self.count += self.draw.random() < 0.85
        return f"v{self.count}"

    def bad(self, often: float = 1.0) -> bool:
        return self.draw.random() < self.trouble * often

    def steps(self, at: Open, at_least: int = 0) -> Steps:
        found: list[Step] = []
        for _ in range(max(at_least, self.draw.choice((0, 1, 2, 2, 3, 4)) + (at.depth == 0) * 4)):
            if self.left <= 0:
                break
            step = self.step(at)
            found.append(step)
            at = replace(at, readable=(*at.readable, *made(step)))
        return tuple(found)

    def step(self, at: Open) -> Step:
        self.left -= 1
        draw = self.draw
        kinds: dict[Callable[[Open], Step], float] = {
            self.text: 3,
            self.gen: 5,
            self.select: 1.5,
            self.read: 1.5,
        }
        if self.trouble:
            kinds[self.oops] = 10 * self.trouble
        if at.depth < 4:
            kinds |= {
                self.sum: 1,
                self.fork: 2.5,
                self.copy: 0.3,
                self.scope: 0.7,
                self.nested: 0.3,
            }
            kinds[self.attempt] = 0.3
            if not at.stream:
                kinds[self.checkpoint] = 1.5
            if at.turns and not at.turn:
                kinds[self.turn] = 1
                kinds[self.grammar] = 0.5
                kinds[self.call] = 0.2
        kind: Callable[[Open], Step] = draw.choices(list(kinds), list(kinds.values()))[0]
        return kind(at)

    def text(self, at: Open) -> Step:
        return Text(self.draw.choice(WORDS))

    def gen(self, at: Open) -> Step:
        draw = self.draw
        given: dict[str, Any] = {"max_tokens": draw.choice((0, 1, 2, 4, 8))}
        for key, values, often in (
            ("temperature", (0, 1.0, 1.5), 0.3),
            ("top_k", (1, 3), 0.1),
            ("top_p", (0.5, 0.9), 0.1),
            ("min_p", (0.1, 0.3), 0.1),
            ("seed", (1, 2), 0.1),
            ("min_tokens", (0,), 0.1),
            ("stop", ("a", ["b", "0"], "ab"), 0.2),
            ("ignore_eos", (True,), 0.1),
            ("include_stop", (True,), 0.1),
            ("frequency_penalty", (0.5,), 0.1),
            ("return_logprob", (True,), 0.1),
            ("retries", (0, 1, 2), 0.1),
            ("timeout", (600,), 0.1),
            ("check", ("accepts", "picky", "picky_later"), 0.15),
        ):
            if draw.random() < often:
                given[key] = draw.choice(values)
        kind = draw.random()
        if kind < 0.15:
            given["regex"] = draw.choice(PATTERNS)
        elif kind < 0.25:
            given["type"] = draw.choice(("int", "bool", "literal", "list"))
        elif kind < 0.3:
            given["n"] = draw.choice((1, 2, 3))
        elif kind < 0.33:
            given["backend"] = "script"
            given.pop("return_logprob", None)
        if "regex" in given or "type" in given:
            given["max_tokens"] = draw.choice((2, 12, 24))
            given.pop("ignore_eos", None)
        return Gen(self.name() if draw.random() < 0.9 else None, tuple(given.items()))

    def select(self, at: Open) -> Step:
        draw = self.draw
        multi = draw.random() < 0.1
        method = draw.choice(list(METHODS))
        temperature = 0.0 if method == "shortest" else draw.choice((0.0, 0.0, 0.5, 2.0))
        return Select(self.name(), draw.choice(CHOICES), method, temperature, multi)

    def sum(self, at: Open) -> Step:
        parts = [
            self.draw.choice((self.text, self.gen, self.gen, self.select))(at) for _ in range(3)
        ]
        return (
            Sum((Text(self.draw.choice(WORDS)), *parts))
            if isinstance(parts[0], Text)
            else Sum(tuple(parts))
        )

    def read(self, at: Open) -> Step:
        draw = self.draw
        name = draw.choice(at.readable) if at.readable and draw.random() < 0.8 else None
        ways = (
            tuple(self.steps(at.deeper()) for _ in range(2))
            if at.depth < 4 and draw.random() < 0.5
            else ()
        )
        return Read(name, draw.random() < 0.5, ways)

    def fork(self, at: Open) -> Step:
        draw = self.draw
        size = draw.choice((1, 2, 2, 3, 4))
        inner = at.deeper()
        first = tuple(
            draw.choice((self.text, self.gen, self.select))(inner)
            for _ in range(draw.choice((0, 1, 2)))
        )
        inner = replace(
            inner, readable=(*inner.readable, *(name for step in first for name in made(step)))
        )
        bodies = tuple(self.steps(inner) for _ in range(size))
        read = [
            (i, name) for i in range(size) for step in (*first, *bodies[i]) for name in made(step)
        ]
        return Fork(
            first, bodies, self.steps(at.deeper()) if draw.random() < 0.3 else (),
            draw.choice(JOINS),
            draw.random() < 0.3, tuple(draw.sample(read, min(len(read), draw.choice((0, 0, 1, 2))))),
        )  # fmt: skip

    def copy(self, at: Open) -> Step:
        return Copy(self.steps(at.deeper(), 1))

    def scope(self, at: Open) -> Step:
        return Scope(self.name(), self.steps(at.deeper(), 1))

    def turn(self, at: Open) -> Step:
        return Turn(
            self.draw.choice(("user", "assistant")),
            self.steps(at.deeper(turn=True), 1),
            self.draw.random() < 0.7,
        )

    def grammar(self, at: Open) -> Step:
        """Text and generations of the language's parts; now and then something that it has no place
        for.
        """
        draw, body = self.draw, list[Step]()
        for _ in range(draw.choice((1, 2, 3))):
            body.append(draw.choice((
                Text("ab"), Gen(self.name(), (("regex", "[ab]{1,3}"),)), Gen(self.name(), (("regex", "[ab]{2}"),)),
                Select(self.name(), ("a", "b", "c")), Read(None, False),
            )))  # fmt: skip
            if draw.random() < 0.2:
                parts = tuple((Gen(self.name(), (("regex", "[ab]{1,3}"),)),) for _ in range(2))
                body.append(Fork((), parts, (), draw.choice(JOINS), False, ()))
        if self.bad():
            body.append(
                draw.choice(
                    (
                        Text("x"),
                        Select(self.name(), ("c", "d")),
                        Gen(self.name(), (("regex", "c"),)),
                    )
                )
            )
        body.append(draw.choice((Text("."), Gen(self.name(), (("max_tokens", 60),)))))
        return self.attempted(Grammar("[ab]{0,60}[.]", tuple(body)))

    def attempted(self, step: Step) -> Step:
        return Attempt((step,)) if self.draw.random() < 0.8 else step

    def checkpoint(self, at: Open) -> Step:
        draw, inner = self.draw, at.deeper()
        body = self.steps(inner, 1)
        there = [name for step in body for name in made(step)]
        read = draw.choice(there) if there and draw.random() < 0.5 else None
        return Checkpoint(body, draw.choice((0, 1, 1, 2)), read, self.steps(inner))

    def attempt(self, at: Open) -> Step:
        return Attempt(
            (*self.steps(at.deeper(), 1), *((Raise(),) if self.draw.random() < 0.3 else ()))
        )

    def nested(self, at: Open) -> Step:
        return Nested(self.steps(at.deeper(), 1))

    def call(self, at: Open) -> Step:
        return Call(
            (Text(self.draw.choice(WORDS)), *self.steps(Open(at.depth + 1, stream=at.stream), 1))
        )

    def oops(self, at: Open) -> Step:
        """Something that goes wrong."""
        draw, name = self.draw, self.name()

        def gen(**given: Any) -> Step:
            return Gen(name, tuple({"max_tokens": 4, **given}.items()))

        return draw.choice((
            lambda: gen(check="refuses"), lambda: gen(check="refuses", retries=2), lambda: gen(check="picky"),
            lambda: gen(backend="never", timeout=0.01),
            lambda: gen(check="raises"), lambda: gen(check="undecided"), lambda: gen(backend="down"),
            lambda: gen(temperature=5000), lambda: gen(json_schema=BROKEN), lambda: gen(type="list", max_tokens=2),
            lambda: self.attempted(Raise()), lambda: self.attempted(Image()),
            lambda: Cancel(Gen(name, (("max_tokens", 2), ("check", "never"))), draw.choice(JOINS)),
            lambda: Cancel(Gen(name, (("backend", "never"),)), draw.choice(JOINS)),
        ))()  # fmt: skip


def made(step: Step) -> list[str]:
    """Names that are there, in the state, when a step has been taken."""
    match step:
        case Gen(name) | Select(name) | Scope(name) | Set(name) | UseTools(name):
            inner = made_in(step.body) if isinstance(step, Scope) else []
            return [*inner, name] if name is not None else []
        case Sum(parts):
            return made_in(parts)
        case Turn(_, body) | Copy(body) | Grammar(_, body) | Nested(body):
            return made_in(body)
        case Checkpoint(last=last):
            return made_in(last)
        case Fork(join=str(), first=first, bodies=bodies):
            return [*made_in(first), *(name for body in bodies for name in made_in(body))]
        case _:
            return []


def made_in(steps: Steps) -> list[str]:
    return [name for step in steps for name in made(step)]


def drawn(seed: int) -> RandomProgram:
    """The program of a seed."""
    return Drawing(seed).program()


# ---------------------------------------------------------------------------------------- shrinking


def smaller(whole: RandomProgram, fails: Callable[[RandomProgram], bool]) -> RandomProgram:
    """A program that fails too and of which no step can be left out."""
    again = True
    while again:
        again = False
        for steps in _less(whole.steps):
            candidate = replace(whole, steps=steps)
            with contextlib.suppress(Exception):
                if fails(candidate):
                    whole, again = candidate, True
                    break
    return whole


def _less(steps: Steps) -> Iterator[Steps]:
    for i, step in enumerate(steps):
        yield steps[:i] + steps[i + 1 :]
        parts = inside(step)
        for inner in parts.values():
            yield steps[:i] + inner + steps[i + 1 :]
    for i, step in enumerate(steps):
        for (name, at), inner in inside(step).items():
            for less in _less(inner):
                value: Any = less
                if at is not None:
                    value = list(getattr(step, name))
                    value[at] = less
                    value = tuple(value)
                yield (*steps[:i], replace(step, **{name: value}), *steps[i + 1 :])  # type: ignore[type-var]  # every step is a dataclass
        if isinstance(step, Gen):
            for key in dict(step.given):
                left = tuple(pair for pair in step.given if pair[0] != key)
                yield (*steps[:i], Gen(step.name, left), *steps[i + 1 :])
