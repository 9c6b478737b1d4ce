"""Ways to answer the cases of a task. Another way is a function and a row of WAYS: exact draws and thinking before
the value have their names there when an engine offers them.

All are greedy, see the same prompt and the same limit of tokens.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import sglang_lite as sgl
from benchmarks.answers.cases import FOLDER, PROMPTS, Case
from benchmarks.answers.outcome import Outcome
from benchmarks.answers.schemas import SCHEMAS
from benchmarks.answers.scoring import json_of, valid_call
from benchmarks.answers.toolbox import TOOLS, Tool, world_tools
from sglang_lite.lang.agent import use_tools
from sglang_lite.lang.tools import tool_schemas
from sglang_lite.protocol import SamplingParams, Usage
from sglang_lite.text.chat_format import ChatFormat, Conversation
from sglang_lite.text.chat_format import Tool as ShownTool

ROWS = 16  # requests at the same time
LIMITS = {"extraction": 256, "tools": 200, "labels": 16, "agents": 200, "quotes": 120}  # tokens of an answer
STEPS = 5  # rounds of tool calls that an agent may make for a turn
ATTEMPTS = 3  # of instructor
CUT = "cut at the limit"  # an error in every way


@dataclass(frozen=True)
class Context:
    """What ways run on: an engine, a server of it, and a Python that has instructor."""

    engine: sgl.Engine
    url: str
    instructor: Path


Way: TypeAlias = Callable[[Context, Sequence[Case]], list[Outcome]]


def run_program(context: Context, program: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """States of a batch, or the errors that they ended with."""
    return program.run_batch(
        rows, backend=context.engine, temperature=0, num_threads=ROWS, on_error="return", progress_bar=False
    )


def outcome_of(state: Any, read: Callable[[Any], Any]) -> Outcome:
    """Outcome of a program's state; `read` makes the value of it."""
    if isinstance(state, Exception):  # one that a limit has cut has a text and its cost
        usage = getattr(state, "usage", None) or Usage()
        return Outcome(
            text=getattr(state, "text", None) or "",
            error=f"{type(state).__name__}: {state}"[:500],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )
    usage = state.usage()
    outcome = Outcome(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
    try:
        outcome.text = state.messages()[-1]["content"]
        outcome.value = read(state)
    except (sgl.SglError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:500]
    return outcome


# ------------------------------------------------------------------------------------------------ extraction


def schema_text(name: str) -> str:
    """JSON Schema of a type, as a user would paste it."""
    return json.dumps(SCHEMAS[name].model_json_schema())


def described(name: str) -> str:
    """The type in the words of `sgl.grammar.describe`."""
    return sgl.grammar.describe(SCHEMAS[name])


@sgl.function
def extract(s: sgl.ProgramState, case: Case, shown: str, options: dict[str, Any]) -> None:
    s += sgl.system(PROMPTS["schema"].format(schema=shown))
    s += sgl.user(case["text"])
    s += sgl.assistant(sgl.gen("value", max_tokens=LIMITS["extraction"], **options))


def extraction(
    context: Context,
    cases: Sequence[Case],
    *,
    how: Literal["free text", "json_schema", "type"],
    show: Any = schema_text,
) -> list[Outcome]:
    """Extraction by a program: free text, a schema's mask alone, or a generation of the type."""
    rows = []
    for case in cases:
        schema = SCHEMAS[case["schema"]]
        rows.append(
            {"case": case, "shown": show(case["schema"]), "options": {} if how == "free text" else {how: schema}}
        )
    return [
        outcome_of(state, partial(_extracted, case["schema"]))
        for case, state in zip(cases, run_program(context, extract, rows))
    ]


@sgl.function
def compare(s: sgl.ProgramState, case: Case, name: str, value: str, null_first: bool) -> None:
    """Asks whether a value or null is right."""
    description = SCHEMAS[case["schema"]].model_fields[name].description
    stated = PROMPTS["check_value"].format(value=value)
    first, second = (PROMPTS["check_null"], stated) if null_first else (stated, PROMPTS["check_null"])
    s += sgl.user(
        PROMPTS["check"].format(
            text=case["text"], name=name.replace("_", " "), description=description, first=first, second=second
        )
    )
    s += sgl.assistant(sgl.select("letter", ["A", "B"]))


def extraction_compared(context: Context, cases: Sequence[Case]) -> list[Outcome]:
    """Extraction by a generation of the type, whose optional values are then compared with null, one by one.

    A comparison is made in both orders, as models prefer a letter. Null replaces a value if it is likelier in the mean
    of both.
    """
    outcomes = extraction(context, cases, how="type", show=described)
    rows = []
    for case, outcome in zip(cases, outcomes):
        optional = [name for name, field in SCHEMAS[case["schema"]].model_fields.items() if not field.is_required()]
        for name in optional:
            if outcome.value is not None and outcome.value[name] is not None:
                value = json.dumps(outcome.value[name], ensure_ascii=False)
                rows += [
                    (outcome, name, {"case": case, "name": name, "value": value, "null_first": null_first})
                    for null_first in (False, True)
                ]
    states = run_program(context, compare, [row for _, _, row in rows])
    for (outcome, name, _), direct, turned in zip(rows[::2], states[::2], states[1::2]):
        for state in (direct, turned):
            usage = state.usage()
            outcome.prompt_tokens += usage.prompt_tokens
            outcome.completion_tokens += usage.completion_tokens
        if direct.selection("letter").probs["A"] < turned.selection("letter").probs["A"]:
            outcome.value[name] = None
    return outcomes


def _extracted(schema: str, state: Any) -> Any:
    value = state["value"]
    if isinstance(value, str):  # strict, as instructor is: a number in quotation marks is none
        value = SCHEMAS[schema].model_validate_json(next(_objects(value), value), strict=True)
    return value.model_dump(mode="json")


def instructor(context: Context, cases: Sequence[Case], *, mode: str, prompt: str) -> list[Outcome]:
    """Extraction by instructor over the server."""
    lines = []
    for case in cases:
        system = PROMPTS[prompt].format(schema=schema_text(case["schema"]))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": case["text"]}]
        lines.append(json.dumps({"schema": case["schema"], "messages": messages}) + "\n")
    limits = map(str, (ROWS, ATTEMPTS, LIMITS["extraction"]))
    worker, model = str(FOLDER / "instructor_worker.py"), context.engine.model_name
    command = [str(context.instructor), worker, context.url, model, mode, *limits, str(time.time())]
    done = subprocess.run(command, input="".join(lines), stdout=subprocess.PIPE, text=True, check=True)
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]


