"""Calls of tools in the formats of families of models: what is generated, and what is read back."""

import json
import random
import re
from collections import Counter
from functools import lru_cache
from itertools import pairwise

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from xgrammar.builtin_structural_tag import get_model_structural_tag

import sglang_lite as sgl
from sglang_lite.constraints import matching, memo, structural_tag
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.engine.engine import Engine
from sglang_lite.protocol import JsonSchema, SamplingParams, ValueValidationError
from sglang_lite.text.tool_arguments import arguments_text
from sglang_lite.text.tool_calls import Answer, Call, ToolParser, call_text, calls_constraint, parse_answer
from sglang_lite.text.tool_formats import FORMATS, family_of
from tests.constraints.test_generation import random_model

pytestmark = pytest.mark.slow

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
    "kimi_k3": "kimi_k3", "cohere": "cohere", "gpt-oss": "harmony",
}  # fmt: skip
TAGGED = [family for family, found in FORMATS.items() if found.arguments]
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
            "properties": {"unit": {"type": "string"}, "of": {"$ref": "#/$defs/size"}, "n": {"type": "number"}},
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


def written(family, text, *calls):
    """An answer as the format has it."""
    found = FORMATS[family]
    said = []
    for number, (name, arguments) in enumerate(calls):
        begin, middle = (part.replace("#", str(number)) for part in found.heads[0])
        said.append(f"{begin}{name}{middle}{arguments_text(found.arguments, arguments)}{found.end}")
    first, last = found.text
    before = f"{first}{text}{last}" if text or not first else ""
    return f"{before}{found.opening}{found.separator.join(said)}{found.closing}"


@pytest.mark.parametrize("family", FORMATS)
def test_text_and_calls_are_what_was_written(family):
    one, two = ("add", {"a": 1, "s": "}"}), ("now", {})
    text = written(family, "Let me see. ", one, two)
    constraint = calls_constraint(family, TOOLS)
    assert sgl.grammar.matches(constraint, text)
    calls = Call("add", '{"a": 1, "s": "}"}'), Call("now", "{}")
    assert parse_answer(family, text, tools=TOOLS) == Answer("", "Let me see. ", calls, complete=True)
    assert parse_answer(family, f"<think>hm</think>{text}", "qwen3", TOOLS) == Answer(
        "hm", "Let me see. ", calls, complete=True
    )
    assert not sgl.grammar.matches(constraint, text.replace("now", "never"))
    for wrong in ({"a": -1, "s": "}"}, {"a": 1}, {"a": "1.", "s": "}"}, {"a": 1, "s": "]"}, {"s": "}", "a": 1}):
        assert not sgl.grammar.matches(constraint, written(family, "Let me see. ", ("add", wrong), two))
    assert not sgl.grammar.matches(constraint, written(family, "Let me see. ", ("now", {"a": 1})))
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, parallel=False), text)
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, "none"), text)
    assert not sgl.grammar.matches(calls_constraint(family, TOOLS, "required"), text)
    assert sgl.grammar.matches(calls_constraint(family, TOOLS, "required"), written(family, "", one, two))
    assert call_text(family, *one) in written(family, "", one)


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
        assert [arguments[i] for i in sorted(arguments)] == [(call.name, call.arguments) for call in whole.calls]


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
    assert parse_answer("qwen", text) == Answer("", text, (), complete=True)


@pytest.mark.parametrize("family", FORMATS)
def test_what_can_be_no_call_any_more_is_text_at_once(family):
    """Else each piece that comes would be looked at with all that is held."""
    named = FORMATS[family].opening + FORMATS[family].begin.replace("#", "0") + "f"
    for more in ("f" * 300, " " * 300, "! ".ljust(300, "f")):
        assert len(ToolParser(family).push(named + more).content) > 300


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
    theirs = xgrammars(family, choice, SCHEMAS)
    calls = 0
    for text in samples(calls_constraint(family, TOOLS, choice), 30):
        if "think>" not in text and "<|channel|>commentary<|message|>" not in text:  # they leave out text before calls
            calls += '"a"' in text or "<a>" in text or "=a>" in text or ">a</" in text
            assert accepted(theirs, as_theirs(family, choice, text)), text
    assert calls
    if family not in TAGGED:
        for text in samples(structural_tag.parse(theirs)) if family != "gpt-oss" else ():
            check(parse_answer(family, text, tools=TOOLS), "auto")


