"""Calls of tools in the formats of families of models: what is generated, and what is read back."""

import json
import random
import re
from collections import Counter
from functools import lru_cache

import pytest
import xgrammar
from xgrammar.builtin_structural_tag import get_model_structural_tag

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints import matching, structural_tag
from sglang_lite.constraints.byte_matcher import ByteMatcher
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.protocol import Notation, SamplingParams, Tags, ValueValidationError
from sglang_lite.text.tool_arguments import arguments_text
from sglang_lite.text.tool_calls import (
    ParsedAnswer,
    ToolParser,
    WrittenCall,
    call_text,
    calls_constraint,
    parse_answer,
)
from sglang_lite.text.tool_formats import FORMATS, detect_tool_family
from tests.constraints.test_generation import random_model
from tests.counts import some

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
    "deepseekv31": "deepseek_v3_1", "kimi_k2": "kimi", "qwen3_coder": "qwen_3_coder", "mimo": "mimo",
    "glm45": "glm_4_7", "glm47": "glm_4_7", "minimax-m2": "minimax", "minimax-m3": "minimax_m3",
    "deepseekv32": "deepseek_v3_2", "deepseekv4": "deepseek_v4", "deepseekv41": "deepseek_v4_1",
    "kimi_k3": "kimi_k3", "cohere": "cohere", "gpt-oss": "harmony", "gemma4": "gemma_4",
}  # fmt: skip
TAGGED = [family for family, found in FORMATS.items() if isinstance(found.arguments, Tags)]
NOTED = [family for family, found in FORMATS.items() if isinstance(found.arguments, Notation)]
SEND = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{0,4}$"},
        "kind": {"enum": ["a", "b c", "é"]},
        "count": {"type": "integer", "maximum": 99},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "size": {"$ref": "#/$defs/size"},
        "either": {"type": ["string", "integer", "null"]},
        "some": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
    },
    "required": ["text", "kind"],
    "additionalProperties": False,
    "$defs": {
        "size": {
            "type": "object",
            "properties": {
                "unit": {"type": "string"},
                "of": {"$ref": "#/$defs/size"},
                "n": {"type": "number"},
            },
            "required": ["unit"],
            "additionalProperties": False,
        }
    },
}
SENDING = {"send": json_schema(SEND)}


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek-r1"])
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize("family", FORMATS)
def test_what_the_constraint_allows_is_read_back(family, choice, reasoning):
    calls, thoughts = 0, 0
    for parallel in (True, False):
        constraint = calls_constraint(family, TOOLS, choice, reasoning=reasoning, parallel=parallel)
        for text in samples(constraint):
            answer = parse_answer(family, text, reasoning, TOOLS)
            check(answer, choice, parallel=parallel)
            calls += len(answer.calls)
            thoughts += bool(answer.reasoning)
            assert answer.reasoning in text
    assert bool(calls) == (choice != "none")
    assert bool(thoughts) == (reasoning is not None)


def tool(**properties):
    given = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"f": json_schema(given)}


def written(family, text, *calls):
    """An answer as the format has it."""
    found = FORMATS[family]
    said = []
    for number, (name, arguments) in enumerate(calls):
        begin, middle = (
            part.replace("#", str(number)).replace("{name}", name) for part in found.heads[0]
        )
        said.append(f"{begin}{name}{middle}{arguments_text(found.arguments, arguments)}{found.end}")
    first, last = found.text
    before = f"{first}{text}{last}" if text or not first else ""
    return f"{before}{found.opening}{found.separator.join(said)}{found.closing}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FORMATS)
