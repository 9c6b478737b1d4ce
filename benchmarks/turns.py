"""Three fields in one chat turn: calls and input tokens against a call a field. A count: no clock,
no network.

    python benchmarks/turns.py [--record]

The model is a scripted chat API without prefill. Its first answer to a text is one of the
checked-in ones in tests/lang/backend/turns: written by hand at three levels of format noise, or
the default model's (`--record` makes those). Where it is asked to go on, it goes on with the right
fields. A token is a word, a number or a mark.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

import sglang_lite as sgl
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.backend.capabilities import Capabilities, TurnRules
from sglang_lite.lang.backend.planning import RunFacts
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.lang.backend.rendering import CONTINUE_PROMPT
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol import Constraint, Delta, Generation, Prompt, SamplingParams, Unset, Usage

FOLDER = Path(__file__).parent.parent / "tests" / "lang" / "backend" / "turns"
FIELDS = ("name", "year", "city")
TASK = (
    "Read the text about a person. Answer with the name, the year of birth and the city of birth."
)
SOLVED = (
    ("Max Berg, a farmer, was born in Bonn in 1950.", "Max Berg", "1950", "Bonn"),
    (
        "Born in 1899, the poet Elena Costa never left Porto, her place of birth.",
        "Elena Costa",
        "1899",
        "Porto",
    ),
    ("Yusuf Demir (1972, Izmir) is a swimmer.", "Yusuf Demir", "1972", "Izmir"),
)


def lines(name: str, year: str, city: str) -> str:
    return f"Name: {name}\nYear: {year}\nCity: {city}"


def begin(s: sgl.ProgramState, text: str) -> None:
    """The task, solved for three texts in turns of the same form."""
    s += sgl.system(TASK)
    for solved, *fields in SOLVED:
        s += sgl.user(solved)
        s += sgl.assistant(lines(*fields))
    s += sgl.user(text)


def ask(s: sgl.ProgramState, text: str) -> None:
    begin(s, text)
    s += sgl.assistant(
        "Name:" + sgl.gen("name", stop="\n") + "\nYear:" + sgl.gen("year", stop="\n")
        + "\nCity:" + sgl.gen("city", stop="\n")
    )  # fmt: skip


def one_by_one(s: sgl.ProgramState, text: str) -> None:
    """A call a field: a turn for each, as such models take it."""
    begin(s, text)
    for field in FIELDS:
        s += sgl.user(f"The {field}?")
        s += sgl.assistant(sgl.gen(field, stop="\n"))


class ScriptedApi(BaseBackend):
    """A chat model behind an API, without prefill.

    Args:
        answers: what it says first, by the user's text.
        fields: the right ones, by the user's text.

    Attributes:
        calls, tokens: that it has been asked, and sent, so far.
    """

    enforces = True

    def __init__(self, answers: Mapping[str, str], fields: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__()
        self.chat_template = get_chat_template("default")
        rules = TurnRules("refused", "refused")
        self.capabilities = Capabilities(
            frozenset(), select=False, scores=False, continues=False, prefill=False, turns=rules
        )
        self._answers, self._fields = answers, fields
        self.calls = self.tokens = 0

    def planner(self, run: RunFacts) -> CallPlanner:
        return CallPlanner(self, run)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        shown = [(message.role, "".join(map(str, message.content))) for message in prompt.messages]
        sent = sum(count(text) for _, text in shown)
        self.calls += 1
        self.tokens += sent
        said = self._said(shown)
        for stop in () if isinstance(params.stop, Unset) else params.stop:
            said = said.partition(stop)[0]
        yield Generation(said, usage=Usage(prompt_tokens=sent, completion_tokens=count(said)))

    def _said(self, shown: list[tuple[str, str]]) -> str:
        text = shown[1 + 2 * len(SOLVED)][1]
        right = self._fields[text]
        if shown[-1][1] == CONTINUE_PROMPT:
            begun = shown[-2][1]
            return "".join(f"\n{f.title()}: {right[f]}" for f in FIELDS).partition(
                begun.rpartition("\n")[2]
            )[2]
        asked = re.fullmatch(r"The (\w+)\?", shown[-1][1])
        return right[asked[1]] if asked else self._answers[text]


def count(text: str) -> int:
    """Tokens of a text."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def measured(
    program: Callable[..., Any], answers: list[tuple[str, str]], fields: Mapping[str, Any]
) -> tuple[float, int, int]:
    """Calls a text, tokens sent for all, and values that are not what the answer or the text says."""
    calls, tokens, wrong = 0, 0, 0
    for text, answer in answers:
        api = ScriptedApi({text: answer}, fields)
        state = program.run(text, backend=api)
        for field in FIELDS:
            wrong += (
                state[field].strip() not in answer and state[field].strip() != fields[text][field]
            )
        calls, tokens = calls + api.calls, tokens + api.tokens
    return calls / len(answers), tokens, wrong


def record(texts: list[dict[str, str]]) -> None:
    """Keeps the default model's answers."""
    with sgl.Engine(device="cpu") as engine:

        @sgl.function
        def answer(s: sgl.ProgramState, text: str) -> None:
            begin(s, text)
            s += sgl.assistant(sgl.gen("answer", max_tokens=64, temperature=0))

        states = answer.run_batch([{"text": each["text"]} for each in texts], backend=engine)
        said = [
            {"level": "real", "text": i, "answer": state["answer"]}
            for i, state in enumerate(states)
        ]
    (FOLDER / "real.json").write_text(
        json.dumps({"answers": said}, indent=2, ensure_ascii=False) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record", action="store_true", help="ask the default model anew, and keep what it says"
    )
    written = json.loads((FOLDER / "written.json").read_text())
    texts: list[dict[str, str]] = written["texts"]
    if parser.parse_args().record:
        record(texts)
    real = json.loads((FOLDER / "real.json").read_text())
    fields = {each["text"]: {field: each[field] for field in FIELDS} for each in texts}
    by_level: dict[str, list[tuple[str, str]]] = {}
    for each in (*written["answers"], *real["answers"]):
        by_level.setdefault(each["level"], []).append((texts[each["text"]]["text"], each["answer"]))
    by_level["all written"] = [
        case for level in ("blanks", "punctuation", "lines") for case in by_level[level]
    ]
    for level, answers in by_level.items():
        # A program for each, so that no level turns drafts off for another.
        _, base, _ = measured(sgl.function(one_by_one), answers, fields)
        calls, tokens, wrong = measured(sgl.function(num_api_spec_tokens=64)(ask), answers, fields)
        print(
            f"{level:12} {calls:.2f} calls, input tokens {base / tokens:.2f}x fewer, {wrong} wrong values"
        )


if __name__ == "__main__":
    main()
