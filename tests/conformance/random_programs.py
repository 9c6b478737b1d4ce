"""Programs drawn by a seed: trees of steps, and a body that takes them.

What a run of one gives is a function of the program and the model. No step's outcome depends on the clock: a limit of
time is on a node that never gets its answer, and cancelled is what can't have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, Literal, TypeAlias

import sglang_lite as sgl
from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from tests.conformance.case import Down, Never, never

# ------------------------------------------------------------------------------------------------- the steps


class Step:
    """One thing that a body does."""


Steps: TypeAlias = "tuple[Step, ...]"


@dataclass(frozen=True)
class Text(Step):
    text: str


@dataclass(frozen=True)
class Gen(Step):
    """`given`: what `gen` takes, with the names of checks and backends for themselves."""

    name: str | None
    given: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Select(Step):
    name: str
    choices: tuple[str, ...]
    method: str = "token_length_normalized"
    temperature: float = 0.0
    multi: bool = False


@dataclass(frozen=True)
class Sum(Step):
    """Several of text, generations and selections added as one expression."""

    parts: Steps


@dataclass(frozen=True)
class Read(Step):
    """Reads a variable, or the text, and continues by what it is. `paste`: adds it to the text, too."""

    name: str | None
    paste: bool
    ways: tuple[Steps, ...] = ()


@dataclass(frozen=True)
class Fork(Step):
    """
    Attributes:
        first: added to all branches as to a group.
        bodies: one a branch.
        beside: what the parent does meanwhile.
        join: how the branches are joined; None: not.
        together: the bodies run in threads or tasks of their own.
        read: of which branches which names are read, before the join.
    """

    first: Steps
    bodies: tuple[Steps, ...]
    beside: Steps
    join: str | None
    together: bool
    read: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Copy(Step):
    body: Steps


@dataclass(frozen=True)
class Scope(Step):
    name: str
    body: Steps


@dataclass(frozen=True)
class Turn(Step):
    role: str
    body: Steps
    block: bool


@dataclass(frozen=True)
class Grammar(Step):
    pattern: str
    body: Steps


@dataclass(frozen=True)
class Checkpoint(Step):
    """Does `body`, `times` times taken back; `read`: a variable that is read before; then `last`."""

    body: Steps
    times: int
    read: str | None
    last: Steps


@dataclass(frozen=True)
class Attempt(Step):
    """Continues after what `body` raises."""

    body: Steps


@dataclass(frozen=True)
class Raise(Step):
    """The body's own error."""


@dataclass(frozen=True)
class Cancel(Step):
    """Cancels a branch while a node of it is under way that never ends."""

    node: Gen
    join: str | None


@dataclass(frozen=True)
class Nested(Step):
    """A program that continues the state's text."""

    body: Steps


@dataclass(frozen=True)
class Call(Step):
    """A program that runs by itself."""

    body: Steps


@dataclass(frozen=True)
class Set(Step):
    name: str
    value: int


@dataclass(frozen=True)
class Image(Step):
    """Refused."""


@dataclass(frozen=True)
class RandomProgram:
    steps: Steps
    is_async: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


# -------------------------------------------------------------------------------------- what nodes are given


class OwnError(Exception):
    """A body's own error."""


class Shortest(ChoicesSamplingMethod):
    """A method of the user's own."""

    def __call__(self, *, choices, normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs, **more):
        return ChoicesDecision(min(choices, key=lambda c: (len(c), c)), {})


def number(value: Any) -> int:
    """A number of a value that is the same in every process."""
    return zlib.crc32(repr(value).encode("utf-8", "replace"))


def accepts(value):
    return True


def picky(value):
    return number(value) % 3 != 0


def refuses(value):
    return False


async def picky_later(value):
    await asyncio.sleep(0)
    return number(value) % 2 == 0


def raises(value):
    raise OwnError


def undecided(value):
    return "maybe"


CHECKS: dict[str, Callable[[Any], Any]] = {
    check.__name__: check for check in (accepts, picky, refuses, picky_later, never, raises, undecided)
}
METHODS: dict[str, Any] = {
    "token_length_normalized": sgl.token_length_normalized,
    "greedy_token_selection": sgl.greedy_token_selection,
    "unconditional_likelihood_normalized": sgl.unconditional_likelihood_normalized,
    "shortest": Shortest(),
}
ELSEWHERE: dict[str, Callable[[], sgl.BaseBackend]] = {
    "never": Never,
    "down": Down,
    "script": lambda: sgl.ScriptedBackend(lambda call: f"s{len(call.prompt.text) % 7}"),
}
BROKEN = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2}  # nothing satisfies it
TYPES: dict[str, Any] = {"int": int, "bool": bool, "literal": Literal["a", "ab", "b"], "list": list[bool]}

