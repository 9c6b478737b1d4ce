"""A conformance case: a program, what a scripted model answers in it, and what comes of it."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.function import SglFunction
from tests.conformance import programs


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        program: it runs to its end with any answers.
        answers: of the scripted model: see ScriptedBackend.
        arguments: of the program.
        settings: of its run.
        variables: their values with those answers; an exception's type where reading raises it.
        text: the whole text with them, or the type of what reading it raises.
        raises: the type of what the run itself raises; then there is neither text nor variables.
        blocking: SGLang's blocking hooks can play it, too.
        engine: the engine can play it (it sees no images).
        streams: it can run with stream=True (a shown text can't be taken back).
        programs: that an engine sees in a run: one a run that generates or selects on its backend,
            and one more for each program that the body runs by itself.
    """

    program: SglFunction
    answers: Any = None
    text: str | type[Exception] = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    raises: type[Exception] | None = None
    blocking: bool = True
    engine: bool = True
    streams: bool = True
    programs: int = field(kw_only=True)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    text: Any
    variables: Mapping[str, Any]
    raised: type[Exception] | None = None


def expected(case: Case) -> Outcome:
    return (
        Outcome(None, {}, case.raises) if case.raises else Outcome(case.text, dict(case.variables))
    )


def outcome(case: Case, backend: sgl.BaseBackend, **settings: Any) -> Outcome:
    """Runs the case's program."""
    try:
        state = case.program.run(backend=backend, **case.arguments, **{**case.settings, **settings})
    except Exception as error:
        return Outcome(None, {}, type(error))
    return Outcome(
        read(state.text), {name: read(state.__getitem__, name) for name in case.variables}
    )


def read(what: Any, *args: Any) -> Any:
    """Result of a call, or the type of the error that it raises."""
    try:
        return what(*args)
    except sgl.SglError as error:
        return type(error)


class Never(sgl.BaseBackend):
    """Never answers."""

    async def agenerate(self, prompt, params, constraint, *, stream):
        await asyncio.Event().wait()
        yield


class Down(sgl.BaseBackend):
    """Fails each time."""

    async def agenerate(self, prompt, params, constraint, *, stream):
        raise sgl.OverloadedError("down.")
        yield


async def never(value: Any) -> bool:
    """A check that never decides."""
    return await asyncio.Event().wait()


def node_by_node(engine: Engine) -> tuple[LocalBackend, dict[str, Any]]:
    """A backend, and the settings of a run that has it asked for each node by itself."""
    return LocalBackend(engine), {"push_down": False}


def cases() -> dict[str, Case]:
    """All of them, by the names of their files."""
    names = [module.name for module in pkgutil.iter_modules(programs.__path__)]
    return {name: importlib.import_module(f"{programs.__name__}.{name}").CASE for name in names}