def test_text_and_calls_are_what_was_written(family):
    one, two = ("add", {"a": 1, "s": "}"}), ("now", {})
    text = written(family, "Let me see. ", one, two)
    constraint = calls_constraint(family, TOOLS)
    assert sgl.grammar.matches(constraint, text)
    calls = WrittenCall("add", '{"a": 1, "s": "}"}'), WrittenCall("now", "{}")
    assert parse_answer(family, text, tools=TOOLS) == ParsedAnswer(
        "", "Let me see. ", calls, complete=True
    )
    assert parse_answer(family, f"<think>hm</think>{text}", "qwen3", TOOLS) == ParsedAnswer(
        "hm", "Let me see. ", calls, complete=True
    )
    assert not sgl.grammar.matches(constraint, text.replace("now", "never"))
    for wrong in (
        {"a": -1, "s": "}"},
        {"a": 1},
        {"a": "1.", "s": "}"},
        {"a": 1, "s": "]"},
        {"s": "}", "a": 1},
    ):
        assert not sgl.grammar.matches(
            constraint, written(family, "Let me see. ", ("add", wrong), two)
        )
    assert not sgl.grammar.matches(constraint, written(family, "Let me see. ", ("now", {"a": 1})))
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, parallel=False), text)
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, "none"), text)
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, "required"), text)
    assert sgl.grammar.matches(
        calls_constraint(family, TOOLS, "required"), written(family, "", one, two)
    )
    named = calls_constraint(family, {"add": TOOLS["add"]}, "named")
    assert sgl.grammar.matches(named, written(family, "", one))
    for other in (
        written(family, "", one, one),
        written(family, "", two),
        written(family, "Let me see. ", one),
        "",
    ):
        assert not sgl.grammar.matches(named, other)
    assert call_text(family, *one) in written(family, "", one)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek-r1"])
@pytest.mark.parametrize("family", FORMATS)
def test_pieces_of_any_size_are_read_as_the_whole(family, reasoning):
    draw = random.Random(family)
    for text in samples(calls_constraint(family, TOOLS, reasoning=reasoning), 8):
        whole = parse_answer(family, text, reasoning, TOOLS)
        parser, at, pieces = ToolParser(family, reasoning, TOOLS), 0, []
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
        assert [arguments[i] for i in sorted(arguments)] == [
            (call.name, call.arguments) for call in whole.calls
        ]


@pytest.mark.parametrize("family", FORMATS)
def test_an_answer_that_is_cut_short_anywhere_is_read_as_far_as_it_goes(family):
    text = written(family, "Well: ", ("add", {"a": 1}))
    states = set()
    for end in range(len(text) + 1):
        answer = parse_answer(family, text[:end], tools=TOOLS)
        states.add((len(answer.calls), answer.complete))
        assert answer.content.startswith("Well: "[: max(0, end - len(FORMATS[family].text[0]))])
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
    assert parse_answer("qwen", text) == ParsedAnswer("", text, (), complete=True)


def test_a_call_that_does_not_end_as_it_should_keeps_its_number():
    parser = ToolParser("qwen")
    one = '<tool_call>\n{{"name": "{}", "arguments": {{"x": 1}}}}'
    pieces = parser.push(one.format("a") + " no end " + one.format("b") + "\n</tool_call>").calls
    by_number = {piece.index: "" for piece in pieces}
    for piece in pieces:
        by_number[piece.index] += piece.name + piece.arguments
    assert list(by_number.values()) == ['a{"x": 1}', 'b{"x": 1}']


@pytest.mark.parametrize("family", FORMATS)
def test_what_can_be_no_call_any_more_is_text_at_once(family):
    """Else each piece that comes would be looked at with all that is held."""
    begin = FORMATS[family].begin.replace("#", "0").replace("{name}", "f")
    named = FORMATS[family].opening + begin + "f"
    for more in ("f" * 300, " " * 300, "! ".ljust(300, "f")):
        assert len(ToolParser(family).push(named + more).content) > 300


def test_marks_of_reasoning_are_text_behind_it():
    text = '<think>a</think>\n\nb <think> <tool_call>\n{"name": "f", "arguments": {"x": "<think></think>"}}\n</tool_call>'
    answer = parse_answer("qwen", text, "qwen3")
    assert (answer.reasoning, answer.content) == ("a", "b <think> ")
    assert answer.calls == (WrittenCall("f", '{"x": "<think></think>"}'),)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", XGRAMMARS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_xgrammars_own_templates_allow_the_same(family, choice):
    """An independent description of the formats, by the library's authors."""
    theirs = xgrammars(family, choice, SCHEMAS)
    calls = 0
    for text in samples(calls_constraint(family, TOOLS, choice), 30):
        # they leave out text before calls
        if "think>" not in text and "<|channel|>commentary<|message|>" not in text:
            calls += (
                "{a:" in text or '"a"' in text or "<a>" in text or "=a>" in text or ">a</" in text
            )
            assert accepted(theirs, as_theirs(family, choice, text)), text
    assert calls
    if family not in TAGGED + NOTED:
        for text in samples(structural_tag.parse(theirs)) if family != "gpt-oss" else ():
            check(parse_answer(family, text, tools=TOOLS), "auto")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", [family for family in TAGGED + NOTED if family in XGRAMMARS])