# ------------------------------------------------------------------------------------------------ tools


def qwen_calls(text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    """Calls between <tool_call> marks, as the parsers of transformers and vLLM read them. What is no JSON is a call
    without a name.
    """
    return [_call(body) for body in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)]


def fenced_calls(text: str, tools: Sequence[Tool]) -> list[tuple[str, str]]:
    """Also objects outside the marks, in a fence or bare, that name one of the tools."""
    if found := qwen_calls(text, tools):
        return found
    names = {tool.__name__ for tool in tools}
    return [call for call in map(_call, _objects(text)) if call[0] in names]


def _objects(text: str) -> Iterator[str]:
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            _, end = decoder.raw_decode(text, at)
            yield text[at:end]
        except ValueError:
            end = at + 1
        at = end


def _call(body: str) -> tuple[str, str]:
    try:
        call = json.loads(body)
        return call["name"], json.dumps(call.get("arguments", {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", body


def shown_tools(tools: Sequence[Tool]) -> list[ShownTool]:
    """Tools as the chat template takes them."""
    functions: list[Any] = [each["function"] for each in tool_schemas(tools)]
    return [ShownTool(each["name"], each["description"], each["parameters"]) for each in functions]


def complete_free(context: Context, messages: list[dict[str, Any]], tools: Sequence[Tool], limit: int) -> Any:
    """Answer without a constraint to a conversation with tools, in the model's own template."""
    form = ChatFormat(context.engine.chat_template(), context.engine.tokenizer.control_texts, None, None)
    if form.family != "qwen":
        raise SystemExit("tools and agents: free calls are read in Qwen's form, and the model writes another.")
    prompt = form.prompt(Conversation(messages, shown_tools(tools)))
    return context.engine.complete(prompt, SamplingParams(max_tokens=limit, temperature=0))


def tools_free(context: Context, cases: Sequence[Case]) -> list[Outcome]:
    """Free text, read by the model's own parser."""

    def answer(case: Case) -> Outcome:
        messages = [{"role": "system", "content": PROMPTS["tools"]}, {"role": "user", "content": case["prompt"]}]
        tools = [TOOLS[name] for name in case["tools"]]
        told = complete_free(context, messages, tools, LIMITS["tools"])
        calls = qwen_calls(told.text, tools)
        usage = told.usage
        return Outcome(
            text=told.text,
            calls=calls,
            error=CUT if told.finish_reason == "length" else "",
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )

    with ThreadPoolExecutor(ROWS) as pool:
        return list(pool.map(answer, cases))


def read_fenced(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same free texts, read by the lenient parser."""
    read = []
    for case, outcome in zip(cases, outcomes):
        read.append(deepcopy(outcome))
        read[-1].calls = fenced_calls(outcome.text, [TOOLS[name] for name in case["tools"]])
    return read


@sgl.function
def choose_tools(s: sgl.ProgramState, case: Case) -> None:
    s += sgl.system(PROMPTS["tools"])
    s += sgl.user(case["prompt"])
    tools = [TOOLS[name] for name in case["tools"]]
    s += sgl.assistant(sgl.gen("value", max_tokens=LIMITS["tools"], tools=tools, parallel_tool_calls=True))


def tools_ours(context: Context, cases: Sequence[Case]) -> list[Outcome]:
    """`gen(tools=…)`."""
    outcomes = []
    for state in run_program(context, choose_tools, [{"case": case} for case in cases]):
        outcome = outcome_of(state, lambda state: state["value"])
        calls = outcome.value if isinstance(outcome.value, list) else []
        outcome.calls = [(call.name, json.dumps(json_of(call.arguments))) for call in calls]
        outcome.value = None
        outcomes.append(outcome)
    return outcomes


# ------------------------------------------------------------------------------------------------ labels, quotes


@sgl.function
def label(s: sgl.ProgramState, case: Case, how: str) -> None:
    s += sgl.user(PROMPTS["labels"].format(labels=", ".join(case["labels"]), text=case["text"]))
    if how == "select":
        s += sgl.assistant(sgl.select("value", case["labels"]))
    else:
        options: dict[str, Any] = {} if how == "free text" else {"type": Literal[tuple(case["labels"])]}
        exact = how == "exact Literal"
        s += sgl.assistant(sgl.gen("value", max_tokens=LIMITS["labels"], exact=exact, **options))


@sgl.function
def quote(s: sgl.ProgramState, case: Case, how: str) -> None:
    s += sgl.user(PROMPTS["quotes"].format(text=case["text"], question=case["question"]))
    options: dict[str, Any] = {} if how == "free text" else {"type": Annotated[str, sgl.quote(case["text"])]}
    s += sgl.assistant(sgl.gen("value", max_tokens=LIMITS["quotes"], **options))


def one_value(context: Context, cases: Sequence[Case], *, program: Any, how: str) -> list[Outcome]:
    """One value of a program, as text."""
    states = run_program(context, program, [{"case": case, "how": how} for case in cases])
    return [outcome_of(state, lambda state: state["value"]) for state in states]


# ------------------------------------------------------------------------------------------------ agents


@sgl.function
def agent(s: sgl.ProgramState, turns: list[str], tools: list[Tool]) -> None:
    s += sgl.system(PROMPTS["agents"])
    for index, turn in enumerate(turns):
        s += sgl.user(turn)
        use_tools(s, tools, f"turn{index}", max_steps=STEPS, max_tokens=LIMITS["agents"], parallel_tool_calls=True)


def agents_ours(context: Context, cases: Sequence[Case]) -> list[Outcome]:
    """`use_tools` in each turn."""
    worlds = [deepcopy(case["world"]) for case in cases]
    rows = [{"turns": case["turns"], "tools": world_tools(world)} for case, world in zip(cases, worlds)]
    outcomes = [outcome_of(state, lambda state: state.text()) for state in run_program(context, agent, rows)]
    for outcome, world in zip(outcomes, worlds):
        outcome.value = world
    return outcomes


def agents_free(context: Context, cases: Sequence[Case], *, read: Any) -> list[Outcome]:
    """The same loop without constraints; a call that is invalid gets an error as its result."""

    def answer(case: Case) -> Outcome:
        world = deepcopy(case["world"])
        tools, outcome = world_tools(world), Outcome(value=world)
        messages: list[dict[str, Any]] = [{"role": "system", "content": PROMPTS["agents"]}]
        for turn in case["turns"]:
            messages.append({"role": "user", "content": turn})
            _answer_turn(context, messages, tools, outcome, read)
        return outcome

    with ThreadPoolExecutor(ROWS) as pool:
        return list(pool.map(answer, cases))


def _answer_turn(
    context: Context, messages: list[dict[str, Any]], tools: list[Tool], outcome: Outcome, read: Any
) -> None:
    for _ in range(STEPS + 1):
        told = complete_free(context, messages, tools, LIMITS["agents"])
        outcome.text = told.text
        outcome.prompt_tokens += told.usage.prompt_tokens
        outcome.completion_tokens += told.usage.completion_tokens
        messages.append({"role": "assistant", "content": told.text})
        if told.finish_reason == "length":
            outcome.error = CUT
            return
        calls = read(told.text, tools)
        if not calls:
            return
        for name, arguments in calls:
            values = valid_call(name, arguments, tools)
            outcome.invalid += values is None
            result = "invalid call" if values is None else {t.__name__: t for t in tools}[name](**values)
            messages.append({"role": "tool", "name": name, "content": json.dumps(result, ensure_ascii=False)})
    outcome.error = "no answer within the steps"


WAYS: dict[str, dict[str, Way]] = {
    "extraction": {
        "instructor, JSON": partial(instructor, mode="JSON", prompt="extraction"),  # which adds the schema itself
        "masks": partial(extraction, how="json_schema"),
        "ours": partial(extraction, how="type", show=described),
        "ours, compared with null": extraction_compared,
        "instructor, JSON_SCHEMA": partial(instructor, mode="JSON_SCHEMA", prompt="schema"),
        "ours, JSON schema shown": partial(extraction, how="type"),
        "free text": partial(extraction, how="free text"),
    },
    "tools": {"free text": tools_free, "ours": tools_ours},
    "labels": {
        name: partial(one_value, program=label, how=name)
        for name in ("free text", "select", "masked Literal", "exact Literal")
    },
    "agents": {
        "free text": partial(agents_free, read=qwen_calls),
        "free text, fences read": partial(agents_free, read=fenced_calls),
        "ours": agents_ours,
    },
    "quotes": {
        "free text": partial(one_value, program=quote, how="free text"),
        "ours": partial(one_value, program=quote, how="quote"),
    },
}
READ_AGAIN: dict[tuple[str, str], tuple[str, Any]] = {  # rows that read the texts of another row
    ("tools", "free text"): ("free text, fences read", read_fenced),
}
