"""Runs of random programs on backends whose answers are the oracle's rule."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.engine import engine_process, spawned_process
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.tools import Toolbox
from sglang_lite.process.random_ids import random_id
from sglang_lite.protocol import Continuation, Regex, Unset
from tests.conformance import oracle, oracle_branches, oracle_tools, random_steps
from tests.conformance.oracle import ALPHABET, LANGUAGES, TYPES, Interpreter, Outcome, values_of
from tests.conformance.oracle_branches import Branch
from tests.conformance.oracle_model import model, tokenizer
from tests.conformance.oracle_tools import TOOLS, ToolCall
from tests.conformance.random_steps import (
    Ending,
    OwnError,
    Ran,
    body_of,
    known,
    node,
    ran,
    read_of,
    streamed,
)
from tests.conformance.steps import (
    Abandoned,
    Checkpoint,
    Fork,
    Gen,
    RandomProgram,
    Select,
    Step,
    Turn,
    UseTools,
    inside,
    names,
    walk,
)
from tests.server.conftest import serving

# -------------------------------------------------------------------------------- scripted backends


def tools_constraint(
    tools: Any, tool_choice: Any = "auto", parallel_tool_calls: bool = False
) -> Any:
    return (
        Toolbox.for_tools(tools, tool_choice, parallel=parallel_tool_calls)
        .value_type(None)
        .constraint
    )


TYPED = {name: sgl.gen("x", type=random_steps.TYPES[name]).node.constraint for name in TYPES}
TOOLED = {name: tools_constraint(**random_steps.TOOLS[name]) for name in TOOLS}


def answer(call: Any) -> Any:
    """Answer of a scripted backend, or its error."""
    prompt = call.prompt.text
    if call.choices is not None:
        with contextlib.suppress(oracle.NearTieError):
            return oracle.chosen(prompt, call.choices)
        return call.choices[0]  # a method of the user's own decides
    limit = 128 if isinstance(call.params.max_tokens, Unset) else call.params.max_tokens
    match call.constraint:
        case None:
            words = None
        case Continuation(whole, text, part):
            words = oracle.continuing(
                LANGUAGES[whole.pattern], text, LANGUAGES[part.pattern] if part else None
            )
        case Regex(pattern):
            words = LANGUAGES[pattern]
        case constraint:
            both = [(TYPES, TYPED), (TOOLS, TOOLED)]
            found = [
                texts[name]
                for texts, known in both
                for name, each in known.items()
                if each == constraint
            ]
            words = oracle_tools.offered(prompt, frozenset(found[0] if found else ()))
    if words is not None and not words:
        return sgl.ConstraintError("no text satisfies it.")
    return oracle.generated(prompt, limit, words=words)


class Shuffled(sgl.ScriptedBackend):
    """Answers in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__(answer)
        self._order = Random(seed)

    def answer_now(self, prompt, params, constraint):
        return None

    def select_now(self, prompt, choices, *, unconditional):
        return None

    async def _others(self) -> None:
        for _ in range(self._order.choice((0, 1, 5, 40))):
            await asyncio.sleep(0)

    async def agenerate(self, prompt, params, constraint, *, stream):
        await self._others()
        async for found in super().agenerate(prompt, params, constraint, stream=stream):
            yield found

    async def aselect(self, prompt, choices, *, unconditional):
        await self._others()
        return await super().aselect(prompt, choices, unconditional=unconditional)


# ------------------------------------------------------------------------------------------ engines


ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {"max_total_tokens": 16384},
    "step by step": {"overlap": False, "jump_forward": "off", "max_total_tokens": 16384},
    "short of rows": {"max_running": 2, "step_tokens": 16, "policy": "fcfs"},
    "short of memory": {"max_total_tokens": 4096, "max_running": 12, "page_size": 16},
}

# ----------------------------------------------------------------------------------------- outcomes


@dataclass
class Expected:
    """What the oracle says of a program."""

    oracle: Interpreter
    outcome: Outcome


def expected(program: RandomProgram, instead: dict[Any, str] | None = None) -> Expected:
    interpreter = Interpreter(program.settings, instead)
    return Expected(interpreter, interpreter.run(program))


