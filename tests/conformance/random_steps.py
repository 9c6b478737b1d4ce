"""A body that takes the steps of programs as data, and what a run of one gives.

What a run of one gives is a function of the program and the model. No step's outcome depends on the
clock: a limit of time is on a node that never gets its answer, and cancelled is what can't have
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

import sglang_lite as sgl
from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from tests.conformance.case import Down, Never, never
from tests.conformance.oracle_tools import MOST
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
    Stop,
    Sum,
    Text,
    Turn,
    UseTools,
    names,
)

# ----------------------------------------------------------------------------- what nodes are given


class OwnError(Exception):
    """A body's own error."""


class Shortest(ChoicesSamplingMethod):
    """A method of the user's own."""

    def __call__(
        self,
        *,
        choices,
        normalized_prompt_logprobs,
        input_token_logprobs,
        output_token_logprobs,
        **more,
    ):
        return ChoicesDecision(min(choices, key=lambda c: (len(c), c)), {})


def number(value: Any) -> int:
    """A number of a value that is the same in every process; of an error, of its type."""
    if isinstance(value, tuple):
        value = value[:2]
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


def from_call(first: int) -> Callable[[Any], bool]:
    """A check that accepts what it is shown at its call of this number."""
    calls = iter(range(1, 100))
    return lambda value: next(calls) >= first


def flaky(failures: int) -> sgl.BaseBackend:
    """A backend that fails so often before it answers."""
    calls = iter(range(1, 100))

    def answer(call: Any) -> Any:
        return (
            sgl.OverloadedError("down.")
            if next(calls) <= failures
            else f"s{len(call.prompt.text) % 7}"
        )

    return sgl.ScriptedBackend(answer)


CHECKS: dict[str, Callable[[Any], Any]] = {
    check.__name__: check
    for check in (accepts, picky, refuses, picky_later, never, raises, undecided)
}
COUNTED = {"second": 2, "third": 3}  # checks that accept from that call on
METHODS: dict[str, Any] = {
    "token_length_normalized": sgl.token_length_normalized,
    "greedy_token_selection": sgl.greedy_token_selection,
    "unconditional_likelihood_normalized": sgl.unconditional_likelihood_normalized,
    "shortest": Shortest(),
}
ELSEWHERE: dict[str, Callable[[], sgl.BaseBackend]] = {
    "never": Never,
    "down": Down,
    "flaky": lambda: flaky(1),
    "flaky twice": lambda: flaky(2),
    "script": lambda: sgl.ScriptedBackend(lambda call: f"s{len(call.prompt.text) % 7}"),
}
# nothing satisfies it
BROKEN = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2}
TYPES: dict[str, Any] = {
    "int": int, "bool": bool, "literal": Literal["a", "ab", "b"], "list": list[bool],
    "up to two": Annotated[list[bool], Field(max_length=2)], "three values": bool | None,
}  # fmt: skip


def pick(x: Literal["x", "xy"], sure: bool = False) -> list[Any]:
    """Picks."""
    if x == "xy" and sure:
        raise OwnError
    return [x, sure]


def count() -> int:
    """Counts."""
    return 3


TOOLS: dict[str, dict[str, Any]] = {
    "one": {"tools": [pick], "tool_choice": "required"},
    "several": {"tools": [pick, count], "tool_choice": "required"},
    "named": {"tools": [pick, count], "tool_choice": pick},
    "named, in a list": {
        "tools": [count, pick],
        "tool_choice": "pick",
        "parallel_tool_calls": True,
    },
    "auto": {"tools": [pick, count]},
}

# ------------------------------------------------------------------------------------- taking steps


@dataclass
class Wanted:
    """Request of a body to whoever drives it: of a state the value of a variable, or (None) its
    text.
    """

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
    """Parts of an error that two runs have in common: its type and the line that it is about."""
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
                    options[key] = table.get(options[key], options[key])
            options |= TOOLS.get(options.pop("tools", ""), {})
            if options.get("check") in COUNTED:
                options["check"] = from_call(COUNTED[options["check"]])
            if "backend" in options:
                options["backend"] = ELSEWHERE[options["backend"]]()
            return sgl.gen(name, **options)
        case Select(name, choices, method, temperature, multi):
            return sgl.select(
                name,
                choices=choices,
                temperature=temperature,
                choices_method=METHODS[method],
                multi=multi,
            )
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
        case Abandoned(body, bodies, read, after):
            with s.checkpoint() as place:
                yield from take(s, body, told)
                group = s.fork(len(bodies))
                for branch, each in zip(group, bodies):
                    yield from take(branch, each, told)
                if read is not None:
                    told.append((yield Wanted(group[0], read)))
                place.rollback()
            for branch, each in zip(group, after):
                yield from take(branch, each, told)
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
        case Stop(outside):
            if outside:
                stopping = threading.Thread(target=contextvars.Context().run, args=(s.cancel,))
                stopping.start()
                stopping.join()
            else:
                s.cancel()
        case Nested(body):
            inner: list[Any] = []
            yield Added(s, body, inner)
            told.append(inner)
        case Call(body):
            inner = []
            state = yield Called(s, body, inner)
            told.append(inner)
            told.append((yield Wanted(state, None)))
        case UseTools(name, most):
            sgl.use_tools(s, **TOOLS["auto"], name=name, max_steps=most, max_tokens=MOST)
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
    with group[0].checkpoint() if step.undone else contextlib.nullcontext() as place:
        yield from take(group[0], step.undone, told)
        if step.join is not None:
            group.join(step.join)
        if place is not None:
            place.rollback()
    for branch, after in zip(group, step.after):
        yield from take(branch, after, told)
    if step.again is not None:
        group.join(step.again)


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
        if state.stream_executor.stream:  # whose pieces end with the body
            await state.async_sync()
            return state.text()
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
        threading.Thread(target=contextvars.copy_context().run, args=(run, i), daemon=True)
        for i in range(len(parts))
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


# ----------------------------------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Ran:
    """Outcome of a run: all that two runs of a program have in common."""

    raised: Any
    told: Any
    text: Any = None
    messages: Any = None
    variables: dict[str, Any] = field(default_factory=dict)


def ran(drawn: RandomProgram, backend: sgl.BaseBackend, **settings: Any) -> Ran:
    """Runs a program."""
    told: list[Any] = []
    ending = Ending()
    try:
        state = body_of(drawn).run(
            drawn.steps, told, ending, backend=backend, **{**drawn.settings, **settings}
        )
    except (sgl.SglError, OwnError) as error:
        return Ran(known(error), told)
    pieces = streamed(state) if drawn.settings.get("stream") else None
    ending.wait()
    if ending.raised:
        return Ran(ending.raised, told)
    found = read_of(state, drawn, told)
    if isinstance(found.text, str):
        assert pieces in (None, found.text), "the pieces of a stream are not its text"
    return found


def body_of(drawn: RandomProgram) -> Any:
    return aprogram if drawn.is_async else program


def read_of(state: Any, drawn: RandomProgram, told: Any, *more: str) -> Ran:
    """What a state has, and what its body read."""
    text = wanted(Wanted(state, None))
    try:
        messages: Any = state.messages()
    except sgl.SglError as error:
        messages = known(error)
    variables = {name: wanted(Wanted(state, name)) for name in (*names(drawn.steps), *more)}
    return Ran(None, told, text, messages, variables)


def streamed(state: Any) -> Any:
    try:
        return "".join(state.text_iter())
    except (sgl.SglError, OwnError) as error:
        return known(error)
