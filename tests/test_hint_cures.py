"""Hints that advise code: each mistake of hint_cures.toml raises an error with its hint, and the
advised code works then.
"""

import contextlib
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Literal

import pydantic
import pytest

import sglang_lite as sgl
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Prompt, SamplingParams, Span
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.server.settings import ServerSettings
from tests.hint_places import places
from tests.test_hints import hints, trees

ROOT = Path(__file__).parent
TABLE = tomllib.loads((ROOT / "hint_cures.toml").read_text(encoding="utf-8"))
CURES, UNEXECUTED = TABLE["cure"], TABLE["unexecuted"]
# A call, an argument, a flag, a command, or what stands between backticks.
CODE = re.compile(
    r"\w\((?!s\))|[a-z_]\w*=(?!=)|--[a-z]|pip install|sglang-lite [a-z]|`[^`]*[ (.=][^`]*`|\w \+= "
)


PROGRAM = """import sglang_lite as sgl


@sgl.function
def program(s, name):
    s += name + sgl.gen("a", max_tokens=3)
"""


def matches(hint, text):
    """Whether a text is a hint, with what it leaves open filled in."""
    parts = [re.escape(part).replace(r"\{\}", ".*") for part in hint.split(" | ")]
    return any(re.fullmatch(part, text, re.DOTALL) for part in parts if part)


def names(stack):
    """Names that mistakes and cures have.

    Args:
        stack: closes what they open.
    """
    from tests.runtime.thinkers import thinker

    class Point(pydantic.BaseModel):
        x: int

    def run(body, **options):
        return sgl.function(lambda s: (body(s), None)[1]).run(**options)

    def tiny(**settings):
        return stack.enter_context(sgl.Engine.of(thinker("abcdefghij.", starts=False), **settings))

    def served():
        server = stack.enter_context(sgl.server_for_tests())
        server.answers = "fine"
        return server

    def plain():
        loaded = thinker("abcdefghij.")
        loaded.tokenizer.chat_template = None
        return stack.enter_context(sgl.Engine.of(loaded))

    def made(name, text):
        Path(name).write_text(text)
        return name

    def saved(state):
        state.save("run.json")
        return "run.json"

    def serve(**settings):
        from tests.server.conftest import serving

        return stack.enter_context(serving(tiny(), **settings))

    def search(query: str) -> str:
        return query

    @sgl.function
    def program(s, name):
        s += name + sgl.gen("a")

    def agent(approve="ask"):
        texts = iter(['{"tool": "search", "arguments": {"query": "x"}}', '{"answer": "done"}'])

        def use(s):
            s += sgl.user("Find x.")
            sgl.use_tools(s, [search], approve=approve)

        return run(use, backend=sgl.ScriptedBackend(lambda _: next(texts)))

    return {
        "sgl": sgl, "os": os, "Literal": Literal, "run": run, "search": search, "Point": Point, "program": program,
        "agent": agent, "EngineConfig": EngineConfig, "ServerSettings": ServerSettings, "SamplingParams": SamplingParams, "Prompt": Prompt,
        "Span": Span, "DATA": ROOT / "server/data", "__name__": "cures",
        "contextlib": contextlib, "tiny": tiny, "served": served, "made": made, "saved": saved, "serve": serve, "PROGRAM": PROGRAM, "plain": plain, "Path": Path,
        "NUMBER": {"type": "integer"}, "WORD": {"type": "string"},
        "gpt": lambda server=None, **options: sgl.OpenAI("gpt-4o", **(server or served()).openai, **options),
        "compile_schema": lambda schema, **options: language_for_constraint(json_schema(json.dumps(schema), **options)),
        "claude": lambda: sgl.Anthropic("claude-opus-5", **served().anthropic),
    }  # fmt: skip


@pytest.mark.sampled(3)
# left by mistakes
@pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(each, id=f"{i}: {each['hint'][:50]}") for i, each in enumerate(CURES)]
)
def test_what_a_hint_advises_works_after_the_mistake(
    case, tmp_path, tmp_path_factory, monkeypatch, small_file
):
    monkeypatch.chdir(tmp_path)
    for name in [each for each in os.environ if each.endswith(("_API_KEY", "_PROJECT_ID"))]:
        monkeypatch.delenv(name)
    sgl.set_default_backend(sgl.ScriptedBackend(default="fine"))
    with contextlib.ExitStack() as stack:
        own = {
            **names(stack),
            **places(stack, tmp_path_factory.mktemp("places")),
            "small_file": small_file,
        }
        if case.get("warns"):
            with pytest.warns(UserWarning, match=re.escape(case["hint"])):
                exec(case["mistake"], own)  # a program of this repository
        else:
            with pytest.raises(sgl.SglError) as caught:
                exec(case["mistake"], own)
            if case.get("inside"):  # of an error that came over HTTP
                assert re.search(
                    ".*".join(map(re.escape, case["hint"].split("{}"))), str(caught.value)
                )
            hint = (
                case["hint"]
                if case.get("inside")
                else (caught.value.hint or "").removeprefix(case.get("starts", ""))
            )
            assert matches(case["hint"], hint), f"{caught.value!r}: {hint}"
        exec(case["cure"], own)


def test_every_hint_with_code_has_a_cure_or_is_listed():
    written = {text for text in hints(trees()).values() if CODE.search(text)}
    cured, listed = {each["hint"] for each in CURES}, {each["hint"] for each in UNEXECUTED}
    assert written - cured - listed == set(), "add a cure to tests/hint_cures.toml"
    assert (cured | listed) - written == set()
    assert not cured & listed
    assert len(cured) >= 143
    assert len(listed) <= 26


@pytest.mark.parametrize("case", CURES, ids=lambda case: case["hint"][:50])
def test_a_cure_has_what_its_hint_advises(case):
    if not case["hint"].startswith(("Leave ", "Run without")):
        advised = re.findall(r"(?<![\w.])([a-z_]\w*)=(?!=)", case["hint"])  # arguments
        assert [each for each in advised if not re.search(rf"\b{each}[=\"]", case["cure"])] == []
