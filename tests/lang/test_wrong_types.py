"""Wrong calls, which every type checker finds: a `type: ignore` that a line does not need would be
an error (test_type_checkers.py). They are not executed: Python does not check types.
"""

from __future__ import annotations

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


@sgl.function
def counted(s: sgl.ProgramState, text: str) -> int:
    return len(text)


def takes_text(text: str) -> None: ...


def reads(s: sgl.ProgramState, engine: sgl.Engine) -> None:
    takes_text(s[person])  # type: ignore[arg-type]
    _ = s[person].nmae  # type: ignore[attr-defined]
    _ = s[free] + 1  # type: ignore[operator]
    _ = s[group].age  # type: ignore[attr-defined]
    _ = s[3]  # type: ignore[call-overload]
    takes_text(s.value("person", Person))  # type: ignore[arg-type]
    _ = s.value("person", 3)  # type: ignore[arg-type]
    _ = s.value("person")  # type: ignore[call-arg]
    _ = s.answer  # type: ignore[attr-defined]
    _ = s.user(3)  # type: ignore[call-overload]
    _ = s.fork("2")  # type: ignore[arg-type]
    _ = [each.nmae for each in s.partial_iter(person)]  # type: ignore[attr-defined]
    _ = s.text_iter(3)  # type: ignore[arg-type]
    _ = s.call(takes_text, "a")  # type: ignore[call-overload]
    _ = s.call(counted, "a").ret_value.real_part  # type: ignore[attr-defined]
    _ = engine.generate(3)  # type: ignore[call-overload]
    _ = engine.generate("a", {"temperatur": 0})["text"]  # type: ignore[call-overload]
    _ = engine.generate("a", {"n": 2})["text"]  # type: ignore[call-overload]
    _ = engine.generate("a")["txt"]  # type: ignore[typeddict-item]
    _ = engine.generate(["a"])["text"]  # type: ignore[call-overload]
    _ = engine.generate("a", return_logprobs=True)  # type: ignore[call-overload]


def calls() -> None:
    # arguments of the program
    _ = profile(3)  # type: ignore[arg-type]
    _ = profile()  # type: ignore[call-arg]
    _ = profile("a", times="2")  # type: ignore[arg-type]
    _ = profile("a", tims=2)  # type: ignore[call-arg]
    _ = profile("a", 2, 3)  # type: ignore[call-arg]
    _ = profile("a", backend=BACKEND)  # type: ignore[call-arg]
    _ = named("a")  # type: ignore[call-arg]
    _ = named(topic=b"a")  # type: ignore[arg-type]
    _ = profile.bind(txt="a")  # type: ignore[call-arg]
    _ = profile.bind(3)  # type: ignore[arg-type]
    # options of the run
    _ = profile("a").run(backnd=BACKEND)  # type: ignore[call-arg]
    _ = profile("a").run(backend="gpt-4o-mini")  # type: ignore[arg-type]
    _ = profile("a").run(temperature="0")  # type: ignore[arg-type]
    _ = profile("a").run(max_tokens=3)  # type: ignore[call-arg]
    _ = profile("a").run("b")  # type: ignore[call-arg, arg-type]
    _ = profile.bind("a").run(text="b")  # type: ignore[call-arg]
    _ = profile.bind("a").run(seed="7")  # type: ignore[arg-type]
    _ = profile("a").arun(stop=3)  # type: ignore[arg-type]
    _ = profile.run("a", stream="yes")  # type: ignore[arg-type]
    takes_text(profile("a").run())  # type: ignore[arg-type]
    takes_text(counted("a").run().ret_value)  # type: ignore[arg-type]
    # batches
    _ = profile.run_batch(["a", "b"])  # type: ignore[list-item]
    _ = profile.run_batch({"text": "a"})  # type: ignore[dict-item]
    _ = profile.run_batch([], on_error="ignore")  # type: ignore[call-overload]
    _ = profile.run_batch([], workers=3)  # type: ignore[call-overload]
    _ = profile.run_batch([], on_error="return")[0].text()  # type: ignore[union-attr]
    _ = profile.run_batch([], generator_style=True)[0]  # type: ignore[index]
    # generations and selections
    _ = sgl.gen("a", type=3)  # type: ignore[call-overload]
    _ = sgl.gen("a", type=int, regex="[0-9]+")  # type: ignore[call-overload]
    _ = sgl.gen("a", temprature=0)  # type: ignore[call-overload]
    _ = sgl.gen("a", max_tokens="3")  # type: ignore[call-overload]
    _ = sgl.gen("a", stop=3)  # type: ignore[call-overload]
    sgl.gen("a", type=Person, check=lambda value: value.nmae)  # type: ignore[attr-defined]
    _ = sgl.gen(3)  # type: ignore[call-overload]
    _ = sgl.select("a")  # type: ignore[call-overload]
    _ = sgl.select(["a", "b"])  # type: ignore[call-overload]
    _ = sgl.user(3)  # type: ignore[arg-type]
    _ = sgl.gne("a")  # type: ignore[attr-defined]
    # programs and backends
    _ = sgl.function(3)  # type: ignore[call-overload]
    _ = sgl.function(lambda: None)  # type: ignore[arg-type, misc]
    _ = sgl.OpenAI()  # type: ignore[call-arg]
    _ = sgl.ScriptedBackend(anwsers={})  # type: ignore[call-arg]
    _ = sgl.Engine("m", devcie="cpu")  # type: ignore[call-overload]
    _ = sgl.Engine("m", dtype=3)  # type: ignore[call-overload]
    sgl.set_default_backend("gpt-4o-mini")  # type: ignore[arg-type]
    _ = sgl.use_tools(profile.run("a"), [], approve={"a": "no"})  # type: ignore[dict-item]
    _ = sgl.use_tools(profile.run("a"), [], approve="no")  # type: ignore[arg-type]