def plain(found: Any) -> Any:
    """The same without the lines of errors."""
    match found:
        case ("!", kind, _):
            return "!", kind
        case sgl.ToolCall(name, arguments):
            return ToolCall(name, arguments)
        case list():
            return [plain(each) for each in found]
        case dict():
            return {key: plain(each) for key, each in found.items()}
    return found


def outcome(found: Ran) -> Outcome:
    return Outcome(
        *(
            plain(each)
            for each in (found.raised, found.told, found.text, found.messages, found.variables)
        )
    )


Pair: TypeAlias = "tuple[Any, Any]"  # what comes, and what has to
# None where a program has nothing to try
Way: TypeAlias = "Callable[[RandomProgram, Expected], Pair | None]"


def run_on(make: Callable[[], sgl.BaseBackend], **settings: Any) -> Way:
    return lambda program, want: (outcome(ran(program, make(), **settings)), want.outcome)


def early_on(make: Callable[[], sgl.BaseBackend]) -> Way:
    """Streamed, and read while its body may still run; or cancelled then."""

    def run(program: RandomProgram, want: Expected) -> Pair | None:
        if any(goes_back(step) for step in walk(program.steps)):
            return None  # refused in streams
        told, ending = list[Any](), Ending()
        settings = {**program.settings, "stream": True}
        state = body_of(program).run(program.steps, told, ending, backend=make(), **settings)
        if len(program.steps) % 4 == 0:
            state.cancel()
            found = read_of(state, program, [])
            ending.wait()
            all_of_it = [
                plain(each) for each in (found.text, found.messages, *found.variables.values())
            ]
            return all_of_it, [oracle_branches.known("RequestAbortedError")] * len(all_of_it)
        found = read_of(state, program, told)
        ending.wait()
        if ending.raised:
            found = Ran(ending.raised, told)
        return outcome(found), want.outcome

    return run


def goes_back(step: Step) -> bool:
    return isinstance(step, Checkpoint | Abandoned) or (
        isinstance(step, Fork) and bool(step.undone)
    )


def arun_on(make: Callable[[], sgl.BaseBackend]) -> Way:
    def run(program: RandomProgram, want: Expected) -> Pair:
        async def started() -> Ran:
            told, ending = list[Any](), Ending()
            try:
                state = await body_of(program).arun(
                    program.steps, told, ending, backend=make(), **program.settings
                )
            except (sgl.SglError, OwnError) as error:
                return Ran(known(error), told)
            if program.settings.get("stream"):
                with contextlib.suppress(sgl.SglError, OwnError):
                    async for _ in state.text_async_iter():
                        pass
            # the text of a branch that has failed ends before the body
            await asyncio.to_thread(ending.wait)
            if ending.raised:
                return Ran(ending.raised, told)
            return await asyncio.to_thread(read_of, state, program, told)

        return outcome(asyncio.run(started())), want.outcome

    return run


def batch_on(make: Callable[[], sgl.BaseBackend]) -> Way:
    def run(program: RandomProgram, want: Expected) -> Pair:
        told = [list[Any]() for _ in range(3)]
        settings = {key: value for key, value in program.settings.items() if key != "stream"}
        items = [(program.steps, each) for each in told]
        states = body_of(program).run_batch(items, backend=make(), on_error="return", **settings)
        found = [
            plain(known(state))
            if isinstance(state, Exception)
            else outcome(read_of(state, program, each))
            for state, each in zip(states, told)
        ]
        failed = want.outcome.raised or (want.oracle.main.error and want.outcome.text)
        return (found, plain(told)), ([failed or want.outcome] * 3, [want.outcome.told] * 3)

    return run


def for_engines(way: Way) -> Way:
    """The way without programs in which a model would answer in words of its own, or is shown its
    tools.
    """

    def shown(step: Step, turn: bool) -> bool:
        if isinstance(step, Gen):
            choice = dict(step.given).get("tools")
            return choice == "auto" or (turn and choice is not None)
        inner = [each for steps in inside(step).values() for each in steps]
        return isinstance(step, UseTools) or any(
            shown(each, turn or isinstance(step, Turn)) for each in inner
        )

    return lambda program, want: (
        None if any(shown(s, False) for s in program.steps) else way(program, want)
    )