# ---------------------------------------------------------------------------------------------- taking steps


@dataclass
class Wanted:
    """What a body asks whoever drives it for: of a state the value of a variable, or (None) its text."""

    state: Any
    name: str | None


@dataclass
class Together:
    parts: list[Body]


@dataclass
class Added:
    state: Any
    steps: Steps
    told: list[Any]


@dataclass
class Called:
    state: Any
    steps: Steps
    told: list[Any]


Body: TypeAlias = Generator[Any, Any, None]


def known(error: BaseException) -> tuple[str, str, int]:
    """What two runs have in common of an error: its type and the line that it is about."""
    where = getattr(error, "where", None)
    return "!", type(error).__name__, where.line if where is not None else 0


def node(step: Step) -> Any:
    match step:
        case Text(text):
            return text
        case Gen(name, given):
            options = dict(given)
            for key, table in (("check", CHECKS), ("type", TYPES)):
                if key in options:
                    options[key] = table[options[key]]
            if "backend" in options:
                options["backend"] = ELSEWHERE[options["backend"]]()
            return sgl.gen(name, **options)
        case Select(name, choices, method, temperature, multi):
            return sgl.select(name, choices, temperature=temperature, choices_method=METHODS[method], multi=multi)
        case Sum(parts):
            found = node(parts[0])
            for part in parts[1:]:
                found = found + node(part)
            return found
    raise AssertionError(step)


def take(s: Any, steps: Steps, told: list[Any]) -> Body:
    """Takes steps in a state. `told`: gets what is read, in order."""
    for step in steps:
        yield from _take(s, step, told)


def _take(s: Any, step: Step, told: list[Any]) -> Body:
    match step:
        case Text() | Gen() | Select() | Sum():
            s += node(step)
        case Read(name, paste, ways):
            value = yield Wanted(s, name)
            told.append(value)
            if paste:
                s += f"{number(value) % 100} "
            if ways:
                yield from take(s, ways[number(value) % len(ways)], told)
        case Fork():
            yield from _fork(s, step, told)
        case Copy(body):
            with s.copy() as branch:
                yield from take(branch, body, told)
        case Scope(name, body):
            with s.var_scope(name):
                yield from take(s, body, told)
        case Turn(role, body, block):
            if block:
                with getattr(s, role)():
                    yield from take(s, body, told)
            else:
                s += getattr(sgl, f"{role}_begin")()
                yield from take(s, body, told)
                s += getattr(sgl, f"{role}_end")()
        case Grammar(pattern, body):
            with s.grammar(sgl.Regex(pattern)):
                yield from take(s, body, told)
        case Checkpoint(body, times, read, last):
            with s.checkpoint() as place:
                for _ in range(times):
                    yield from take(s, body, told)
                    if read is not None:
                        told.append((yield Wanted(s, read)))
                    place.rollback()
                yield from take(s, last, told)
        case Attempt(body):
            try:
                yield from take(s, body, told)
            except (sgl.SglError, OwnError) as error:
                told.append(known(error))
        case Raise():
            raise OwnError
        case Cancel(gen, join):
            group = s.fork(1)
            branch = group[0]
            told.append((yield Wanted(branch, None)))
            branch += node(gen)
            branch.cancel()
            branch += "after"
            told.append((yield Wanted(branch, gen.name)))
            if join is not None:
                group.join(join)
        case Nested(body):
            inner: list[Any] = []
            yield Added(s, body, inner)
            told.append(inner)
        case Call(body):
            inner = []
            state = yield Called(s, body, inner)
            told.append(inner)
            told.append((yield Wanted(state, None)))
        case Set(name, value):
            s[name] = value
        case Image():
            s += sgl.image(b"\x89PNG\r\n\x1a\n")
        case _:
            raise AssertionError(step)


def _fork(s: Any, step: Fork, told: list[Any]) -> Body:
    group = s.fork(len(step.bodies))
    for part in step.first:
        group += node(part)
    each: list[list[Any]] = [[] for _ in step.bodies]
    parts = [take(branch, body, own) for branch, body, own in zip(group, step.bodies, each)]
    if step.together:
        yield Together(parts)
    else:
        for body in parts:
            yield from body
    told.append(each)
    yield from take(s, step.beside, told)
    for i, name in step.read:
        told.append((yield Wanted(group[i], name)))
    if step.join is not None:
        group.join(step.join)