def test_xgrammars_own_templates_allow_the_same_arguments_between_tags(family):
    """And what only they allow (other blanks) is read as a call that is valid."""
    schema = json.loads(json.dumps(SEND))
    if family == "minimax-m3":  # for which they take no pattern
        del schema["properties"]["name"]
    ours = calls_constraint(family, {"send": json_schema(schema)}, "required")
    theirs = xgrammars(family, "required", {"send": schema})
    draw = random.Random(family)
    counts = Counter()
    for text in samples(ours, some(8, 25)):
        for _ in range(6):
            changed = mutated(text, draw)
            allowed = accepted(theirs, as_theirs(family, "required", changed))
            if matching.matches(ours, changed):
                assert allowed, changed
                counts["both"] += 1
            elif allowed:
                counts["theirs"] += 1
            if allowed:
                answer = parse_answer(family, changed, tools=SENDING)
                assert answer.complete
                for call in answer.calls:
                    assert valid(call.arguments), (changed, call)
        assert accepted(theirs, as_theirs(family, "required", text)), text
    assert counts["both"] > some(1, 10), counts


def valid(arguments):
    try:
        return parse_json(SENDING["send"], arguments) is not None
    except ValueValidationError:
        return False


def mutated(text, draw):
    """With one character more, less, or another one."""
    at = draw.randrange(len(text))
    other = draw.choice(["", text[at] * 2, " ", "\n", "<", "1", "a", '"', draw.choice(text)])
    return text[:at] + other + text[at + draw.randint(0, 1) :]


def as_theirs(family, choice, text):
    """An answer of ours with what xgrammar's templates ask for around it: the blanks that chat
    templates put before calls, the end of a prompt, and tokens that end a sequence.
    """
    if family == "gpt-oss":
        text = re.sub(r"(to=functions\.\w+) <", r"\1<", text)  # models write both
        return text + ("<|return|>" if "<|channel|>final" in text else "<|call|>")
    if family == "minimax-m2":
        return "\n</think>\n\n\n\n" + ("\n" if choice == "required" else "") + text
    if family.startswith("deepseekv") and family in TAGGED and choice == "required":
        return "\n\n" + text
    if family in ("deepseekv32", "deepseekv4", "deepseekv41"):
        return text
    return (
        text.replace("<function=now>\n</", "<function=now>\n\n</")
        if family == "qwen3_coder"
        else text
    )