def without_stream(program: RandomProgram) -> dict[str, Any]:
    return {key: value for key, value in program.settings.items() if key != "stream"}


def ended(program: RandomProgram, backend: sgl.BaseBackend) -> tuple[Any, list[Any]]:
    """State of a run to its end, and what its body read."""
    told = list[Any]()
    settings = without_stream(program)
    return body_of(program).run(
        program.steps, told, backend=backend, use_thread=False, **settings
    ), told


def kept(branch: Branch) -> Branch:
    """The branch, whose failed variables have only their messages, as a saved state has."""
    for name, value in branch.names.items():
        branch.names[name] = replace(value, error=value.error and "ProgramError")
    return branch


MORE = Gen("more", (("max_tokens", 6),))


def loaded_on(make: Callable[[], sgl.BaseBackend], folder: Path) -> Way:
    """Saved, loaded and continued."""

    def run(program: RandomProgram, want: Expected) -> Pair | None:
        main = want.oracle.main
        if want.outcome.raised or main.error:
            return None
        backend = make()
        state, told = ended(program, backend)
        file = folder / f"{random_id()}.json"
        state.save(file)
        state = sgl.load(file, backend=backend, types=[random_steps.pick, random_steps.count])
        before = outcome(read_of(state, program, told))
        state += node(MORE)
        after = outcome(read_of(state, program, told, "more"))
        restored = oracle.outcome(kept(main), want.outcome.told, names(program.steps))
        main.cancelled = None  # what is loaded is a run of its own
        want.oracle.node(main, MORE)
        return (before, after), (
            restored,
            oracle.outcome(main, want.outcome.told, (*names(program.steps), "more")),
        )

    return run


def continued_on(make: Callable[[], sgl.BaseBackend]) -> Way:
    """Continued while its nodes may still be played, and streamed from there."""

    def run(program: RandomProgram, want: Expected) -> Pair | None:
        if want.outcome.raised:
            return None
        told = list[Any]()
        state = body_of(program).run(program.steps, told, backend=make(), **without_stream(program))
        state += node(MORE)
        pieces = plain(streamed(state))
        found = outcome(read_of(state, program, told, "more"))
        want.oracle.node(want.oracle.main, MORE)
        wanted = oracle.outcome(
            want.oracle.main, want.outcome.told, (*names(program.steps), "more")
        )
        return (pieces, found), (wanted.text, wanted)

    return run


def nodes_of(program: RandomProgram, want: Expected) -> list[tuple[str, Gen | Select, Branch]]:
    """Variables of the state that a node of its own text has made: name, node and the branch as the
    node had ended.
    """
    found = []
    for name, value in want.oracle.main.names.items():
        if value.node in want.oracle.made and len(value.node) == 1:
            found.append((name, *want.oracle.made[value.node]))
    return found


def forked_on(make: Callable[[], sgl.BaseBackend]) -> Way:
    """Continued from where a variable had just been set."""

    def run(program: RandomProgram, want: Expected) -> Pair | None:
        nodes = [each for each in nodes_of(program, want) if each[2].error is None]
        if want.outcome.raised or want.oracle.main.error or not nodes:
            return None
        name, _, branch = Random(len(program.steps)).choice(nodes)
        if branch.grammar is not None:
            return None
        state, told = ended(program, make())
        group = state.fork_at(name, 2)
        found = []
        for other in group:
            other += node(MORE)
            found.append(outcome(read_of(other, program, told, "more")))
        want.oracle.node(kept(branch), MORE)
        return found, [
            oracle.outcome(branch, want.outcome.told, (*names(program.steps), "more"))
        ] * 2

    return run


