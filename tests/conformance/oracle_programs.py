"""Random programs of which the oracle says what they give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.conformance import random_programs
from tests.conformance.oracle import TYPES
from tests.conformance.oracle_tools import MOST, TOOLS
from tests.conformance.random_programs import Drawing, Open, made, made_in
from tests.conformance.random_steps import COUNTED
from tests.conformance.steps import (
    Abandoned,
    Attempt,
    Cancel,
    Fork,
    Gen,
    Grammar,
    Raise,
    RandomProgram,
    Read,
    Select,
    Set,
    Step,
    Steps,
    Stop,
    Text,
    UseTools,
)

JOINS = (None, "gather_variable", "concate_and_append", "concate_and_append")
REGEXES = ("[ab]{3}", "[ab]{2}", "aa|bb|ab", "[0-9]", "aaaab|aaaba")


class OracleDrawing(Drawing):
    """Programs without what depends on seeds and tokens: draws, penalties, several choices, most
    types.
    """

    def program(self) -> RandomProgram:
        draw = self.draw
        self.stops = draw.choice((0.0, 0.0, 0.05, 0.15))  # how often a step cancels
        whole = super().program()
        settings: dict[str, Any] = {
            key: whole.settings[key] for key in ("stream", "retries") if key in whole.settings
        }
        settings |= {
            "max_new_tokens": draw.choice((3, 6, 10)),
            "temperature": draw.choice((0.0, 1.0, 1.0)),
        }
        return replace(whole, settings=settings)

    def step(self, at: Open) -> Step:
        draw = self.draw
        if draw.random() < 0.08:
            self.left -= 1
            return Set(
                draw.choice(at.readable) if at.readable and draw.random() < 0.5 else self.name(),
                draw.randrange(9),
            )
        if draw.random() < self.stops:
            self.left -= 1
            return Stop(outside=draw.random() < 0.3)
        if at.depth < 3 and not at.stream and draw.random() < 0.04:
            self.left -= 1
            return self.abandoned(at)
        return super().step(at)

    def abandoned(self, at: Open) -> Step:
        """A fork that is rolled back, and what is done with its branches afterwards."""
        draw, inner = self.draw, at.deeper()
        body = self.steps(inner)
        inner = replace(inner, readable=(*inner.readable, *made_in(body)))
        bodies = tuple(self.steps(inner, 1) for _ in range(draw.choice((1, 2, 3))))
        there = [name for step in bodies[0] for name in made(step)]
        read = draw.choice(there) if there and draw.random() < 0.5 else None
        inner = replace(inner, readable=(*inner.readable, *there))
        after = tuple(tuple(Attempt((step,)) for step in self.steps(inner, 1)) for _ in bodies)
        return Abandoned(body, bodies, read, after)

    def gen(self, at: Open) -> Step:
        draw = self.draw
        given: dict[str, Any] = {}
        for key, values, often in (
            ("max_tokens", (0, 1, 2, 4, 8), 0.8),
            ("temperature", (0, 1.0), 0.2),
            ("stop", ("a", ["b", "0"], "ab", " "), 0.2),
            ("include_stop", (True,), 0.1),
            ("return_logprob", (True,), 0.1),
            ("seed", (1, 2), 0.1),
            ("retries", (0, 1, 2), 0.2),
            ("timeout", (600,), 0.1),
            ("check", ("accepts", "picky", "picky_later", "second", "third"), 0.25),
        ):
            if draw.random() < often:
                given[key] = draw.choice(values)
        kind = draw.random()
        if kind < 0.25:
            given = {key: given[key] for key in given if key not in ("stop", "include_stop")}
            given |= {"regex": draw.choice(REGEXES), "max_tokens": 12}
        elif kind < 0.3 and given.get("check") not in ("second", "third"):
            given["n"] = draw.choice((1, 2, 3))
        elif kind < 0.38:
            given = {key: given[key] for key in given if key not in ("stop", "include_stop")}
            given |= {"type": draw.choice(list(TYPES)), "max_tokens": 16}
        elif kind < 0.46:
            given = {key: given[key] for key in given if key in ("retries", "timeout", "check")}
            given["backend"] = draw.choice(("script", "script", "flaky", "flaky twice"))
        elif kind < 0.54:
            given = {key: given[key] for key in given if key in ("retries", "timeout", "check")}
            given |= {"tools": draw.choice(list(TOOLS)), "max_tokens": MOST}
        return Gen(self.name() if draw.random() < 0.9 else None, tuple(given.items()))

    def select(self, at: Open) -> Step:
        method = self.draw.choice(
            ("token_length_normalized", "token_length_normalized", "shortest")
        )
        return Select(
            self.name(),
            self.draw.choice(random_programs.CHOICES),
            method,
            multi=self.draw.random() < 0.1,
        )

    def fork(self, at: Open) -> Step:
        fork = super().fork(at)
        assert isinstance(fork, Fork)
        draw, size, inner = self.draw, len(fork.bodies), at.deeper()
        beside = list(fork.beside)
        there = [name for body in fork.bodies for step in body for name in made(step)]
        if there and draw.random() < 0.3:  # a name that the branches make, too
            beside.append(Set(draw.choice(there), draw.randrange(9)))
        elif at.readable and draw.random() < 0.2:
            beside.append(
                draw.choice((Set, lambda name, _: Gen(name, (("max_tokens", 3),))))(
                    draw.choice(at.readable), 7
                )
            )
        # which all branches would count together
        first = tuple(step for step in fork.first if not counted(step))
        fork = replace(fork, first=first, join=draw.choice(JOINS), beside=tuple(beside))
        if draw.random() < 0.25 and not at.stream:
            fork = replace(fork, undone=self.steps(inner, 1))
        if draw.random() < 0.25:
            fork = replace(fork, after=tuple(self.steps(inner) for _ in range(size)))
            if draw.random() < 0.5:
                fork = replace(fork, again=draw.choice(JOINS))
        return fork

    def turn(self, at: Open) -> Step:
        if self.draw.random() < 0.8:
            return super().turn(at)
        return self.attempted(UseTools(self.name(), self.draw.choice((0, 1, 2, 3))))

    def grammar(self, at: Open) -> Step:
        draw, body, room = self.draw, list[Step](), 9
        while room >= 3 and draw.random() < 0.7:
            step = draw.choice((
                Text("ab"), Gen(self.name(), (("regex", "[ab]{3}"),)), Gen(self.name(), (("regex", "[ab]{2}"),)),
                Select(self.name(), ("a", "b", "c")), Read(None, False),
            ))  # fmt: skip
            body.append(step)
            room -= 3
            body += self.stop()
            if room >= 6 and draw.random() < 0.2:
                parts = tuple(
                    (Gen(self.name(), (("regex", "[ab]{3}"),)), *self.stop()) for _ in range(2)
                )
                body.append(
                    Fork(
                        (),
                        parts,
                        (),
                        draw.choice(JOINS),
                        bool(self.stops) and draw.random() < 0.5,
                        (),
                    )
                )
                room -= 6
        if self.bad():
            body.append(
                draw.choice((Select(self.name(), ("c", "d")), Gen(self.name(), (("regex", "c"),))))
            )
        body.append(draw.choice((Text("."), Gen(self.name(), (("max_tokens", 60),)))))
        return self.attempted(Grammar("[ab]{0,9}[.]", tuple(body)))

    def stop(self) -> Steps:
        """A cancellation, now and then."""
        return (Stop(outside=self.draw.random() < 0.3),) if self.draw.random() < self.stops else ()

    def oops(self, at: Open) -> Step:
        draw, name = self.draw, self.name()

        def gen(**given: Any) -> Step:
            return Gen(name, tuple({"max_tokens": 4, **given}.items()))

        return draw.choice((
            lambda: gen(check="refuses"), lambda: gen(check="refuses", retries=2), lambda: gen(check="raises"),
            lambda: gen(backend="never", timeout=0.001), lambda: gen(backend="never", timeout=0.001, retries=1),
            lambda: gen(backend="down"), lambda: gen(backend="down", retries=1),
            lambda: gen(json_schema=random_programs.BROKEN),
            lambda: self.attempted(Raise()),
            lambda: Cancel(Gen(name, (("backend", "never"),)), draw.choice(JOINS)),
        ))()  # fmt: skip


def counted(step: Step) -> bool:
    given = dict(step.given) if isinstance(step, Gen) else {}
    return given.get("check") in COUNTED or str(given.get("backend")).startswith("flaky")


def drawn(seed: int) -> RandomProgram:
    """The program of a seed."""
    return OracleDrawing(seed).program()
