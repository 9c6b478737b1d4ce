"""Output for an error is the user's program: its frames, and hardly any of this package."""

import asyncio
import os
import traceback

import pytest

import sglang_lite as sgl

PACKAGE = os.path.dirname(sgl.__file__)
BACKEND = sgl.ScriptedBackend(default="x")


def broken(value):
    raise LookupError(value)


def calling(value):
    broken(value)
    return True


class Blocking(sgl.BaseBackend):
    def generate(self, s, sampling_params):
        broken("hook")


class Native(sgl.BaseBackend):
    async def agenerate(self, prompt, params, constraint, *, stream):
        broken("native")
        yield


def reading(node, backend=BACKEND, **options):
    @sgl.function
    def program(s):
        s += "x" + node
        return s["a"]

    return program.run(backend=backend, **options)


async def awaiting(node):
    @sgl.function
    async def program(s):
        s += "x" + node
        return await s.get("a")

    return await program.arun(backend=BACKEND)


def streaming():
    state = sgl.function(lambda s: broken("body")).run(backend=BACKEND, stream=True)
    return "".join(state.text_iter())


def of(body):
    return sgl.function(body).run(backend=BACKEND)


def later():
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a", check=calling))).run(backend=BACKEND)
    return state["a"]


# With the functions of this file whose frames must be there.
ERRORS = {
    "check raises": (
        lambda: reading(sgl.gen("a", check=calling)),
        ["program", "calling", "broken"],
    ),
    "check refuses": (lambda: reading(sgl.gen("a", check=lambda value: False)), ["program"]),
    "retried check": (
        lambda: reading(sgl.gen("a", check=calling, retries=1), timeout=9),
        ["calling", "broken"],
    ),
    "read later": (later, ["later", "calling", "broken"]),
    "awaited": (
        lambda: asyncio.run(awaiting(sgl.gen("a", check=calling))),
        ["program", "calling", "broken"],
    ),
    "body raises": (lambda: of(lambda s: broken(1)), ["broken"]),
    "nested body": (
        lambda: of(lambda s: s.__iadd__(sgl.function(calling)())),
        ["calling", "broken"],
    ),
    "called body": (lambda: of(lambda s: s.call(sgl.function(calling))), ["calling", "broken"]),
    "misuse": (lambda: of(lambda s: s.__iadd__(sgl.gen("a", check=3))), []),  # type: ignore[call-overload]  # wrong on purpose
    "unknown": (lambda: of(lambda s: s["nothing"]), []),
    "turns": (lambda: of(lambda s: s.__iadd__(sgl.user_end())), []),
    "hook": (lambda: reading(sgl.gen("a"), Blocking()), ["program", "generate", "broken"]),
    "native": (lambda: reading(sgl.gen("a"), Native()), ["program", "agenerate", "broken"]),
    "stream": (streaming, ["streaming", "broken"]),
    "batch": (
        lambda: sgl.function(lambda s: broken(1)).run_batch([()], backend=BACKEND),
        ["broken"],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_traceback_shows_the_users_frames_and_few_of_ours(name):
    act, users = ERRORS[name]
    with pytest.raises((sgl.SglError, LookupError)) as caught:
        act()
    shown = "".join(traceback.format_exception(caught.value)).splitlines()
    frames = [line for line in shown if line.startswith('  File "')]
    assert sum(PACKAGE in line for line in frames) <= 3
    for function in users:
        assert sum(
            f'"{__file__}"' in line and line.endswith(f" in {function}") for line in frames
        ), f"no {function}"
    assert len(shown) <= 40


def test_an_error_of_the_package_itself_keeps_all_its_frames(monkeypatch):

    from sglang_lite.lang.execution import generation

    monkeypatch.setattr(
        generation, "_parse_or_validate", eval("lambda *a: 1 / 0", vars(generation))
    )
    with pytest.raises(sgl.ProgramError) as caught:
        reading(sgl.gen("a", timeout=9))
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert "_call_with_retries" in frames