@pytest.mark.parametrize("family", [family for family in TAGGED if family in XGRAMMARS])
def test_xgrammars_own_templates_allow_the_same_arguments_between_tags(family):
    """And what only they allow (other blanks) is read as a call that is valid."""
    schema = json.loads(json.dumps(SEND))
    if family == "minimax-m3":  # for which they take no pattern
        del schema["properties"]["name"]
    ours = calls_constraint(family, {"send": json_schema(schema)}, "required")
    theirs = xgrammars(family, "required", {"send": schema})
    draw = random.Random(family)
    counts = Counter()
    for text in samples(ours, 25):
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
    assert counts["both"] > 10, counts


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
    """An answer of ours with what xgrammar's templates ask for around it: the blanks that chat templates put before
    calls, the end of a prompt, and tokens that end a sequence."""
    if family == "gpt-oss":
        text = re.sub(r"(to=functions\.\w+) <", r"\1<", text)  # models write both
        return text + ("<|return|>" if "<|channel|>final" in text else "<|call|>")
    if family == "minimax-m2":
        return "\n</think>\n\n\n\n" + ("\n" if choice == "required" else "") + text
    if family.startswith("deepseekv") and family in TAGGED and choice == "required":
        return "\n\n" + text
    if family in ("deepseekv32", "deepseekv4", "deepseekv41"):
        return text
    return text.replace("<function=now>\n</", "<function=now>\n\n</") if family == "qwen3_coder" else text


def xgrammars(family, choice, schemas):
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
    made = get_model_structural_tag(XGRAMMARS[family], tools=tools, tool_choice=choice, reasoning="disabled")
    return made.model_dump_json()


