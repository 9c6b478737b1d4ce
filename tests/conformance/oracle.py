"""A plain interpreter of what the documentation says that a program means. It shares no code with
the package.

A step is taken when its turn comes and is done at once: nothing is queued, nothing runs beside
anything else. So what a program gives here is what it has to give however its answers arrive. The
model is a rule as well: its next character depends on all of the text before it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.oracle_branches import Branch, Race, RaisedError, Value, known
from tests.conformance.oracle_tools import MOST, TOOLS, ToolCall, fails, offered, result
from tests.conformance.steps import (
    Abandoned,
    Attempt,
    Call,
    Cancel,
    Checkpoint,
    Copy,
    Fork,
    Gen,
    Grammar,
    Nested,
    Raise,
    RandomProgram,
    Read,
    Scope,
    Select,
    Set,
    Step,
    Steps,
    Stop,
    Sum,
    Text,
    Turn,
    UseTools,
    names,
    walk,
)

# ---------------------------------------------------------------------------------------- the model

END = "\0"  # of a generation
LIKELY = "ab01. "
# Letters are the bytes of a text.
ALPHABET = (
    END
    + LIKELY
    + "".join(chr(c) for c in range(33, 127) if chr(c) not in LIKELY)
    + "\n"
    + "é".encode().decode("latin-1")
)
PRIME = 101  # above the size of the alphabet
MASK = 2**64 - 1
POWERS = [pow(0x9E3779B97F4A7C15, i + 1, 2**64) for i in range(4096)]
IDS = {letter: i for i, letter in enumerate(ALPHABET)}


class NearTieError(Exception):
    """Two choices are as likely as each other: nobody can say which one an engine takes."""


class NotDrawnError(Exception):
    """A program that is not drawn: backends, or times, differ in what they make of it."""


def state_of(ids: Iterable[int]) -> int:
    """A number of all letters and their order."""
    return sum((each + 1) * power for each, power in zip(ids, POWERS)) & MASK


def logits(state: int) -> list[float]:
    """Of each letter of the alphabet, far from each other: a draw is always the likeliest one."""
    state = (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 & MASK
    state ^= state >> 32
    a, b, c = 1 + state % (PRIME - 1), state // 128 % PRIME, 1 + state // 2**40 % 1008
    found = [
        40.0 * ((a * i + b) % PRIME) + 5.0 * (c * (i + 1) % 1009) / 1009
        for i in range(len(ALPHABET))
    ]
    for i in range(1, 1 + len(LIKELY)):
        found[i] += 40 * PRIME
    found[0] += 80 * PRIME if state % 4 == 0 else 0
    return found


def spelled(text: str) -> list[int]:
    return [IDS[letter] for letter in text.encode().decode("latin-1")]


def generated(
    prompt: str,
    limit: int,
    stops: Sequence[str] = (),
    keep_stop: bool = False,
    words: frozenset[str] | None = None,
) -> str:
    """The model's text: of at most `limit` letters, up to one of the stops, and one of the words if
    there are any.
    """
    before, out = spelled(prompt), ""
    if not prompt:
        raise NotDrawnError("engines refuse it")
    while len(out) < limit:
        known = logits(state_of(before))
        allowed = set(ALPHABET)
        if words is not None:
            allowed = {
                word[len(out)] if len(word) > len(out) else END
                for word in words
                if word.startswith(out)
            }
            # it ends where the model goes elsewhere, not in a word
            if END in allowed and len(allowed) > 1:
                allowed |= {x for x in ALPHABET if not (out[-1:].isalpha() and x.isalpha())}
        letter = max(allowed, key=lambda letter: known[IDS[letter]])
        if letter == END or (
            words is not None and not any(word.startswith(out + letter) for word in words)
        ):
            break
        out += letter
        before.append(IDS[letter])
        for stop in stops:
            if out.endswith(stop):
                return out if keep_stop else out[: -len(stop)]
    if words is not None and out not in words:
        raise NotDrawnError("it is cut")
    return out


def chosen(prompt: str, choices: Iterable[str]) -> str:
    """The choice with the best average log-probability per letter."""
    before, scores = spelled(prompt), dict[str, float]()
    if not prompt:
        raise NotDrawnError("engines refuse it")
    for choice in choices:
        ids = spelled(choice)
        each = [logits(state_of(before + ids[:i])) for i in range(len(ids))]
        scores[choice] = sum(known[i] - max(known) for known, i in zip(each, ids)) / len(ids)
    best, *others = sorted(scores, key=lambda choice: -scores[choice])
    if others and scores[best] - scores[others[0]] < 0.1:
        raise NearTieError
    return best


# ---------------------------------------------------------------------------------------- languages


def letters(least: int, most: int) -> frozenset[str]:
    """All texts of a and b, of least to most letters."""
    found = [[""]]
    for _ in range(most):
        found.append([word + letter for word in found[-1] for letter in "ab"])
    return frozenset(word for words in found[least:] for word in words)


# The texts of each pattern that a program may have.
LANGUAGES: dict[str, frozenset[str]] = {
    "[ab]{3}": letters(3, 3),
    "[ab]{2}": letters(2, 2),
    "aa|bb|ab": frozenset({"aa", "bb", "ab"}),
    "[0-9]": frozenset("0123456789"),
    "aaaab|aaaba": frozenset({"aaaab", "aaaba"}),
    "[ab]{0,9}[.]": frozenset(word + "." for word in letters(0, 9)),
    "c": frozenset("c"),
}


# The texts of each type that a program may have, and their values.
TYPES: dict[str, dict[str, Any]] = {
    "bool": {"true": True, "false": False},
    "literal": {"a": "a", "ab": "ab", "b": "b"},
    "three values": {"true": True, "false": False, "null": None},
    "up to two": {
        f"[{', '.join(words)}]": [word == "true" for word in words]
        for size in range(3)
        for words in itertools.product(("true", "false"), repeat=size)
    },
}


def continuing(
    words: frozenset[str], before: str, part: frozenset[str] | None = None
) -> frozenset[str]:
    """What may follow `before` in one of the words: all of the rest, or those of `part` that it may
    begin with.
    """
    rest = frozenset(word[len(before) :] for word in words if word.startswith(before))
    return (
        rest
        if part is None
        else frozenset(p for p in part if any(word.startswith(p) for word in rest))
    )


def values_of(options: dict[str, Any]) -> dict[str, Any] | None:
    return TYPES.get(options.get("type", "")) or TOOLS.get(options.get("tools", ""))


def number(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


# ------------------------------------------------------------------------------------------- checks

CHECKS = {
    "accepts": lambda value, call: True,
    "picky": lambda value, call: number(value) % 3 != 0,
    "picky_later": lambda value, call: number(value) % 2 == 0,
    "refuses": lambda value, call: False,
    "raises": lambda value, call: False,
    "second": lambda value, call: call >= 2,
    "third": lambda value, call: call >= 3,
}
# of backends that don't answer
FAILURES = {"never": "RequestTimeoutError", "down": "OverloadedError"}
FLAKY = {"flaky": 1, "flaky twice": 2}  # of backends that fail so often first


# ----------------------------------------------------------------------------------- interpretation


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: what it raised, what the body read, and what its state has."""

    raised: Any
    told: Any
    text: Any = None
    messages: Any = None
    variables: dict[str, Any] = field(default_factory=dict)


