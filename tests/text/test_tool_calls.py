"""Calls of tools in the formats of families of models: what is generated, and what is read back."""

import json
import random
from functools import lru_cache

import pytest
import xgrammar
from xgrammar.builtin_structural_tag import get_model_structural_tag

import sglang_lite as sgl
from sglang_lite.constraints import structural_tag
from sglang_lite.constraints.sampling import sample
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.engine import Engine
from sglang_lite.text.tool_calls import FORMATS, Answer, Call, ToolParser, calls_constraint, family_of, parse_answer
from tests.constraints.test_generation import random_model

SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0},
            "s": {"enum": ["}", '"', "</think>", "<tool_call>", "é"]},
        },
        "required": ["a", "s"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = {name: json_schema(schema) for name, schema in SCHEMAS.items()}
XGRAMMARS = {
    "qwen": "qwen_3", "exaone": "exaone", "llama3": "llama", "deepseekv3": "deepseek_r1",
    "deepseekv31": "deepseek_v3_1", "kimi_k2": "kimi",
}  # fmt: skip


def samples(constraint, count=12):
    return [sample(constraint, random.Random(seed)) for seed in range(count)]


def check(answer, choice, *, parallel=True):
    """The calls of a complete answer are what the tools take."""
    assert answer.complete
    for call in answer.calls:
        parse_json(TOOLS[call.name], call.arguments)
    if choice == "none":
        assert answer.calls == ()
    if choice == "required":
        assert answer.calls != ()
        assert answer.content == ""
    assert parallel or len(answer.calls) <= 1


@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek-r1"])
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize("family", FORMATS)
def test_what_the_constraint_allows_is_read_back(family, choice, reasoning):
    calls, thoughts = 0, 0
    for parallel in (True, False):
        constraint = calls_constraint(family, TOOLS, choice, reasoning=reasoning, parallel=parallel)
        for text in samples(constraint):
            answer = parse_answer(family, text, reasoning)
            check(answer, choice, parallel=parallel)
            calls += len(answer.calls)
            thoughts += bool(answer.reasoning)
            assert answer.reasoning in text
    assert bool(calls) == (choice != "none")
    assert bool(thoughts) == (reasoning is not None)


@pytest.mark.parametrize("family", FORMATS)
def test_text_and_calls_are_what_was_written(family):
    found = FORMATS[family]
    one = f'{found.begin}add{found.middle.replace("#", "0")}{{"a": 1, "s": "}}"}}{found.end}'
    two = f"{found.begin}now{found.middle.replace('#', '12')}{{}}{found.end}"
    text = f"Let me see. {found.opening}{one}{found.separator}{two}{found.closing}"
    assert sgl.grammar.matches(calls_constraint(family, TOOLS), text)
    calls = Call("add", '{"a": 1, "s": "}"}'), Call("now", "{}")
    assert parse_answer(family, text) == Answer("", "Let me see. ", calls, complete=True)
    assert parse_answer(family, f"<think>hm</think>{text}", "qwen3") == Answer(
        "hm", "Let me see. ", calls, complete=True
    )
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS), text.replace("now", "never"))
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS), text.replace('"a": 1', '"a": -1'))
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, parallel=False), text)
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, "none"), text)
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, "required"), text)
    assert sgl.grammar.matches(calls_constraint(family, TOOLS, "required"), text.removeprefix("Let me see. "))


@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek-r1"])
@pytest.mark.parametrize("family", FORMATS)
def test_pieces_of_any_size_are_read_as_the_whole(family, reasoning):
    draw = random.Random(family)
    for text in samples(calls_constraint(family, TOOLS, reasoning=reasoning), 8):
        whole = parse_answer(family, text, reasoning)
        parser, at, pieces = ToolParser(family, reasoning), 0, []
        while at < len(text):
            end = at + draw.choice([1, 1, 2, 5, 20])
            pieces.append(parser.push(text[at:end]))
            at = end
        pieces.append(parser.flush())
        assert "".join(piece.reasoning for piece in pieces) == whole.reasoning
        assert "".join(piece.content for piece in pieces) == whole.content
        arguments = {}
        for call in (call for piece in pieces for call in piece.calls):
            name, written = arguments.get(call.index, ("", ""))
            arguments[call.index] = name + call.name, written + call.arguments
        assert [arguments[i] for i in sorted(arguments)] == [(call.name, call.arguments) for call in whole.calls]