@pytest.mark.parametrize(
    ("family", "reasoning"),
    [
        ("gpt-oss", "gpt-oss"),
        ("kimi_k3", "kimi_k3"),
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
    assert parse_answer("gpt-oss", text + "<|call|>", "gpt-oss") == Answer("Hm.", "", (Call("now", "{}"),), True)
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello."
    assert sgl.grammar.matches(calls_constraint("gpt-oss", TOOLS, reasoning="gpt-oss"), final)
    assert parse_answer("gpt-oss", final + "<|return|>", "gpt-oss") == Answer("Hm.", "Hello.", (), True)
    thought = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Hello.<|close|>response<|sep|><|close|>message<|sep|>"
    assert sgl.grammar.matches(calls_constraint("kimi_k3", TOOLS, reasoning="kimi_k3"), thought)
    assert parse_answer("kimi_k3", thought, "kimi_k3") == Answer("Hm.", "Hello.", (), True)


# ------------------------------------------------------------------------------------- arguments between tags


def strings(without):
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda s: without not in s)


@st.composite
def sent(draw, mark):
    text = strings(mark)
    size = st.fixed_dictionaries({"unit": text}, optional={"n": st.floats(-1e3, 1e3).map(lambda x: round(x, 2))})
    either = st.one_of(text.filter(lambda s: not is_json(s)), st.integers(-9, 9), st.none())
    some = st.one_of(
        text.filter(lambda s: not is_json(s) and s.lstrip()[:1] not in ("[", "{")), st.lists(st.integers())
    )
    known = {
        "text": text,
        "name": st.from_regex("[A-Z][a-z]{0,4}", fullmatch=True),
        "kind": st.sampled_from(["a", "b c", "é"]),
        "count": st.integers(-999, 99),
        "ratio": st.floats(-1e6, 1e6).map(lambda x: round(x, 3)),
        "flag": st.booleans(),
        "tags": st.lists(text, max_size=3),
        "size": st.one_of(size, st.builds(lambda a, b: {**a, "of": b}, size, size)),
        "either": either,
        "some": some,
    }
    given = {name: draw(value) for name, value in known.items() if name in ("text", "kind") or draw(st.booleans())}
    if "size" in given and "of" in given["size"]:  # in the schema's order
        given["size"] = {key: given["size"][key] for key in ("unit", "of", "n") if key in given["size"]}
    return given


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("family", TAGGED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_arguments_are_read_as_they_were_written(family, data):
    """Whole, and in pieces, with the types that they had."""
    mark = FORMATS[family].arguments.mark
    calls = data.draw(st.lists(sent(mark), min_size=1, max_size=2))
    text = written(family, "", *(("send", each) for each in calls))
    answer = parse_answer(family, text, tools=SENDING)
    assert (answer.content, answer.complete) == ("", True)
    assert [same(json.loads(call.arguments)) for call in answer.calls] == [same(each) for each in calls]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert in_pieces(family, text, [0, *cuts, len(text)]) == list(answer.calls)


def same(value):
    """With its types; an empty value that may be a string is one in a format that does not tell them apart."""
    return {key: "" if key == "some" and each in ("", []) else (type(each), each) for key, each in value.items()}


def in_pieces(family, text, cuts):
    parser = ToolParser(family, tools=SENDING)
    pieces = [parser.push(text[a:b]) for a, b in pairwise(cuts)] + [parser.flush()]
    found = []
    for call in (call for piece in pieces for call in piece.calls):
        assert call.index in (len(found) - 1, len(found))
        if call.index == len(found):
            found.append(Call(call.name, ""))
        found[-1] = Call(found[-1].name, found[-1].arguments + call.arguments)
    return found


@pytest.fixture(params=[False, True], ids=["", "in a hurry"])
def hurried(request, monkeypatch):
    """There may be no time to look for lexemes: all are cut into characters then."""
    if request.param:
        monkeypatch.setattr("sglang_lite.constraints.emit.lexemes.MAX_WORK", 0)
    memo.clear()
    yield
    memo.clear()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("family", TAGGED)
def test_arguments_that_were_written_are_allowed(family):
    constraint = calls_constraint(family, SENDING, "required")
    good = {"text": 'Tabs\t, lines\n and <b>"tags"</b> & \\ {', "kind": "b c", "tags": ["x", ""], "either": None}
    assert sgl.grammar.matches(constraint, written(family, "", ("send", good)))
    for wrong in (
        {"kind": "c"}, {"name": "bad"}, {"count": 100}, {"count": 1.5}, {"flag": 1}, {"tags": ["a"] * 4},
        {"size": {}}, {"more": 1}, {"ratio": "x"}, {"text": FORMATS[family].arguments.mark},
    ):  # fmt: skip
        arguments = {key: (good | wrong)[key] for key in (*SEND["properties"], "more") if key in good | wrong}
        assert not sgl.grammar.matches(constraint, written(family, "", ("send", arguments))), wrong


def tool(**properties):
    given = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"f": json_schema(given)}


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "maxLength": 3}, "a\nb", "abcd"),
        ({"type": "string", "maxLength": 2000}, "a" * 2000, "a" * 2001),
        ({"type": "string", "minLength": 2}, "ab", "a"),
        ({"type": "string", "pattern": "^x+$"}, "xx", "xy"),
        ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
        ({"const": "a b"}, "a b", "a"),
        ({"enum": ["u", 1]}, "u", "v"),
        ({"type": "string", "not": {"const": "no"}}, "yes", "no"),
        ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, "a", "ab"),
    ],
)
def test_what_a_schema_asks_of_a_bare_string_is_kept(family, schema, good, bad):
    constraint = calls_constraint(family, tool(x=schema), "required")
    assert sgl.grammar.matches(constraint, written(family, "", ("f", {"x": good})))
    assert not sgl.grammar.matches(constraint, written(family, "", ("f", {"x": bad})))


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("family", TAGGED)
def test_long_strings_may_stand_before_objects(family, choice):
    """Their lexemes have more states than are looked at one by one."""
    string = {"type": "string", "minLength": 5, "maxLength": 300}
    schema = {"type": "object", "properties": {"s": string}, "additionalProperties": False}
    constraint = calls_constraint(family, tool(x=string, y=schema, z=string), choice)
    for length, allowed in ((300, True), (301, False)):
        arguments = {"x": "a" * length, "y": {"s": "b" * length}, "z": "c\n" * (length // 2)}
        assert sgl.grammar.matches(constraint, written(family, "", ("f", arguments))) == allowed


@pytest.mark.parametrize(
    ("family", "schema", "message", "pointer"),
    [
        *((family, {"properties": {"a<b": {"type": "null"}}}, "'a<b' can't stand", "/properties/a<b")
          for family in TAGGED),
        *((family, {"properties": {"a": {"const": f"x{FORMATS[family].arguments.mark}"}}, "required": ["a"]},
           "no string is possible without", "/properties/a") for family in TAGGED),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "look", "/properties/a/pattern"),
        ("minimax-m3", {"additionalProperties": {"type": "string"}}, "any name", "/additionalProperties"),
        ("minimax-m3",
         {"properties": {"a": {"type": ["array", "object"], "properties": {"item": {"type": "string"}}}}},
         "told apart", "/properties/a"),
    ],
)  # fmt: skip
def test_what_can_not_be_written_is_refused(family, schema, message, pointer):
    with pytest.raises(sgl.ConstraintError, match=re.escape(message)) as refused:
        sgl.grammar.matches(calls_constraint(family, {"f": json_schema({"type": "object", **schema})}), "x")
    assert refused.value.pointer == pointer


@pytest.mark.parametrize("family", TAGGED)
def test_members_that_the_schema_says_nothing_of_are_not_generated_but_read(family):
    tools = {"f": json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})}
    text = written(family, "", ("f", {"a": 1, "b": "x", "c": [1, "y"], "d": "5"}))
    assert not sgl.grammar.matches(calls_constraint(family, tools, "required"), text)
    (call,) = parse_answer(family, text, tools=tools).calls
    read = json.loads(call.arguments)
    typed = FORMATS[family].arguments.types[0]
    assert read == {"a": 1, "b": "x", "c": read["c"], "d": "5" if typed else 5}
    assert read["c"] == [1, "y"]