def outcome(branch: Branch, told: list[Any], about: Iterable[str]) -> Outcome:
    turns = [{"role": role, "content": content} for role, content in branch.turns]
    messages = known(branch.error) if branch.error else turns
    return Outcome(
        None, told, branch.read(None), messages, {name: branch.read(name) for name in about}
    )


class Interpreter:
    """
    Args:
        settings: of the run.
        instead: texts that the nodes of these places have in place of their answers.
    """

    def __init__(
        self, settings: dict[str, Any], instead: dict[tuple[Any, ...], str] | None = None
    ) -> None:
        self.settings, self.instead = settings, instead or {}
        self.races: list[Race] = []  # between the bodies of forks that run at the same time
        self.stopped = False  # from outside
        self.is_async = False
        self.main, self.told = Branch(), list[Any]()
        self.made: dict[
            tuple[Any, ...], tuple[Gen | Select, Branch]
        ] = {}  # nodes, and their branch when they had ended

    def run(self, program: RandomProgram) -> Outcome:
        self.is_async = program.is_async
        if program.is_async and any(isinstance(step, UseTools) for step in walk(program.steps)):
            raise NotDrawnError("use_tools is for plain functions")
        try:
            self.take(self.main, program.steps, self.told)
        except RaisedError as error:
            return Outcome(known(str(error)), self.told)
        return outcome(self.main, self.told, names(program.steps))

    def take(self, s: Branch, steps: Steps, told: list[Any]) -> None:
        for step in steps:
            self.step(s, step, told)

    def step(self, s: Branch, step: Step, told: list[Any]) -> None:
        # A coroutine takes the steps of a program that continues its text one by one.
        anyhow = (Read, Attempt, Raise, Call, Stop, *([Nested] if self.is_async else []))
        if s.gone and not isinstance(step, anyhow):
            raise RaisedError("RequestAbortedError")
        match step:
            case Text() | Gen() | Select():
                self.node(s, step)
            case Sum(parts):
                for part in parts:
                    self.node(s, part)
            case Read(name, paste, ways):
                value = s.read(name)
                told.append(value)
                if paste:
                    self.step(s, Text(f"{number(value) % 100} "), told)
                if ways:
                    self.take(s, ways[number(value) % len(ways)], told)
            case Fork():
                self.fork(s, step, told)
            case Copy(body):
                (child,) = self.forked(s, 1)
                try:
                    self.take(child, body, told)
                finally:
                    for name, value in child.own().items():
                        s.declare(name, value)
            case Scope(name, body):
                s.touch()
                begins = len(s.text)
                try:
                    self.take(s, body, told)
                finally:
                    s.touch()
                    s.declare(name, Value(s.text[begins:], s.error, point=s.point()))
            case Turn(role, body, block):
                if s.role is not None:
                    raise RaisedError("ProgramError")
                s.touch()
                s.write(f"<|im_start|>{role}\n")
                s.role = role, len(s.text)
                try:
                    self.take(s, body, told)
                except RaisedError:
                    if block:
                        self.end_turn(s)
                    raise
                self.end_turn(s)
            case Grammar(pattern, body):
                s.touch()
                s.grammar = LANGUAGES[pattern], len(s.text)
                try:
                    self.take(s, body, told)
                    s.touch()
                    if s.error is None and s.text[s.grammar[1] :] not in s.grammar[0]:
                        raise NotDrawnError("refused at its line, or where it is read")
                finally:
                    s.grammar = None
            case Checkpoint(body, times, read, last):
                mark = s.copied()
                for _ in range(times):
                    self.take(s, body, told)
                    if read is not None:
                        told.append(s.read(read))
                    self.roll_back(s, mark)
                self.take(s, last, told)
            case Abandoned(body, bodies, name, after):
                mark = s.copied()
                self.take(s, body, told)
                children = self.forked(s, len(bodies))
                for child, each in zip(children, bodies):
                    self.take(child, each, told)
                if name is not None:
                    told.append(children[0].read(name))
                self.roll_back(s, mark)
                for child, each in zip(children, after):
                    self.take(child, each, told)
            case Attempt(body):
                try:
                    self.take(s, body, told)
                except RaisedError as error:
                    told.append(known(str(error)))
            case Raise():
                raise RaisedError("OwnError")
            case Cancel(node, join):
                (child,) = children = self.forked(s, 1)
                told.append(child.read(None))
                child.wait()
                assert node.name is not None
                child.declare(node.name, Value(error=child.error, point=child.point()))
                child.cancel(child.depth, outside=False)
                child.touch()
                told.append(child.read(node.name))
                if join is not None:
                    self.join(s, children, join)
            case Stop(outside):
                if not s.gone:
                    for race in self.races:
                        race.cancelled()
                    s.cancel(s.depth, outside)
                self.stopped = self.stopped or (outside and s is self.main)
            case Nested(body):
                inner = list[Any]()
                self.take(s, body, inner)
                told.append(inner)
            case Call(body):
                inner = list[Any]()
                alone = Branch(path=(*s.path, "call", s.nodes))
                interpreter = Interpreter({}, self.instead)
                interpreter.main, interpreter.is_async = alone, self.is_async
                if self.stopped:
                    interpreter.stopped = True
                    alone.cancel(0, outside=True)
                interpreter.take(alone, body, inner)
                told += [inner, alone.read(None)]
            case UseTools(name, most):
                s.declare(name, Value(self.use_tools(s, name, most, told)))
            case Set(name, value):
                s.declare(name, Value(value))
            case _:
                raise AssertionError(step)

    def use_tools(self, s: Branch, name: str, most: int, told: list[Any]) -> Any:
        failures: dict[str, int] = {}  # in a row
        for i in range(most + 1):
            call = f"{name}_call_{i}"
            self.step(
                s,
                Turn(
                    "assistant", (Gen(call, (("tools", "auto"), ("max_tokens", MOST))),), block=True
                ),
                told,
            )
            s.names[call].see()
            if error := s.names[call].error:
                raise RaisedError(error)
            value = s.names[call].value
            if not isinstance(value, ToolCall):
                return value
            if i == most:
                raise RaisedError("ToolError")
            self.step(s, Turn("user", (Text(result(value)),), block=True), told)
            failures[value.name] = failures.get(value.name, 0) + 1 if fails(value) else 0
            if failures[value.name] == 3:
                raise RaisedError("ToolError")
        raise AssertionError

    def end_turn(self, s: Branch) -> None:
        assert s.role is not None
        role, begins = s.role
        s.role = None
        s.touch()
        if s.error is None:
            s.turns.append((role, s.text[begins:].lstrip()))
        s.write("<|im_end|>\n")

    def roll_back(self, s: Branch, mark: Branch) -> None:
        """The branch is as it was; the branches of forks behind the mark are at an end."""
        if s.stopped and s.error:
            raise RaisedError(s.error)
        for child in s.forks[len(mark.forks) :]:
            child.remove()
        stays = False
        if s.cancelled is not None and mark.cancelled is None:
            stays = s.stopped or s.cancelled < max([0, *(wait.number for wait in mark.waits)])
            s.cancelled = s.cancelled if stays else None
        for name in ("text", "role", "grammar", "waits", *(() if stays else ("error",))):
            setattr(s, name, getattr(mark, name))
        s.failure_seen = False
        s.names, s.turns = dict(mark.names), list(mark.turns)  # joins may have what was declared

    # ---------------------------------------------------------------------------------------- forks

    def forked(self, s: Branch, size: int) -> list[Branch]:
        s.touch()
        children = [s.fork(i) for i in range(size)]
        s.forks += children
        return children

    def fork(self, s: Branch, step: Fork, told: list[Any]) -> None:
        children = self.forked(s, len(step.bodies))
        for part in step.first:
            for child in children:
                self.node(child, part)
        each: list[list[Any]] = [[] for _ in children]
        raised: list[RaisedError] = []
        race = Race(children[0].fork_point)
        if step.together:
            self.races.append(race)
        for child, body, own in zip(children, step.bodies, each):
            if step.together:
                race.next()
            try:
                self.take(child, body, own)
            except RaisedError as error:
                raised.append(error)
                if not step.together:
                    break
        if step.together:
            self.races.remove(race)
            if race.matters():
                raise NotDrawnError("what the other bodies have read by then is a matter of time")
        if raised:
            raise raised[0]
        told.append(each)
        self.take(s, step.beside, told)
        told += [children[i].read(name) for i, name in step.read]
        mark = children[0].copied()
        self.take(children[0], step.undone, told)
        if step.join is not None:
            self.join(s, children, step.join)
        if step.undone:
            self.roll_back(children[0], mark)
        for child, body in zip(children, step.after):
            self.take(child, body, told)
        if step.again is not None:
            self.join(s, children, step.again)

    def join(self, s: Branch, children: Sequence[Branch], mode: str) -> None:
        for child in children:
            child.claim(s.depth)
        s.touch()
        if mode == "concate_and_append":
            s.wait(*(child.point() for child in children))
            for child in children:
                s.error = s.error or child.error
                self.node(s, Text(child.text[child.begins :]), joined=True)
        own = [child.own() for child in children]
        for name in dict.fromkeys(name for each in own for name in each):
            found = [each.get(name) for each in own]
            errors = [value.error for value in found if value is not None and value.error]
            value = None if errors else [None if value is None else value.value for value in found]
            parts = tuple(value for value in found if value is not None)
            s.declare(name, Value(value, errors[0] if errors else None, parts=parts))

    # ---------------------------------------------------------------------------------------- nodes

    def set(self, s: Branch, name: str | None, value: Value) -> None:
        if name is not None:
            s.declare(name, value)

    def node(self, s: Branch, step: Step, joined: bool = False) -> None:
        s.touch()
        match step:
            case Text(text):
                if s.error is None and s.grammar is not None:
                    words, begins = s.grammar
                    if not continuing(words, s.text[begins:] + text):
                        raise NotDrawnError("refused at its line, or where it is read")
                s.write(text)
            case Gen(given=given):
                self.add(s, step, lambda: self.gen(s, dict(given)))
            case Select(choices=choices, method=method, multi=multi):
                select = self.select_several if multi else self.select
                self.add(s, step, lambda: select(s, choices, method))

    def add(self, s: Branch, step: Gen | Select, answer: Callable[[], tuple[str, Any]]) -> None:
        place = (*s.path, s.nodes)
        s.nodes += 1
        s.wait()
        value = Value(error=s.error, node=place, point=s.point())
        values = values_of(dict(step.given)) if isinstance(step, Gen) else None
        if s.error is None:
            try:
                if place in self.instead:
                    text = self.instead[place]
                    value.value = text if values is None else values[text]
                else:
                    text, value.value = answer()
                s.write(text)
            except RaisedError as error:
                s.error = value.error = str(error)
        self.set(s, step.name, value)
        self.made[place] = step, s.copied()

    def gen(self, s: Branch, options: dict[str, Any]) -> tuple[str, Any]:
        if options.get("temperature") == 5000:
            raise RaisedError("ParameterError")
        if "json_schema" in options:  # that nothing satisfies
            raise RaisedError("ConstraintError")
        attempts = 1 + options.get("retries", self.settings.get("retries", 0))
        backend, check, samples = (
            options.get("backend"),
            CHECKS[options.get("check", "accepts")],
            options.get("n", 1),
        )
        part = LANGUAGES[options["regex"]] if "regex" in options else None
        values = values_of(options)
        if values is not None:
            part = offered(s.text, frozenset(values))
        if s.grammar is not None:
            part = continuing(s.grammar[0], s.text[s.grammar[1] :], part)
            if not part:
                raise RaisedError("ConstraintError")
        given = options.get("stop", ())
        stops = [given] if isinstance(given, str) else given
        limit = options.get("max_tokens", self.settings.get("max_new_tokens", 128))
        failing = attempts if backend in FAILURES else FLAKY.get(str(backend), 0)
        asked = refused = 0
        while True:
            asked += 1
            if asked <= failing:
                error = FAILURES.get(str(backend), "OverloadedError")
            else:
                text = generated(s.text, limit, stops, options.get("include_stop", False), part)
                if backend is not None:
                    text = f"s{len(s.text) % 7}"
                each = text if values is None else values[text]
                value = [each] * samples if samples > 1 else each
                if all(check(each, asked - failing + i) for i in range(samples)):
                    return text, value
                # An exception that is none of the package arrives as a ProgramError.
                error, refused = (
                    "ProgramError" if options["check"] == "raises" else "ValueValidationError",
                    refused + 1,
                )
            cold = (
                refused and options.get("temperature", self.settings.get("temperature", 1.0)) == 0
            )
            if asked == attempts or cold:
                raise RaisedError(error)

    def select(self, s: Branch, choices: Sequence[str], method: str) -> tuple[str, Any]:
        if s.grammar is not None:
            choices = [c for c in choices if continuing(s.grammar[0], s.text[s.grammar[1] :] + c)]
            if not choices:
                raise RaisedError("ConstraintError")
        found = chosen(s.text, choices)
        if method == "shortest":
            found = min(choices, key=lambda c: (len(c), c))
        return found, found

    def select_several(self, s: Branch, choices: Sequence[str], method: str) -> tuple[str, Any]:
        left, text, found = list(choices), "", list[str]()
        while left:
            before = ", " if found else ""
            asked = Branch(text=s.text + text)
            picked, _ = self.select(
                asked, [*(before + choice for choice in left), *(["\n"] if found else [])], method
            )
            if picked == "\n":
                break
            text += picked
            found.append(picked.removeprefix(before))
            left.remove(found[-1])
        return text, found
