"""Calls that models write without the marks of their format: as JSON objects, alone or in a code
fence.
"""

import json
import random
import re

import pytest

from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Regex
from sglang_lite.text.chat_format import ChatFormat, Conversation, Tool
from sglang_lite.text.chat_template import JinjaTemplate
from sglang_lite.text.tool_calls import ParsedAnswer, ToolParser, WrittenCall, parse_answer
from sglang_lite.text.tool_formats import FORMATS
from tests.counts import some

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = {"weather": json_schema(CITY), "now": json_schema({"type": "object", "properties": {}})}
OSLO, ROME = (WrittenCall("weather", f'{{"city": "{city}"}}') for city in ("Oslo", "Rome"))
# As Qwen2.5-Coder-Instruct of 0.5B and 1.5B writes them.
ALONE = '{"name": "weather", "arguments": {"city": "Oslo"}}'
PRETTY = '{\n  "name": "weather",\n  "arguments": {"city": "Oslo"}\n}'
FENCED = f"```json\n{PRETTY}\n```"
DOUBLED = f"{{{ALONE}}}"
OTHER = '{"name": "weather", "arguments": {"city": "Rome"}}'


def read(text, **options):
    return parse_answer("qwen", text, tools=TOOLS, **options)


def call(*calls, content="", complete=True):
    return ParsedAnswer("", content, calls, complete)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (ALONE, call(OSLO)),
        (PRETTY, call(OSLO)),
        (FENCED, call(OSLO)),
        (f"{FENCED}\n", call(OSLO)),
        (f"\n{ALONE}", call(OSLO, content="\n")),
        (f"```\n{ALONE}\n```", call(OSLO)),
        (f"```tool_call \r\n{ALONE}\n```", call(OSLO)),
        (f"```json\n{ALONE}", call(OSLO)),
        (f"```json\n{ALONE}```", call(OSLO)),
        (f"{ALONE}\n```", call(OSLO)),  # the 1.5B has done so
        (DOUBLED, call(OSLO)),
        (f"<tools></tools>\n{DOUBLED}", call(OSLO, content="<tools></tools>\n")),
        (f"```json\n{DOUBLED}\n```\nDone.", call(OSLO, content="\nDone.")),
        (f"{DOUBLED}\n{{{OTHER}\n}}", call(OSLO, ROME)),
        (ALONE.replace(" ", ""), call(WrittenCall("weather", '{"city":"Oslo"}'))),
        ('{ "name": "now", "arguments": { } }', call(WrittenCall("now", "{ }"))),
        (f"Let me see:\n\n{FENCED}", call(OSLO, content="Let me see:\n\n")),
        (f"Here: {FENCED}", call(OSLO, content="Here: ")),
        (
            f"Let me see:\n{FENCED}\n\nThere it is.",
            call(OSLO, content="Let me see:\n\n\nThere it is."),
        ),
        (f"{ALONE} there", call(OSLO, content=" there")),
        (f"{ALONE}\n{OTHER}", call(OSLO, ROME)),
        (f"{ALONE}{OTHER}", call(OSLO, ROME)),
        (f"```json\n{ALONE}\n{OTHER}\n```", call(OSLO, ROME)),
        (f"{FENCED}\n\n```json\n{OTHER}\n```", call(OSLO, ROME)),
        (f"{FENCED}\nand\n```json\n{OTHER}\n```", call(OSLO, ROME, content="\nand\n")),
        (f"{FENCED}\n```python\nx\n```", call(OSLO, content="\n```python\nx\n```")),
        (f"{FENCED}\n<tool_call>\n{OTHER}\n</tool_call>", call(OSLO, ROME)),
        (f"<tool_call>\n{OTHER}\n</tool_call>\n{ALONE}", call(ROME, OSLO, content="\n")),
        (
            '{"name": "weather", "arguments": "{\\"city\\": \\"Os\\u006co\\"}"}',
            call(WrittenCall("weather", '{"city": "Oslo"}')),
        ),
        (
            f"```json\n{ALONE.replace('Oslo', '}')}\n```",
            call(WrittenCall("weather", '{"city": "}"}')),
        ),
        (
            f"```json\n{ALONE.replace('Oslo', '```')}\n```",
            call(WrittenCall("weather", '{"city": "```"}')),
        ),
    ],
)
def test_an_object_that_names_a_tool_is_a_call(text, answer):
    assert read(text) == answer