def wanted(asked: Wanted) -> Any:
    try:
        return asked.state.text() if asked.name is None else asked.state[asked.name]
    except sgl.SglError as error:
        return known(error)


async def awanted(asked: Wanted) -> Any:
    state = asked.state
    try:
        if asked.name is not None:
            return await state.get(asked.name)
        if state.stream_executor.stream:  # whose text ends with the body
            return await state.async_sync()
        return "".join([piece async for piece in state.text_async_iter()])
    except sgl.SglError as error:
        return known(error)


def _next(body: Body, answer: Any, error: BaseException | None) -> Any:
    return body.send(answer) if error is None else body.throw(error)


def drive(body: Body) -> None:
    """Gives a body what it asks for; plain functions' do."""
    answer, error = None, None
    while True:
        try:
            asked = _next(body, answer, error)
        except StopIteration:
            return
        answer, error = None, None
        try:
            match asked:
                case Wanted():
                    answer = wanted(asked)
                case Together(parts):
                    in_threads(parts)
                case Added(s, steps, told):
                    s += program(steps, told)
                case Called(s, steps, told):
                    answer = s.call(program, steps, told)
        except (sgl.SglError, OwnError) as raised:
            error = raised


def in_threads(parts: list[Body]) -> None:
    raised: list[BaseException | None] = [None] * len(parts)

    def run(i: int) -> None:
        try:
            drive(parts[i])
        except BaseException as error:
            raised[i] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, i), daemon=True) for i in range(len(parts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        if error is not None:
            raise error


async def adrive(body: Body) -> None:
    """`drive` for coroutines."""
    answer, error = None, None
    while True:
        try:
            asked = _next(body, answer, error)
        except StopIteration:
            return
        answer, error = None, None
        try:
            match asked:
                case Wanted():
                    answer = await awanted(asked)
                case Together(parts):
                    for found in await asyncio.gather(*map(adrive, parts), return_exceptions=True):
                        if isinstance(found, BaseException):
                            raise found
                case Added(s, steps, told):  # as a coroutine can't
                    await adrive(take(s, steps, told))
                case Called(s, steps, told):
                    answer = await s.call(aprogram, steps, told)
        except (sgl.SglError, OwnError) as raised:
            error = raised


class Ending:
    """The end of a body, and what it raised."""

    def __init__(self) -> None:
        self.raised: Any = None
        self._over = threading.Event()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.raised = error and known(error)
        self._over.set()

    def wait(self) -> None:
        self._over.wait()


@sgl.function
def program(s, steps, told, ending=None):
    with ending or Ending():
        drive(take(s, steps, told))


@sgl.function
async def aprogram(s, steps, told, ending=None):
    with ending or Ending():
        await adrive(take(s, steps, told))


# ------------------------------------------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Ran:
    """What came of a run: all that two runs of a program have in common."""

    raised: Any
    told: Any
    text: Any = None
    messages: Any = None
    variables: dict[str, Any] = field(default_factory=dict)


def ran(drawn: RandomProgram, backend: sgl.BaseBackend, **settings: Any) -> Ran:
    """Runs a program."""
    told: list[Any] = []
    ending = Ending()
    body = aprogram if drawn.is_async else program
    try:
        state = body.run(drawn.steps, told, ending, backend=backend, **{**drawn.settings, **settings})
    except (sgl.SglError, OwnError) as error:
        return Ran(known(error), told)
    pieces = streamed(state) if drawn.settings.get("stream") else None
    ending.wait()
    if ending.raised:
        return Ran(ending.raised, told)
    text = wanted(Wanted(state, None))
    if isinstance(text, str):
        assert pieces in (None, text), "the pieces of a stream are not its text"
    try:
        messages: Any = state.messages()
    except sgl.SglError as error:
        messages = known(error)
    return Ran(None, told, text, messages, {name: wanted(Wanted(state, name)) for name in names(drawn.steps)})


def streamed(state: Any) -> Any:
    try:
        return "".join(state.text_iter())
    except (sgl.SglError, OwnError) as error:
        return known(error)


def walk(steps: Steps) -> Iterator[Step]:
    """All steps, at all depths."""
    for step in steps:
        yield step
        for inner in inside(step).values():
            yield from walk(inner)


def inside(step: Step) -> dict[tuple[str, int | None], Steps]:
    """The lists of steps that a step has."""
    found: dict[tuple[str, int | None], Steps] = {}
    for name in (f.name for f in fields(step)):  # type: ignore[arg-type]  # every step is a dataclass
        value = getattr(step, name)
        if isinstance(value, tuple) and value and all(isinstance(each, Step) for each in value):
            found[name, None] = value
        elif name in ("ways", "bodies"):
            found.update({(name, i): each for i, each in enumerate(value)})
    return found


def names(steps: Steps) -> list[str]:
    return sorted({step.name for step in walk(steps) if isinstance(getattr(step, "name", None), str)})


# -------------------------------------------------------------------------------------------------- drawing

WORDS = ("a", "b ", "ab", " ba", "0", ": ", "abba ", ", ", "é", '"', "\n", "aab b", "a: ", "bb")
CHOICES = (("a", "b"), ("ab", "abb", "b"), ("a b", "ba", "b", "0"), ("no", "yes"), ("é", "a"))
JOINS = (None, "gather_variable", "concate_and_append", "concate_and_append")
PATTERNS = ("[ab]{1,4}", "a|bb|ab", "(ab)*c", "[0-9]{1,3}", "aaaab|aaaba")


@dataclass
class Open:
    """What is open where a step is drawn, and what may be read."""

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
        settings: dict[str, Any] = {"seed": draw.randrange(1000), "max_new_tokens": draw.choice((3, 6, 10))}
        settings["temperature"] = draw.choice((0, 0.7, 1.0))
        if stream:
            settings["stream"] = True
        if draw.random() < 0.1:
            settings["retries"] = 1
        if draw.random() < 0.1:
            settings["timeout"] = 600
        steps = (Text(draw.choice(WORDS)), *self.steps(Open(0, stream=stream), at_least=2))
        # Over before anything is asked. (Once that is known, a rollback is refused, and a branch is not cancelled any more.)
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
        kinds: dict[Callable[[Open], Step], float] = {self.text: 3, self.gen: 5, self.select: 1.5, self.read: 1.5}
        if self.trouble:
            kinds[self.oops] = 10 * self.trouble
        if at.depth < 4:
            kinds |= {self.sum: 1, self.fork: 2.5, self.copy: 0.3, self.scope: 0.7, self.nested: 0.3}
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
            given["type"] = draw.choice(list(TYPES))
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
        parts = [self.draw.choice((self.text, self.gen, self.gen, self.select))(at) for _ in range(3)]
        return Sum((Text(self.draw.choice(WORDS)), *parts)) if isinstance(parts[0], Text) else Sum(tuple(parts))

    def read(self, at: Open) -> Step:
        draw = self.draw
        name = draw.choice(at.readable) if at.readable and draw.random() < 0.8 else None
        ways = tuple(self.steps(at.deeper()) for _ in range(2)) if at.depth < 4 and draw.random() < 0.5 else ()
        return Read(name, draw.random() < 0.5, ways)

    def fork(self, at: Open) -> Step:
        draw = self.draw
        size = draw.choice((1, 2, 2, 3, 4))
        inner = at.deeper()
        first = tuple(draw.choice((self.text, self.gen, self.select))(inner) for _ in range(draw.choice((0, 1, 2))))
        inner = replace(inner, readable=(*inner.readable, *(name for step in first for name in made(step))))
        bodies = tuple(self.steps(inner) for _ in range(size))
        read = [(i, name) for i in range(size) for step in (*first, *bodies[i]) for name in made(step)]
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
            self.draw.choice(("user", "assistant")), self.steps(at.deeper(turn=True), 1), self.draw.random() < 0.7
        )

    def grammar(self, at: Open) -> Step:
        """Text and generations of the language's parts; now and then something that it has no place for."""
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
            body.append(draw.choice((Text("x"), Select(self.name(), ("c", "d")), Gen(self.name(), (("regex", "c"),)))))
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
        return Attempt((*self.steps(at.deeper(), 1), *((Raise(),) if self.draw.random() < 0.3 else ())))

    def nested(self, at: Open) -> Step:
        return Nested(self.steps(at.deeper(), 1))

    def call(self, at: Open) -> Step:
        return Call((Text(self.draw.choice(WORDS)), *self.steps(Open(at.depth + 1, stream=at.stream), 1)))

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
        case Gen(name) | Select(name) | Scope(name) | Set(name):
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


# ------------------------------------------------------------------------------------------------ shrinking


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