def test_maps_are_written_where_tags_have_the_name_once():
    schema = json_schema({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1})
    constraint = calls_constraint("qwen3_coder", {"f": schema}, "required")
    assert sgl.grammar.matches(constraint, written("qwen3_coder", "", ("f", {"x": 1, "y z": 2})))
    assert not sgl.grammar.matches(constraint, written("qwen3_coder", "", ("f", {"x": "a"})))


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("qwen3_coder", "<tool_call><function=send><parameter=text>a</parameter></function></tool_call>", {"text": "a"}),
        ("qwen3_coder", "<tool_call>\n<function=send>\n<parameter=count>\n 5 \n</parameter>\n\n</function>\n\n"
         "</tool_call>", {"count": 5}),
        ("qwen3_coder", "<tool_call>\n<function=send>\n<parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>",
         {"flag": "True"}),
        ("qwen3_coder", "<tool_call>\n<function=send>\n<parameter=text>\n5\n</parameter>\n</function>\n</tool_call>",
         {"text": "5"}),
        ("qwen3_coder", "<tool_call>\n<function=send>\n<parameter=text>\nnull\n</parameter>\n</function>\n</tool_call>",
         {"text": "null"}),
        ("qwen3_coder", "<tool_call>\n<function=send>\n<parameter=either>\nnull\n</parameter>\n</function>\n</tool_call>",
         {"either": None}),
        ("qwen3_coder", "<tool_call>\n<function=send>\n<parameter=size>\n{\"unit\": \"</parameter>\"}\n</parameter>\n"
         "</function>\n</tool_call>", {"size": {"unit": "</parameter>"}}),
        ("glm47", "<tool_call>send\n<arg_key>count</arg_key>\n<arg_value>7</arg_value>\n</tool_call>", {"count": 7}),
        ("glm45", "<tool_call>send<arg_key>count</arg_key><arg_value>7</arg_value></tool_call>", {"count": 7}),
        ("deepseekv32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="send">\n\n</｜DSML｜invoke>\n'
         "</｜DSML｜function_calls>", {}),
        ("deepseekv4", '<｜DSML｜tool_calls><｜DSML｜invoke name="send"><｜DSML｜parameter name="text" string="true">1'
         '</｜DSML｜parameter><｜DSML｜parameter name="count" string="false">1</｜DSML｜parameter></｜DSML｜invoke>'
         "</｜DSML｜tool_calls>", {"text": "1", "count": 1}),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="send" index="1"<|sep|><|open|>argument key="count" '
         'type="integer"<|sep|>5<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>', {"count": 5}),
        ("minimax-m3", "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"send\">\n]<]minimax[>[<tags>\n]<]minimax[>["
         "<item>a]<]minimax[>[</item>\n]<]minimax[>[</tags>\n]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
         {"tags": ["a"]}),
        ("cohere", '<cofl:tool_calls>\n<cofl:tool_call id="0" name="send">\n<cofl:value name="size" type="dict">\n'
         '<cofl:value name="unit" type="raw">x</cofl:value>\n</cofl:value>\n</cofl:tool_call>\n</cofl:tool_calls>',
         {"size": {"unit": "x"}}),
    ],
)  # fmt: skip
def test_other_blanks_and_values_that_are_wrong_are_read(family, text, arguments):
    """As models write them that are not held to a format."""
    answer = parse_answer(family, text, tools=SENDING)
    assert (answer.content, answer.complete) == ("", True)
    assert [json.loads(call.arguments) for call in answer.calls] == [arguments]
    assert in_pieces(family, text, range(len(text) + 1)) == list(answer.calls)


