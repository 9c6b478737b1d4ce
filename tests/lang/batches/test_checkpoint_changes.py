"""Files of batches after something has changed that their results depend on."""

import contextvars
import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_lite as sgl
from tests.lang.batches.test_checkpoint_file import (
    ITEMS,
    TEXTS,
    VALUES,
    City,
    add,
    refused,
    run,
    script,
    square,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "batch.jsonl"


CHANGING = """
import random
import threading
from functools import lru_cache, partial

from pydantic import BaseModel, Field, field_validator
import sglang_lite as sgl

TEMPLATE = "say {x}"  # template
WORDS = {"one", "two", "three"}  # words
LOCK, LOG, CHANCE = threading.Lock(), [], random.random
COUNT = 0


class Shape(BaseModel):
    sides: int = Field(ge=3)  # field

    @field_validator("sides")
    def small(cls, value):
        return value + 0  # method


@lru_cache
def cached(x):
    return x * 1  # cached


def helper(x):
    return deeper(x) if x in {"b", "a", "c"} else x


def deeper(x, *, unused=1):  # keyword default
    return helper(x + 1)  # deeper


@sgl.function
def inner(s, x):
    s += "inner"  # inner


def scale(factor, x):
    return factor * x  # scale


double = partial(scale, 2)  # partial


def make(suffix):
    calls = 0

    @sgl.function
    def program(s, x, tone="calm"):  # default
        global COUNT
        nonlocal calls
        COUNT, calls = COUNT + 1, calls + 1
        LOG, LOCK, CHANCE, sgl
        s += TEMPLATE.format(x=x) + suffix
        s += "".join(word for word in sorted(WORDS) if helper(cached(double(x))))
        s += inner(x) + sgl.gen("a", json_schema=Shape, max_tokens=8)  # body

    return program


program = make("!")  # closure
"""


def changing(path, source=CHANGING, **options):
    """The states of a program that is read from source, and how many calls they took."""
    namespace = {"__name__": "changing"}
    exec(compile(source, "changing.py", "exec"), namespace)
    backend = sgl.ScriptedBackend(lambda call: '{"sides": 4}')
    namespace["program"].run_batch(
        [{"x": 1}, {"x": 2}], **{"backend": backend, **options}, checkpoint=path
    )
    return len(backend.calls)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ('"say {x}"', '"tell {x}"', "TEMPLATE in program"),
        ('"three"}', '"four"}', "WORDS in program"),
        ("ge=3", "ge=4", "__pydantic_fields__ of class Shape"),
        ("value + 0", "value - 0", "the code of Shape.small"),
        ("x * 1", "x * 2", "the code of cached"),
        ("unused=1", "unused=2", "the default of unused in deeper"),
        ("helper(x + 1)", "helper(x + 2)", "the code of deeper"),
        ('"inner"', '"outer"', "the code of inner"),
        ("factor * x", "x * factor", "the code of scale"),
        ("partial(scale, 2)", "partial(scale, 3)", "double in program"),
        ('"calm"', '"wild"', "default 1 in program"),
        ("max_tokens=8", "max_tokens=9", "the code of program"),
        ('make("!")', 'make("?")', "suffix in program"),
    ],
)
def test_a_change_of_anything_that_the_program_reads_is_refused(path, before, after, named):
    assert changing(path) == 2
    with pytest.raises(
        sgl.ProgramError, match=f"line 1: since it was made, this has changed: .*{named}"
    ):
        changing(path, CHANGING.replace(before, after))
    assert changing(path) == 0


def test_what_a_program_keeps_for_itself_where_it_stands_and_comments_are_no_change(path):
    assert changing(path) == 2
    source = (
        CHANGING.replace("COUNT = 0", "COUNT = 5")
        .replace("calls = 0", "calls = 7")
        .replace("# body", "# text")
    )
    assert changing(path, f"UNREAD = 1\n\n{source}") == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(seed=8), "the setting seed"),
        (dict(temperature=0.5), "the setting temperature"),
        (dict(stop=["x"]), "the setting stop"),
        (dict(max_new_tokens=7), "the setting max_tokens"),
        (dict(version=1), "the version"),
    ],
)
def test_other_settings_are_refused(path, options, named):
    run(path, seed=7)
    refused(path, f"this has changed: .*{named}", **{"seed": 7, **options})


def test_another_backend_is_refused(path):
    class Other(sgl.ScriptedBackend):
        pass

    class Named(sgl.ScriptedBackend):
        def get_model_name(self):
            return "another"

    run(path)
    for other in (Other(), Named()):
        refused(path, "this has changed: the backend", backend=other)


def test_what_can_not_change_a_result_may_be_different(path):
    run(path)
    assert run(path, num_threads=3, retries=2, timeout=60, on_error="skip") == (TEXTS, 0)


def test_what_can_not_be_compared_is_named_and_a_version_is_compared_instead(path):
    current = contextvars.ContextVar("current", default="x")

    @sgl.function
    def program(s, x):
        s += current.get() + sgl.gen("a")

    with pytest.raises(sgl.ParameterError, match=r"current in program is a ContextVar.*`version=`"):
        run(path, program=program)
    assert not path.exists()
    backend = script()
    for same in ("1", 1):
        program.run_batch([{"x": 1}], backend=backend, checkpoint=path, version=same)
    assert len(backend.calls) == 1
    refused(path, "this has changed: the version", [{"x": 1}], program, version="2")
    with pytest.raises(sgl.ParameterError, match=r"version: 1\.5 is neither"):
        run(path, version=1.5)
    for wrong in (dict(version="1"), dict(skip_damaged=True)):
        with pytest.raises(
            sgl.ParameterError, match=r"has no effect without a checkpoint file\. Give checkpoint=…"
        ):
            square.run_batch(ITEMS, backend=script(), **wrong)


def test_arguments_that_can_not_be_compared_are_refused(path):
    with pytest.raises(
        sgl.ParameterError, match=r"batch_kwargs\[1\]: a generator in it can't be compared"
    ):
        run(path, [{"x": 1}, {"x": (i for i in ())}])
    assert not path.exists()


@pytest.mark.parametrize(
    "value",
    [*VALUES, add, len, {"f": City}, 1j, ..., str.upper, Path("a")],
    # a function's repr is another one in each process
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_arguments_are_compared_by_their_content(path, value):
    @sgl.function
    def program(s, x):
        s += sgl.user("x") + sgl.assistant(sgl.gen("a"))

    assert run(path, [{"x": value}], program)[1] == 1
    assert run(path, [{"x": copy.deepcopy(value)}], program)[1] == 0
    refused(path, "other arguments", [{"x": (value,)}], program)


def test_every_process_compares_alike(tmp_path):
    (tmp_path / "changing.py").write_text(CHANGING)
    code = (
        "import changing, sglang_lite as sgl, sys\n"
        "backend = sgl.ScriptedBackend(lambda call: '{\"sides\": 4}')\n"
        "changing.program.run_batch([{'x': 1, 'tone': {'a', 'b', 'c'}}], backend=backend, checkpoint=sys.argv[1])\n"
        "print(len(backend.calls))"
    )
    calls = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "batch.jsonl")],
            capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert calls == ["1\n", "0\n"]
