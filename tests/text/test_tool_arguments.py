"""Arguments of calls that are written between tags."""

import json
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_lite as sgl
from sglang_lite.constraints import memo
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import JsonSchema
from sglang_lite.text.tool_calls import (
    ToolParser,
    WrittenCall,
    call_text,
    calls_constraint,
    parse_answer,
)
from sglang_lite.text.tool_formats import FORMATS
from tests.counts import some
from tests.text.test_tool_calls import NOTED, SEND, SENDING, TAGGED, mutated, tool, written


def strings(without):
    """Strings without a mark that ends them."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
        lambda s: not without or without not in s
    )


def mark_of(family):
    """Text that no string can contain, or "" if any can be written."""
    form = FORMATS[family].arguments
    return form.mark if family in TAGGED else form.quote.removeprefix('"')


@st.composite
def sent(draw, mark):
    text = strings(mark)
    size = st.fixed_dictionaries(
        {"unit": text}, optional={"n": st.floats(-1e3, 1e3).map(lambda x: round(x, 2))}
    )
    either = st.one_of(text.filter(lambda s: not is_json(s)), st.integers(-9, 9), st.none())
    either_or_list = st.one_of(
        text.filter(lambda s: not is_json(s) and s.lstrip()[:1] not in ("[", "{")),
        st.lists(st.integers()),
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
        "some": either_or_list,
    }
    given = {
        name: draw(value)
        for name, value in known.items()
        if name in ("text", "kind") or draw(st.booleans())
    }
    if "size" in given and "of" in given["size"]:  # in the schema's order
        given["size"] = {
            key: given["size"][key] for key in ("unit", "of", "n") if key in given["size"]
        }
    return given


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("family", TAGGED + NOTED)
@settings(max_examples=some(12, 60), deadline=None)
@given(data=st.data())
def test_arguments_are_read_as_they_were_written(family, data):
    """Arguments, whole and in pieces, have the types that they had."""
    mark = mark_of(family)
    calls = data.draw(st.lists(sent(mark), min_size=1, max_size=2))
    text = written(family, "", *(("send", each) for each in calls))
    answer = parse_answer(family, text, tools=SENDING)
    assert (answer.content, answer.complete) == ("", True)
    assert [same(json.loads(call.arguments)) for call in answer.calls] == [
        same(each) for each in calls
    ]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert in_pieces(family, text, [0, *cuts, len(text)]) == list(answer.calls)


def same(value):
    """With its types; an empty value that may be a string is one in a format that does not tell
    them apart.
    """
    return {
        key: "" if key == "some" and each in ("", []) else (type(each), each)
        for key, each in value.items()
    }


def in_pieces(family, text, cuts):
    parser = ToolParser(family, tools=SENDING)
    pieces = [parser.push(text[a:b]) for a, b in pairwise(cuts)] + [parser.flush()]
    found = []
    for call in (call for piece in pieces for call in piece.calls):
        assert call.index in (len(found) - 1, len(found))
        if call.index == len(found):
            found.append(WrittenCall(call.name, ""))
        found[-1] = WrittenCall(found[-1].name, found[-1].arguments + call.arguments)
    return found


@pytest.fixture(params=[False, True], ids=["", "in a hurry"])
def hurried(request, monkeypatch):
    """There may be no time to look for lexemes: all are cut into characters then."""
    if request.param:
        monkeypatch.setattr("sglang_lite.constraints.emit.lexemes.MAX_WORK", 0)
    memo.clear()
    yield
    memo.clear()


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("family", TAGGED)
def test_arguments_that_were_written_are_allowed(family):
    constraint = calls_constraint(family, SENDING, "required")
    good = {
        "text": 'Tabs\t, lines\n and <b>"tags"</b> & \\ {',
        "kind": "b c",
        "tags": ["x", ""],
        "either": None,
    }
    assert sgl.grammar.matches(constraint, written(family, "", ("send", good)))
    for wrong in (
        {"kind": "c"}, {"name": "bad"}, {"count": 100}, {"count": 1.5}, {"flag": 1}, {"tags": ["a"] * 4},
        {"size": {}}, {"more": 1}, {"ratio": "x"}, {"text": FORMATS[family].arguments.mark},
    ):  # fmt: skip
        arguments = {
            key: (good | wrong)[key] for key in (*SEND["properties"], "more") if key in good | wrong
        }
        assert not sgl.grammar.matches(constraint, written(family, "", ("send", arguments))), wrong


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", TAGGED + NOTED)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("family", TAGGED + NOTED)
def test_long_strings_may_stand_before_objects(family, choice):
    """Lexemes of such strings have more states than are looked at one by one."""
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
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "(?<=ab)"}}}, "look", "/properties/a/pattern"),
        ("minimax-m3", {"additionalProperties": {"type": "string"}}, "any name", "/additionalProperties"),
        ("minimax-m3",
         {"properties": {"a": {"type": ["array", "object"], "properties": {"item": {"type": "string"}}}}},
         "told apart", "/properties/a"),
    ],
)  # fmt: skip
def test_what_can_not_be_written_is_refused(family, schema, message, pointer):
    with pytest.raises(sgl.ConstraintError, match=re.escape(message)) as refused:
        sgl.grammar.matches(
            calls_constraint(family, {"f": json_schema({"type": "object", **schema})}), "x"
        )
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
    schema = json_schema(
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}
    )
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


@pytest.mark.parametrize("family", TAGGED + NOTED)
def test_malformed_calls_never_raise_and_arguments_stay_json(family):
    text = written(
        family, "Hm. ", ("send", {"text": "a", "kind": "b c", "tags": ["x"], "size": {"unit": "y"}})
    )
    draw = random.Random(family)
    for _ in range(some(30, 150)):
        changed = mutated(mutated(text, draw), draw)
        answer = parse_answer(family, changed, tools=SENDING)
        for call in answer.calls if answer.complete else answer.calls[:-1]:
            assert isinstance(json.loads(call.arguments), dict), changed
        assert in_pieces(family, changed, range(len(changed) + 1)) == list(answer.calls), changed


@pytest.mark.parametrize(
    "schema", ["no JSON", "[]", '{"anyOf": [' * 300 + "{}" + "]}" * 300, '{"$ref": "#"}']
)
@pytest.mark.parametrize("family", TAGGED + NOTED)
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
    assert [piece.arguments for piece in parser.push('Once "upon" a <time').calls] == [
        'Once \\"upon\\" a <time'
    ]
    assert parser.push("\n").calls == ()  # which may be the tag's