def rerun_on(make: Callable[[], sgl.BaseBackend]) -> Way:
    """With one answer changed."""

    def run(program: RandomProgram, want: Expected) -> Pair | None:
        draw = Random(len(program.steps))
        changes = []
        for name, step, branch in nodes_of(program, want):
            if branch.error is not None or branch.grammar is not None:
                continue
            if isinstance(step, Select):
                changes += [] if step.multi else [(name, choice) for choice in step.choices]
            elif not set(dict(step.given)) & {"stop", "n", "backend", "check", "json_schema"}:
                given = dict(step.given)
                words = sorted(LANGUAGES[given["regex"]]) if "regex" in given else ["", "ab"]
                words = sorted(values_of(given) or words)
                changes += [(name, w) for w in words if len(w) <= given.get("max_tokens", 3)]
        if want.outcome.raised or not changes:
            return None
        name, value = draw.choice(changes)
        place = want.oracle.main.names[name].node
        then = expected(program, {place: value})
        state, told = ended(program, make())
        del told[:]
        try:
            state = state.rerun(name, value)
        except (sgl.SglError, OwnError) as error:
            return (plain(known(error)), plain(told)), (then.outcome.raised, then.outcome.told)
        return outcome(read_of(state, program, told)), then.outcome

    return run


# Each is a way to run a program and the backend that it runs on.
WAYS = {
    "script": ("run", "script"), "shuffled": ("run", "shuffled"), "async": ("arun", "shuffled"),
    "batch": ("batch", "shuffled"), "loaded": ("loaded", "script"), "fork_at": ("fork_at", "script"),
    "engine": ("run", "as it is"), "step by step": ("run", "step by step"),
    "short of rows": ("run", "short of rows"), "short of memory": ("run", "short of memory"),
    "node by node": ("apart", "as it is"), "async engine": ("arun", "as it is"), "engine batch": ("batch", "as it is"),
    "engine loaded": ("loaded", "as it is"), "engine fork_at": ("fork_at", "as it is"),
    "rerun": ("rerun", "script"), "engine rerun": ("rerun", "as it is"), "child": ("run", "child"),
    "early": ("early", "shuffled"), "engine early": ("early", "as it is"),
    "continued": ("continued", "shuffled"), "engine continued": ("continued", "as it is"),
    "server": ("run", "server"), "server node by node": ("apart", "server"), "server batch": ("batch", "server"),
}  # fmt: skip


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[Way]:
    """One of the ways, and the backend that it needs for as long."""
    how, kind = WAYS[name]
    with contextlib.ExitStack() as stack:
        make = _backend(kind, folder, stack)
        way = {
            "run": lambda: run_on(make), "apart": lambda: run_on(make, push_down=False), "arun": lambda: arun_on(make),
            "batch": lambda: batch_on(make), "loaded": lambda: loaded_on(make, folder),
            "fork_at": lambda: forked_on(make), "rerun": lambda: rerun_on(make),
            "continued": lambda: continued_on(make), "early": lambda: early_on(make),
        }[how]()  # fmt: skip
        yield way if kind in ("script", "shuffled") else for_engines(way)


def _backend(kind: str, folder: Path, stack: contextlib.ExitStack) -> Callable[[], sgl.BaseBackend]:
    if kind == "script":
        return lambda: sgl.ScriptedBackend(answer)
    if kind == "shuffled":
        orders = iter(range(10**9))
        return lambda: Shuffled(next(orders))
    own = child(folder) if kind == "child" else Engine.of(model(), **ENGINES.get(kind, {}))
    engine = stack.enter_context(own)
    backend: sgl.BaseBackend = LocalBackend(engine)
    if kind == "server":
        backend = sgl.RuntimeEndpoint(stack.enter_context(serving(engine)), retries=0)
        stack.callback(backend.shutdown)
    backend.chat_template = get_chat_template("chatml")
    return lambda: backend


# ----------------------------------------------------------------------------- an engine in a child


@contextlib.contextmanager
def child(folder: Path) -> Iterator[Engine]:
    """An engine in a process of its own, which runs the rule in place of the model in its folder."""
    config = LlamaConfig(
        vocab_size=len(ALPHABET), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=4096, eos_token_id=0, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "rule")
    tokenizer().save(str(folder / "rule" / "tokenizer.json"))

    class Spawned(spawned_process.SpawnedProcess):
        def __init__(self, module: str, *more: Any) -> None:
            super().__init__(
                "tests.conformance.oracle_child" if module.endswith("child.main") else module, *more
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "SpawnedProcess", Spawned)
        with Engine(
            str(folder / "rule"), max_total_tokens=16384, dtype="float32", threads=1
        ) as engine:
            yield engine