TEXTS = [
    '{"name": "John Doe", "age": 30}',
    '```json\n{\n  "name": "Alice",\n  "age": 30\n}\n```',
    ALONE.replace("weather", "weathers"),
    FENCED.replace("weather", "add"),
    '{"name": "weather"}',
    '```json\n{"name": "weather"}\n```',
    '{"name": "weather", "parameters": {"city": "Oslo"}}',
    '{"name": "weather", "arguments": ["city"]}',
    '{"name": "weather", "arguments": "Oslo"}',
    '{"name": "weather", "arguments": "[1]"}',
    '{"name": "weather", "arguments": 1}',
    f"Write {ALONE} to call it.",
    f"  {ALONE}",
    f'{{"tools": [{ALONE}]}}',
    f"[{ALONE}]",
    f"{{{{{ALONE}}}}}",
    f'```json\n{{\n  "tools": [\n    {ALONE}\n  ]\n}}\n```',
    f"```python\ncall = {ALONE}\n```",
    "```json\n[1, 2]\n```",
    "```python\ndef add(a, b):\n    return a + b\n```\n\nSo it is done: `add` or ``add``.",
    "`", "``", "```", "```json", "```json\n", "```json\n{", '{"name": "wea',
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_every_other_text_stays_one(text):
    assert read(text) == call(content=text)


@pytest.mark.parametrize("text", [ALONE, FENCED])
def test_without_tools_there_are_no_calls(text):
    assert parse_answer("qwen", text) == call(content=text)
    assert parse_answer("qwen", text, tools={"now": TOOLS["now"]}) == call(content=text)
    parser = ToolParser("qwen", tools=TOOLS, bare=False)
    assert parser.push(text).content + parser.flush().content == text
    for family in FORMATS.keys() - {"qwen", "cohere_command4", "gpt-oss", "kimi_k3"}:
        assert parse_answer(family, text, tools=TOOLS) == call(content=text), family


def in_pieces(text, sizes):
    """The answer as its pieces tell it, and the content as it was after each of them."""
    parser, at, pieces, said = ToolParser("qwen", tools=TOOLS), 0, [], []
    while at < len(text):
        end = at + next(sizes)
        pieces.append(parser.push(text[at:end]))
        said.append("".join(piece.content for piece in pieces))
        at = end
    pieces.append(parser.flush())
    calls: list[WrittenCall] = []
    for piece in (piece for part in pieces for piece in part.calls):
        if piece.name:
            assert piece.index == len(calls)
            calls.append(WrittenCall(piece.name, ""))
        calls[-1] = WrittenCall(calls[-1].name, calls[-1].arguments + piece.arguments)
    content = "".join(piece.content for piece in pieces)
    return ParsedAnswer("", content, tuple(calls), complete=not parser.open), said


PARTS = [
    "Let me see:", "`x` is 1.", "", " ", "```", "```python", "x = {", "}", ALONE, OTHER, PRETTY, FENCED, DOUBLED, ALONE[:-1],
    "<tool_call>", "</tool_call>", f"<tool_call>\n{OTHER}\n</tool_call>", *TEXTS,
]  # fmt: skip


def test_pieces_of_any_size_are_read_as_the_whole():
    draw = random.Random(5)
    calls = 0
    for _ in range(some(300, 5000)):
        text = draw.choice(["", "\n"]).join(draw.choices(PARTS, k=draw.randint(1, 6)))
        text = text[: draw.choice([len(text), draw.randint(0, len(text))])]
        whole = read(text)
        sizes = draw.choice([iter(lambda: 1, 0), iter(lambda: draw.choice([1, 2, 5, 20]), 0)])
        pieces, _ = in_pieces(text, sizes)
        assert pieces == whole, text
        calls += len(whole.calls)
    assert calls


def oracle(text):
    """The calls of a text whose objects are all whole, by Python's JSON decoder at the beginning of
    each line.
    """
    found, at = [], 0
    while at < len(text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            value, end = None, 0
        if (
            isinstance(value, dict)
            and value.get("name") in TOOLS
            and isinstance(value.get("arguments"), dict)
        ):
            found.append((value["name"], value["arguments"]))
            at = end
            continue
        line = text.find("\n", at)
        at = len(text) if line < 0 else line + 1
    return found


def test_calls_are_those_that_a_json_decoder_finds():
    draw = random.Random(6)
    lines = [
        "Let me see:",
        "",
        "```",
        "```json",
        "```python",
        "x = {}",
        *TEXTS[:-7],
        ALONE,
        OTHER,
        PRETTY,
        FENCED,
    ]
    lines = [line for line in lines if '"arguments": "' not in line]
    for _ in range(some(300, 5000)):
        text = "\n".join(draw.choices(lines, k=draw.randint(1, 6)))
        answer = read(text)
        assert [(each.name, json.loads(each.arguments)) for each in answer.calls] == oracle(text), (
            text
        )
        kept = re.sub(r"[\s`]|json|python|x=\{\}", "", text)
        for each in (ALONE, PRETTY, OTHER):
            assert each not in answer.content or each in "".join(TEXTS)
        assert len(re.sub(r"[\s`]|json|python|x=\{\}", "", answer.content)) <= len(kept)


def test_text_before_a_call_is_sent_and_nothing_of_the_call():
    text = f"Let me see:\n\n{FENCED}\n\nDone."
    _, said = in_pieces(text, iter(lambda: 1, 0))
    before, after = text.index("```"), len(text) - len("Done.")
    assert said[before - 1] == "Let me see:\n\n"
    assert set(said[before - 1 : after]) == {"Let me see:\n\n"}
    assert said[-1] == "Let me see:\n\n\n\nDone."


def test_a_fence_that_holds_no_call_is_sent_as_soon_as_that_is_known():
    text = '```json\n{"name": "Alice", "age": 30}\n```'
    _, said = in_pieces(text, iter(lambda: 1, 0))
    known = text.index("A")  # no tool begins so
    assert said[known - 1] == ""
    assert said[known:-3] == [text[: end + 1] for end in range(known, len(text) - 3)]


def test_an_answer_that_is_cut_short_anywhere_is_read_as_far_as_it_goes():
    text = f"Well:\n{FENCED}"
    states = []
    for end in range(len(text) + 1):
        answer = read(text[:end])
        assert OSLO.arguments.startswith("".join(each.arguments for each in answer.calls))
        assert answer.content == (text[:end] if not answer.calls else "Well:\n")
        states.append((len(answer.calls), answer.complete))
    named, begun = text.index('",\n'), text.index('{"city')
    assert set(states[: named + 1]) == {(0, True)}
    assert set(states[named + 1 : begun + 1]) == {(0, False)}
    assert set(states[begun + 1 : text.index("\n}") + 2]) == {(1, False)}
    assert set(states[text.index("\n}") + 2 :]) == {(1, True)}


def test_what_can_be_no_call_any_more_is_text_at_once():
    for begin in (
        "```",
        '{"name": "weather',
        '{"name": "weather", "arguments": ',
        "{",
        "```json\n",
    ):
        for more in ("f" * 300, " " * 300, "! ".ljust(300, "f")):
            assert len(ToolParser("qwen", tools=TOOLS).push(begin + more).content) > 290


def test_where_one_call_is_allowed_what_follows_it_is_text():
    assert read(f"{FENCED}\n{OTHER}", parallel=False) == call(OSLO, content=f"\n{OTHER}")
    marked = f"<tool_call>\n{OTHER}\n</tool_call>"
    assert read(f"{ALONE}\n{marked}", parallel=False) == call(OSLO, content=f"\n{marked}")
    assert read(f"{marked}\n{ALONE}", parallel=False) == call(ROME, content=f"\n{ALONE}")
    assert read(f"{FENCED}\n", parallel=False) == call(OSLO)


def chat(**options):
    tools = [Tool("weather", "Weather", CITY), Tool("now", "Time")]
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    chat_format = ChatFormat(JinjaTemplate(source), (), None, None)
    return chat_format.render(Conversation([{"role": "user", "content": "x"}], tools, **options))


def content_of(rendered, text):
    reader = rendered.new_answer_reader()
    return reader.push(text).content + reader.flush().content


@pytest.mark.parametrize(("options", "content"), [
    ({}, ""), ({"allowed": ["weather"]}, ""), ({"allowed": ["now"]}, FENCED), ({"tool_choice": "shown"}, FENCED),
    ({"tool_choice": "none"}, FENCED), ({"answer": Regex(r"(?s).*")}, FENCED), ({"parallel": False}, ""),
])  # fmt: skip
def test_a_conversation_says_which_objects_are_calls(options, content):
    rendered = chat(**options)
    assert content_of(rendered, FENCED) == content
    assert rendered.constraint is None or matches(rendered.constraint, FENCED)