@pytest.mark.parametrize("family", TAGGED)
def test_malformed_calls_never_raise_and_arguments_stay_json(family):
    text = written(family, "Hm. ", ("send", {"text": "a", "kind": "b c", "tags": ["x"], "size": {"unit": "y"}}))
    draw = random.Random(family)
    for _ in range(150):
        changed = mutated(mutated(text, draw), draw)
        answer = parse_answer(family, changed, tools=SENDING)
        for call in answer.calls if answer.complete else answer.calls[:-1]:
            assert isinstance(json.loads(call.arguments), dict), changed
        assert in_pieces(family, changed, range(len(changed) + 1)) == list(answer.calls), changed


@pytest.mark.parametrize("schema", ["no JSON", "[]", '{"anyOf": [' * 300 + "{}" + "]}" * 300, '{"$ref": "#"}'])
@pytest.mark.parametrize("family", TAGGED)
def test_schemas_that_are_not_understood_say_nothing(family, schema):
    text = call_text(family, "f", {"a": 1, "b": "x"})
    (call,) = parse_answer(family, text, tools={"f": JsonSchema(schema)}).calls
    assert json.loads(call.arguments) == {"a": 1, "b": "x"}


def test_without_a_schema_what_is_json_is_no_string():
    text = written("qwen3_coder", "", ("f", {"a": "5", "b": "x", "c": {"d": 1}, "e": "{not json"}))
    (call,) = parse_answer("qwen3_coder", text).calls
    assert json.loads(call.arguments) == {"a": 5, "b": "x", "c": {"d": 1}, "e": "{not json"}


def test_strings_are_streamed():
    parser = ToolParser("qwen3_coder", tools=SENDING)
    parser.push("<tool_call>\n<function=send>\n<parameter=text>\n")
    assert [piece.arguments for piece in parser.push('Once "upon" a <time').calls] == ['Once \\"upon\\" a <time']
    assert parser.push("\n").calls == ()  # which may be the tag's


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


@pytest.mark.parametrize("family", TAGGED)
def test_a_random_model_writes_arguments_between_tags(tiny, family):
    short = {"type": "string", "maxLength": 4}
    tools = tool(
        x=short,
        y={"type": ["array", "string"], "items": short, "maxItems": 2, "maxLength": 4},
        z={"type": "object", "properties": {"k": short}, "required": ["k"], "additionalProperties": False},
    )
    constraint = calls_constraint(family, tools, "required", parallel=False)
    called = 0
    for seed in range(8):
        generation = tiny.complete("x", SamplingParams(max_tokens=500, seed=seed), constraint)
        if generation.finish_reason == "stop":
            (call,) = parse_answer(family, generation.text, tools=tools).calls
            parse_json(tools["f"], call.arguments)
            called += 1
    assert called > 3


@pytest.mark.parametrize("family", FORMATS)
def test_a_random_model_that_is_held_to_a_format_calls_the_tools(tiny, family):
    called = 0
    for seed in range(6):
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
        ("{{- '<tool_call>\\n<function=' + name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}", "qwen3_coder"),
        ("{{- '<tool_call><function=' + name + '>' }}{{- '<parameter=' + key + '>' }}", "mimo"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm45"),
        ("'<tool_call>' + name + '<arg_key>' + k + '</arg_key>' + '<arg_value>'", "glm47"),
        ("'<minimax:tool_call>' '<invoke name=' '<parameter name='", "minimax-m2"),
        ("{%- set ns = ']<]minimax[>[' -%}", "minimax-m3"),
        ("'｜DSML｜' <{{ dsml_token }}function_calls>", "deepseekv32"),
        ("'｜DSML｜' <{{ dsml_token }}tool_calls>", "deepseekv4"),
        ("<｜DSML｜ calls>", "deepseekv41"),
        ("{{- '<|open|>' + tag -}}{{- open_tag('tools') -}}{{- open_tag('argument', attrs) -}}", "kimi_k3"),
        ("{{- '<|start|>assistant to=' }}{{- 'functions.' + name + '<|channel|>commentary ' }}", "gpt-oss"),
        ('<|START_ACTION|>[{"tool_call_id": ', "cohere_command4"),
        ("<cofl:tool_call id=...><cofl:value name=...>", "cohere"),
        ("'<function=' + name + '>' + arguments", None),
        ("<invoke name=", None),
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