@pytest.mark.parametrize("family", FORMATS)
def test_an_answer_that_is_cut_short_anywhere_is_read_as_far_as_it_goes(family):
    found = FORMATS[family]
    call = f'{found.begin}add{found.middle.replace("#", "0")}{{"a": 1}}'
    text = f"Well: {found.opening}{call}{found.end}{found.closing}"
    states = set()
    for end in range(len(text) + 1):
        answer = parse_answer(family, text[:end])
        states.add((len(answer.calls), answer.complete))
        assert answer.content.startswith("Well: "[:end])
        assert '{"a": 1}'.startswith("".join(call.arguments for call in answer.calls))
    assert states == {(0, True), (0, False), (1, False), (1, True)}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call> is how it is written",
        "<tool_call>\n{}</tool_call>",
        '<tool_call>\n{"name": "a b", "arguments": {}}\n</tool_call>',
        "a < b <tool <tool_cal",
        '{"name": "add", "parameters": {}}',
    ],
)
def test_what_only_looks_like_a_call_is_text(text):
    assert parse_answer("qwen", text) == Answer("", text, (), complete=True)


def test_marks_of_reasoning_are_text_behind_it():
    text = (
        '<think>a</think>\n\nb <think> <tool_call>\n{"name": "f", "arguments": {"x": "<think></think>"}}\n</tool_call>'
    )
    answer = parse_answer("qwen", text, "qwen3")
    assert (answer.reasoning, answer.content) == ("a", "b <think> ")
    assert answer.calls == (Call("f", '{"x": "<think></think>"}'),)


@pytest.mark.parametrize("family", XGRAMMARS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_xgrammars_own_templates_allow_the_same(family, choice):
    """An independent description of the formats, by the library's authors."""
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    theirs = get_model_structural_tag(XGRAMMARS[family], tools=tools, tool_choice=choice, reasoning="disabled")
    calls = 0
    for text in samples(calls_constraint(family, TOOLS, choice), 30):
        if "think>" not in text:
            calls += '"a"' in text
            assert accepted(theirs.model_dump_json(), text), text
    assert calls
    read = structural_tag.parse(theirs.model_dump_json())
    for text in samples(read):
        check(parse_answer(family, text), "auto")


@lru_cache(maxsize=16)
def compiled(tag):
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b""], stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_structural_tag(tag)


def accepted(tag, text):
    matcher = xgrammar.GrammarMatcher(compiled(tag), terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.fixture(scope="module")
def tiny():
    with Engine.of(random_model()) as engine:
        yield engine


@pytest.mark.parametrize("family", FORMATS)
def test_a_random_model_that_is_held_to_a_format_calls_the_tools(tiny, family):
    called = 0
    for seed in range(6):
        for choice, names in (("required", TOOLS), ("required", ["add"]), ("auto", TOOLS)):
            tools = {name: TOOLS[name] for name in names}
            constraint = calls_constraint(family, tools, choice, parallel=False)
            params = SamplingParams(max_tokens=200, seed=seed, temperature=1.0)
            generation = tiny.complete("x", params, constraint)
            if generation.finish_reason == "length":
                continue
            answer = parse_answer(family, generation.text)
            check(answer, choice, parallel=False)
            assert {call.name for call in answer.calls} <= {*names}
            called += len(answer.calls)
    assert called > 6


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ('{{- \'\\n<tool_call>\\n{"name": "\' }}{{ tool_call.name }}{{- \'", "arguments": \' }}', "qwen"),
        ('{{- "<tool_call>\\n{\\"name\\": \\"" ~ name ~ "\\", \\"arguments\\": " }}', "qwen"),
        ("return a json object <tool_call>\n{'name': …, \"arguments\": …}", "qwen"),
        ('\'<tool_call>{"name": "\' + name + \'", "arguments": \'', "exaone"),
        ("{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}", "llama3"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ('{{- "[TOOL_CALLS][" }}', "mistral-nemo"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral-v13"),
        (
            "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json'}}",
            "deepseekv3",
        ),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}", "deepseekv31"),
        ("<|tool_calls_section_begin|>{%- for tool_call in tool_calls %}", "kimi_k2"),
        ("'<tool_call>\\n<function=' + name", None),
        ("<tool_call>{{ name }}\n<arg_key>", None),
        ("{{ messages }}", None),
        ("", None),
        (None, None),
    ],
)
def test_a_chat_template_tells_the_family(template, family):
    assert family_of(template) == family


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", TOOLS), "tool_format: 'x' is unknown. Known: qwen"),
        (("qwen", TOOLS, "some"), "tool_choice: 'some' is not 'auto'"),
        (("qwen", {}, "required"), "tool_choice: 'required' needs tools"),
    ],
)
def test_what_is_not_known_is_refused(arguments, message):
    with pytest.raises(sgl.ParameterError, match=message):
        calls_constraint(*arguments)
    with pytest.raises(sgl.ParameterError, match="model_type: 'x' is unknown"):
        calls_constraint("qwen", TOOLS, reasoning="x")


def test_arguments_are_json():
    text = '[TOOL_CALLS]f[ARGS]{"a": ["}", {"b": "\\"}"}]}'
    (call,) = parse_answer("mistral-v13", text + " and more").calls
    assert json.loads(call.arguments) == {"a": ["}", {"b": '"}'}]}