def xgrammars(family, choice, schemas):
    tools = [
        {"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()
    ]
    made = get_model_structural_tag(
        XGRAMMARS[family], tools=tools, tool_choice=choice, reasoning="disabled"
    )
    return made.model_dump_json()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "reasoning"),
    [
        ("gpt-oss", "gpt-oss"),
        ("kimi_k3", "kimi_k3"),
        ("muse", "muse"),
        ("cohere", "cohere_command4"),
        ("cohere_command4", "cohere_command4"),
        ("minimax-m3", "minimax-m3"),
        ("minimax-m2", "minimax"),
        ("glm45", "glm45"),
        ("mimo", "mimo"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_families_reason_in_their_own_way(family, reasoning, choice):
    constraint = calls_constraint(family, TOOLS, choice, reasoning=reasoning)
    thoughts = calls = 0
    for text in samples(constraint, 20):
        answer = parse_answer(family, text, reasoning, TOOLS)
        check(answer, choice)
        assert not any(mark in answer.content for mark in FORMATS[family].marks)
        thoughts += bool(answer.reasoning)
        calls += len(answer.calls)
    assert thoughts
    assert bool(calls) == (choice != "none")


def test_answers_as_models_that_reason_write_them():
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}"
    assert sgl.grammar.matches(calls_constraint("gpt-oss", TOOLS, reasoning="gpt-oss"), text)
    assert parse_answer("gpt-oss", text + "<|call|>", "gpt-oss") == ParsedAnswer(
        "Hm.", "", (WrittenCall("now", "{}"),), True
    )
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello."
    assert sgl.grammar.matches(calls_constraint("gpt-oss", TOOLS, reasoning="gpt-oss"), final)
    assert parse_answer("gpt-oss", final + "<|return|>", "gpt-oss") == ParsedAnswer(
        "Hm.", "Hello.", (), True
    )
    thought = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Hello.<|close|>response<|sep|><|close|>message<|sep|>"
    assert sgl.grammar.matches(calls_constraint("kimi_k3", TOOLS, reasoning="kimi_k3"), thought)
    assert parse_answer("kimi_k3", thought, "kimi_k3") == ParsedAnswer("Hm.", "Hello.", (), True)


@lru_cache(maxsize=16)
def compiled(tag):
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b""], stop_token_ids=[256])
    return xgrammar.GrammarCompiler(
        info, max_threads=1, cache_enabled=False
    ).compile_structural_tag(tag)


