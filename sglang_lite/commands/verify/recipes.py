"""Check `recipes`: runs small programs like those of the cookbook to their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from sglang_lite.commands.verify.records import Check, Subject
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.api import assistant, function, gen, select, user
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.state import ProgramState
from sglang_lite.protocol import SglError


class _City(BaseModel):
    name: Annotated[str, Field(pattern=r"^[A-Z][a-z]{1,11}$")]
    people: Annotated[int, Field(ge=0, le=40_000_000)]


@function
def _extraction(s: ProgramState) -> str:
    s += 'Oslo has 700000 people: {"name": "Oslo", "people": 700000}\nLima has 10000000 people: '
    s += gen("city", type=_City, max_tokens=64, temperature=0)
    return str(s["city"])


@function
def _choice(s: ProgramState) -> str:
    s += "The cat sleeps => animal\nThe car is red => vehicle\nThe dog barks =>"
    s += select("kind", [" animal", " vehicle"])
    return str(s["kind"])


@function
def _chat(s: ProgramState) -> str:
    s += user("My name is Zoe. Say hello.")
    s += assistant(gen("hello", max_tokens=16, temperature=0))
    s += user("What is my name?")
    s += assistant(gen("name", max_tokens=16, temperature=0))
    return str(s["name"])


@function
def _fork(s: ProgramState) -> str:
    s += "Three words about the sea: "
    forks = s.fork(3)
    forks += gen("word", regex=r"[a-z]{3,8}", max_tokens=8, temperature=1, seed=7)
    forks.join()
    return ", ".join(map(str, s["word"]))


def _weather(city: Literal["Lima", "Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"snow in {city}"


@function
def _tool_call(s: ProgramState) -> str:
    s += 'What is the weather in Lima?\n{"tool": "_weather", "arguments": {"city": "Lima"}}\n'
    s += "What is the weather in Oslo?\n"
    s += gen("call", tools=[_weather], tool_choice="required", max_tokens=64, temperature=0)
    return str(s["call"].run())


RECIPES: Final[Mapping[str, SglFunction[..., str]]] = {
    "extraction": _extraction,
    "choice": _choice,
    "chat": _chat,
    "fork": _fork,
    "tool call": _tool_call,
}


def check_recipes(subject: Subject, engine: Engine) -> Check:
    """Runs the recipes. A recipe that ends with an error fails; the content of answers is not
    judged.
    """
    found: dict[str, str] = {}
    wrong = []
    left_out = []
    for name, recipe in RECIPES.items():
        if name == "chat" and subject.files.tokenizer.chat_template is None:
            left_out.append(name)
            continue
        try:
            found[name] = str(recipe.run(backend=engine).ret_value)
        except SglError as error:
            found[name] = f"{type(error).__name__}: {error}"
            wrong.append(f"{name}: {found[name]}")
    summary = f"{len(found) - len(wrong)} of {len(RECIPES)} recipes ran to their end"
    if left_out:
        summary += "; chat was left out, as the model has no chat template"
    for each in wrong:
        summary += f"; {each}"
    return Check("recipes", "failed" if wrong else "passed", summary, {"answers": found})
