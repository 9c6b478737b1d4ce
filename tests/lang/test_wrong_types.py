"""Wrong calls, which every type checker finds: a `type: ignore` that a line does not need would be an error
(test_type_checkers.py). They are not executed: Python does not check types."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel

import sglang_lite as sgl


class Person(BaseModel):
    name: str
    age: int


BACKEND = sgl.ScriptedBackend(default="x")

person = sgl.gen("person", type=Person)
free = sgl.gen("free")
group = sgl.select("group", ["a", "b"])


@sgl.function
def profile(s: sgl.ProgramState, text: str, times: int = 1) -> None:
    s += text + person


@sgl.function
def named(s: sgl.ProgramState, *, topic: str) -> None:
    s += topic + free


def takes_text(text: str) -> None: ...


def reads(s: sgl.ProgramState) -> list[Callable[[], object]]:
    return [
        lambda: takes_text(s[person]),  # type: ignore[arg-type]
        lambda: s[person].nmae,  # type: ignore[attr-defined]
        lambda: s[free] + 1,  # type: ignore[operator]
        lambda: s[group].age,  # type: ignore[attr-defined]
        lambda: s[3],  # type: ignore[call-overload]
        lambda: takes_text(s.value("person", Person)),  # type: ignore[arg-type]
        lambda: s.value("person", 3),  # type: ignore[arg-type]
        lambda: s.value("person"),  # type: ignore[call-arg]
        lambda: s.answer,  # type: ignore[attr-defined]
        lambda: s.user(3),  # type: ignore[call-overload]
        lambda: s.fork("2"),  # type: ignore[arg-type]
        lambda: [each.nmae for each in s.partial_iter(person)],  # type: ignore[attr-defined]
        lambda: s.text_iter(3),  # type: ignore[arg-type]
    ]


CALLS: list[Callable[[], object]] = [
    # arguments of the program
    lambda: profile(3),  # type: ignore[arg-type]
    lambda: profile(),  # type: ignore[call-arg]
    lambda: profile("a", times="2"),  # type: ignore[arg-type]
    lambda: profile("a", tims=2),  # type: ignore[call-arg]
    lambda: profile("a", 2, 3),  # type: ignore[call-arg]
    lambda: profile("a", backend=BACKEND),  # type: ignore[call-arg]
    lambda: named("a"),  # type: ignore[call-arg]
    lambda: named(topic=b"a"),  # type: ignore[arg-type]
    lambda: profile.bind(txt="a"),  # type: ignore[call-arg]
    lambda: profile.bind(3),  # type: ignore[arg-type]
    # options of the run
    lambda: profile("a").run(backnd=BACKEND),  # type: ignore[call-arg]
    lambda: profile("a").run(backend="gpt-4o-mini"),  # type: ignore[arg-type]
    lambda: profile("a").run(temperature="0"),  # type: ignore[arg-type]
    lambda: profile("a").run(max_tokens=3),  # type: ignore[call-arg]
    lambda: profile("a").run("b"),  # type: ignore[call-arg, arg-type]
    lambda: profile.bind("a").run(text="b"),  # type: ignore[call-arg]
    lambda: profile.bind("a").run(seed="7"),  # type: ignore[arg-type]
    lambda: profile("a").arun(stop=3),  # type: ignore[arg-type]
    lambda: profile.run("a", stream="yes"),  # type: ignore[arg-type]
    lambda: takes_text(profile("a").run()),  # type: ignore[arg-type]
    # batches
    lambda: profile.run_batch(["a", "b"]),  # type: ignore[list-item]
    lambda: profile.run_batch({"text": "a"}),  # type: ignore[dict-item]
    lambda: profile.run_batch([], on_error="ignore"),  # type: ignore[call-overload]
    lambda: profile.run_batch([], workers=3),  # type: ignore[call-overload]
    lambda: profile.run_batch([], on_error="return")[0].text(),  # type: ignore[union-attr]
    lambda: profile.run_batch([], generator_style=True)[0],  # type: ignore[index]
    # generations and selections
    lambda: sgl.gen("a", type=3),  # type: ignore[call-overload]
    lambda: sgl.gen("a", type=int, regex="[0-9]+"),  # type: ignore[call-overload]
    lambda: sgl.gen("a", temprature=0),  # type: ignore[call-overload]
    lambda: sgl.gen("a", max_tokens="3"),  # type: ignore[call-overload]
    lambda: sgl.gen("a", stop=3),  # type: ignore[call-overload]
    lambda: sgl.gen("a", type=Person, check=lambda value: value.nmae),  # type: ignore[attr-defined]
    lambda: sgl.gen(3),  # type: ignore[call-overload]
    lambda: sgl.select("a"),  # type: ignore[call-overload]
    lambda: sgl.select(["a", "b"]),  # type: ignore[call-overload]
    lambda: sgl.user(3),  # type: ignore[arg-type]
    lambda: sgl.gne("a"),  # type: ignore[attr-defined]
    # programs and backends
    lambda: sgl.function(3),  # type: ignore[call-overload]
    lambda: sgl.function(lambda: None),  # type: ignore[arg-type, misc]
    lambda: sgl.OpenAI(),  # type: ignore[call-arg]
    lambda: sgl.ScriptedBackend(anwsers={}),  # type: ignore[call-arg]
    lambda: sgl.Engine("m", devcie="cpu"),  # type: ignore[call-overload]
    lambda: sgl.Engine("m", dtype=3),  # type: ignore[call-overload]
    lambda: sgl.set_default_backend("gpt-4o-mini"),  # type: ignore[arg-type]
]