def accepted(tag, text):
    matcher = xgrammar.GrammarMatcher(compiled(tag), terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.fixture(scope="module")
def tiny():
    with Engine.of(random_model()) as engine:
        yield engine


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", TAGGED + NOTED)
def test_a_random_model_writes_arguments_that_are_no_json(tiny, family):
    short = {"type": "string", "maxLength": 4}
    tools = tool(
        x=short,
        y={"type": ["array", "string"], "items": short, "maxItems": 2, "maxLength": 4},
        z={
            "type": "object",
            "properties": {"k": short},
            "required": ["k"],
            "additionalProperties": False,
        },
    )
    constraint = calls_constraint(family, tools, "required", parallel=False)
    called, seeds = 0, some(4, 8)
    for seed in range(seeds):
        generation = tiny.complete("x", SamplingParams(max_tokens=500, seed=seed), constraint)
        if generation.finish_reason == "stop":
            (call,) = parse_answer(family, generation.text, tools=tools).calls
            parse_json(tools["f"], call.arguments)
            called += 1
    assert 2 * called >= seeds


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", FORMATS)
def test_a_random_model_that_is_held_to_a_format_calls_the_tools(tiny, family):
    called, seeds = 0, some(2, 6)
    for seed in range(seeds):
        for choice, names in (("required", TOOLS), ("required", ["add"]), ("auto", TOOLS)):
            tools = {name: TOOLS[name] for name in names}
            constraint = calls_constraint(family, tools, choice, parallel=False)  # type: ignore[arg-type]  # a literal
            params = SamplingParams(max_tokens=600, seed=seed, temperature=1.0)
            generation = tiny.complete("x", params, constraint)
            if generation.finish_reason == "length":
                continue
            answer = parse_answer(family, generation.text, tools=TOOLS)
            check(answer, choice, parallel=False)
            assert {call.name for call in answer.calls} <= {*names}
            called += len(answer.calls)
    assert called > seeds


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (
            '{{- \'\\n<tool_call>\\n{"name": "\' }}{{ tool_call.name }}{{- \'", "arguments": \' }}',
            "qwen",
        ),
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
        (
            "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}",
            "deepseekv31",
        ),
        ("<|tool_calls_section_begin|>{%- for tool_call in tool_calls %}", "kimi_k2"),
        (
            "{{- '<tool_call>\\n<function=' + name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}",
            "qwen3_coder",
        ),
        ("{{- '<tool_call><function=' + name + '>' }}{{- '<parameter=' + key + '>' }}", "mimo"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm45"),
        ("'<tool_call>' + name + '<arg_key>' + k + '</arg_key>' + '<arg_value>'", "glm47"),
        ("'<minimax:tool_call>' '<invoke name=' '<parameter name='", "minimax-m2"),
        ("{%- set ns = ']<]minimax[>[' -%}", "minimax-m3"),
        ("'｜DSML｜' <{{ dsml_token }}function_calls>", "deepseekv32"),
        ("'｜DSML｜' <{{ dsml_token }}tool_calls>", "deepseekv4"),
        ("<｜DSML｜ calls>", "deepseekv41"),
        (
            "{{- '<|open|>' + tag -}}{{- open_tag('tools') -}}{{- open_tag('argument', attrs) -}}",
            "kimi_k3",
        ),
        (
            "{{- '<|start|>assistant to=' }}{{- 'functions.' + name + '<|channel|>commentary ' }}",
            "gpt-oss",
        ),
        ('<|START_ACTION|>[{"tool_call_id": ', "cohere_command4"),
        ("<cofl:tool_call id=...><cofl:value name=...>", "cohere"),
        ("'<atem:function_calls>\\n<atem:invoke name=\"' '<|eom|>'", "muse"),
        ('"<|tool_call_start|>[" + (calls | join(", "))', "lfm2"),
        ("List of tools: <|tool_list_start|>", "lfm2"),
        ("'<|tool_call>call:' + function['name'] + '{'", "gemma4"),
        (
            "[func_name1(params_name1=params_value1, params_name2=params_value2, ...), ...]",
            "pythonic",
        ),
        ("HYTK = ':opensource' '<tool_call{}>' '<tool_sep{}>'.format(HYTK)", "hunyuan-opensource"),
        ("'<tool_call>' + name + '<tool_sep>\\n' '<arg_key>'", "hunyuan"),
        ("'<ifm|tool_call>' + name + '\\n<ifm|arg_key>'", "k2_horizon"),
        ("'<iquest_tool_call>' + name + '<arg_key>'", "iquest_q1"),
        ("'<｜tool_sep｜><steptml:invoke name=\"'", "step3"),
        ("<dots_function_call>\n<invoke name=", "dots"),
        (
            "content.split('<tool_sep>') '<function name=\"' + name + '\"><param name=\"'",
            "minicpm5",
        ),
        ("'<|action_start|><|plugin|>\\n'", "interns1"),
        ("{%- set tool_calls_token = '<|tools_prefix|>' -%}", "apertus2509"),
        ("role_sep=\"<|role_sep|>\\n\" 'function call'", "gigachat3"),
        ("role_sep=\"<|role_sep|>\" 'function call' '<｜GCML｜invoke name=\"'", "gigachat35"),
        ("'<|tool_call_start|>\\n```python\\n'", None),
        ("'<tool_sep' + suffix + '>'", None),
        ("'<function=' + name + '>' + arguments", None),
        ("<invoke name=", None),
        ("{{ messages }}", None),
        ("", None),
        (None, None),
    ],
)
def test_a_chat_template_tells_the_family(template, family):
    assert detect_tool_family(template) == family


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", TOOLS), "tool_format: 'x' is unknown. Known: qwen"),
        (("qwen", TOOLS, "some"), "tool_choice: 'some' is not 'auto'"),
        (("qwen", {}, "required"), "tool_choice: 'required' needs tools"),
        (("mimo", {"a b": TOOLS["now"]}), "tools: 'a b' can't be the name of a tool"),
        (("qwen", {'a"': TOOLS["now"]}), "tools: 'a\"' can't be the name of a tool"),
        (("llama3", {"f" * 257: TOOLS["now"]}), "can't be the name of a tool"),
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


def test_as_many_tools_as_agents_send_are_one_constraint():
    """Objects that are open, and mostly optional: what web interfaces and coding agents bring."""
    properties = {
        name: {"type": kind}
        for name, kind in (("query", "string"), ("count", "integer"), ("deep", "boolean"))
    }
    tools = {
        f"search_{i}": json_schema({"type": "object", "properties": properties}) for i in range(60)
    }
    walk = ByteMatcher(calls_constraint("qwen", tools))
    walk.push("Let me look.\n" + call_text("qwen", "search_41", {"query": "x", "count": 3}))
    walk.check_complete()
    with pytest.raises(sgl.ConstraintError):
        ByteMatcher(calls_constraint("qwen", tools)).push('<tool_call>\n{"name": "search_60"')
