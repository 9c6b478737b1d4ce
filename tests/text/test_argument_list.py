"""Arguments of calls in a notation like Python's: what is read, and what is enforced."""

import ast
import json
import keyword
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Notation
from sglang_lite.text.argument_list import ArgumentListReader, argument_list_text
from sglang_lite.text.tool_calls import calls_constraint, parse_answer
from sglang_lite.text.tool_formats import FORMATS
from tests.counts import some
from tests.text.test_tool_calls import NOTED, SEND, SENDING, samples, tool, written

PYTHON, GEMMA = (
    found
    for family in ("pythonic", "gemma4")
    if isinstance(found := FORMATS[family].arguments, Notation)
)
SCHEMA = json_schema(
    {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "number"},
            "list": {"type": "array", "items": {"type": "string"}},
        },
    }
)


def read(notation, text, schema=None, size=1000):
    reader = ArgumentListReader(notation, schema)
    pending, found = "", []
    for start in range(0, len(text), size):
        pending += text[start : start + size]
        length, json_text = reader.push(pending)
        pending = pending[length:]
        found.append(json_text)
    return "".join(found), pending, reader.done


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("a='x', b=\"y\"", {"a": "x", "b": "y"}),
        ("a=True, b=False, c=None", {"a": True, "b": False, "c": None}),
        ("a=true, b=false, c=null", {"a": True, "b": False, "c": None}),
        ("a=[1, 'x', [2.5, None]], b={'k': (True, -1), \"l\": {}}",
         {"a": [1, "x", [2.5, None]], "b": {"k": [True, -1], "l": {}}}),
        ("a=[], b=(), c={},", {"a": [], "b": [], "c": {}}),
        (" a = 1 ,\n\tb = [ 1 , 2 , ] , ", {"a": 1, "b": [1, 2]}),
        ("a='it\\'s', b='\\n\\t\\\\', c='\\x41\\u00e9\\U0001F600', d='\\d\\q'",
         {"a": "it's", "b": "\n\t\\", "c": "Aé😀", "d": "\\d\\q"}),
        ("a='\\ud83d\\ude00', b='\\xzz', c='\\U00110000'", {"a": "😀", "b": "\\xzz", "c": "\\U00110000"}),
        ('a="""x\n"y" \'z\'""", b=\'\'\'\'\'\', c="", d=\'\'', {"a": "x\n\"y\" 'z'", "b": "", "c": "", "d": ""}),
        ("a='raw\nline', b='(])', c='}'", {"a": "raw\nline", "b": "(])", "c": "}"}),
        ("a=Oslo, b=New York", {"a": "Oslo", "b": "New York"}),
        ("from=1, class='x'", {"from": 1, "class": "x"}),
        ("", {}),
    ],
)  # fmt: skip
def test_pythons_notation_is_read(text, arguments):
    for size in (1, 2, 3, 1000):
        found, rest, done = read(PYTHON, text + ")", size=size)
        assert (json.loads(found), rest, done) == (arguments, ")", True)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('a:<|"|>x "y"\\n, {z}<|"|>,b:1', {"a": 'x "y"\\n, {z}', "b": 1}),
        ('a:true,b:null,c:None,d:[<|"|>x<|"|>,{k:false}]', {"a": True, "b": None, "c": None, "d": ["x", {"k": False}]}),
        ('a:{<|"|>k l<|"|>:1,m:[]},b:<|"|><|"|>', {"a": {"k l": 1, "m": []}, "b": ""}),
        ("a:Paris (France),b:2025-01-01", {"a": "Paris (France)", "b": "2025-01-01"}),
        ('"a": "x\\n", b: 2', {"a": "x\n", "b": 2}),
        ("", {}),
    ],
)  # fmt: skip
def test_gemmas_notation_is_read(text, arguments):
    for size in (1, 2, 3, 1000):
        found, rest, done = read(GEMMA, text + "}", size=size)
        assert (json.loads(found), rest, done) == (arguments, "}", True)


def test_text_without_quotes_has_the_type_that_the_schema_allows():
    for text, arguments in (
        ("s=07030, n=1_000", {"s": "07030", "n": 1000}),
        ("s=5, n=0x1F", {"s": "5", "n": 31}),
        ("s=None, n=.5", {"s": "None", "n": 0.5}),
        ("list=[1, True], n=+2.", {"list": ["1", "True"], "n": 2.0}),
        ("n=1e999, s=nan", {"n": float("inf"), "s": "nan"}),
    ):
        found, _, _ = read(PYTHON, text + ")", SCHEMA)
        assert json.loads(found.replace("true", "True")) == arguments


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        ('"x", 1)', {}, '"x", 1)'),
        ("a=1 b=2)", {"a": "1 b=2"}, ")"),
        ("a=[1 2], b=3)", {"a": ["1 2"], "b": 3}, ")"),
        ("a='x' 'y')", {"a": "x"}, "'y')"),
        ("a={'k': 1, 2})", {"a": {"k": 1}}, "2})"),
        ("a=[1)", {"a": [1]}, ")"),
        ("a=)", {"a": ""}, ")"),
        ("a=,)", {"a": ""}, ")"),
    ],
)
def test_arguments_that_are_broken_are_read_as_far_as_they_go(text, arguments, rest):
    for size in (1, 1000):
        found, left, done = read(PYTHON, text, size=size)
        assert (json.loads(found), left, done) == (arguments, rest, True)


def test_a_text_without_an_end_is_not_held_forever():
    found, rest, done = read(PYTHON, "a=" + "x" * 3000 + ")", size=7)
    assert (json.loads(found), len(rest), done) == ({"a": "x" * 1000}, 2001, True)


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=12),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)  # fmt: skip
NAMES = st.from_regex("[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)  # which Python's parser refuses as a name
)


@settings(max_examples=some(40, 300), deadline=None)
@given(
    arguments=st.dictionaries(NAMES, JSON, max_size=3), size=st.integers(1, 9), own=st.booleans()
)
def test_what_python_writes_is_read(arguments, size, own):
    """Python's own `repr`, and our spelling, which Python reads."""
    ours = argument_list_text(PYTHON, arguments)
    keywords = ast.parse(f"f({ours})", mode="eval").body.keywords
    assert {each.arg: ast.literal_eval(each.value) for each in keywords} == arguments
    text = ours if own else ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    found, rest, done = read(PYTHON, text + ")", size=size)
    assert (json.loads(found), rest, done) == (arguments, ")", True)


def test_what_is_enforced_is_python():
    for text in samples(calls_constraint("pythonic", SENDING, "required"), some(15, 60)):
        (calls,) = [ast.parse(text.strip(), mode="eval").body]
        values = [
            {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            for call in calls.elts
        ]
        answer = parse_answer("pythonic", text, tools=SENDING)
        assert [json.loads(call.arguments) for call in answer.calls] == values


@pytest.mark.parametrize("family", NOTED)
def test_types_are_enforced_in_the_notations_spelling(family):
    constraint = calls_constraint(family, SENDING, "required")
    good = {"text": 'Tabs\t, lines\n and "quotes" & \\ {', "kind": "b c", "flag": True, "tags": ["x", ""],
            "size": {"unit": "m", "of": {"unit": "n"}, "n": 1.5}, "either": None}  # fmt: skip
    text = written(family, "", ("send", good))
    assert sgl.grammar.matches(constraint, text)
    right, other = ("true", "True") if family == "gemma4" else ("True", "true")
    for each in (other, "1"):
        assert not sgl.grammar.matches(constraint, text.replace(right, each, 1))
    for wrong in (
        {"kind": "c"}, {"name": "bad"}, {"count": 100}, {"count": 1.5}, {"flag": 1}, {"tags": ["a"] * 4},
        {"size": {}}, {"more": 1}, {"ratio": "x"}, {"text": 5},
    ):  # fmt: skip
        arguments = {
            key: (good | wrong)[key] for key in (*SEND["properties"], "more") if key in good | wrong
        }
        assert not sgl.grammar.matches(constraint, written(family, "", ("send", arguments))), wrong


@pytest.mark.parametrize(
    ("family", "schema", "message", "pointer"),
    [
        *((family, {"properties": {"a b": {"type": "null"}}}, "'a b' can't be written", "/properties/a b")
          for family in NOTED),
        ("gemma4", {"properties": {"a": {"const": 'x<|"|>'}}, "required": ["a"]}, "no string is possible", "/properties/a"),
        ("gemma4", {"properties": {"a": {"type": "object", "properties": {"b c": {"type": "null"}}}}}, "'b c' can't be written",
         "/properties/a/properties/b c"),
    ],
)  # fmt: skip
def test_what_can_not_be_written_is_refused(family, schema, message, pointer):
    tools = {"f": json_schema({"type": "object", **schema})}
    with pytest.raises(sgl.ConstraintError, match=message) as refused:
        sgl.grammar.matches(calls_constraint(family, tools), "x")
    assert refused.value.pointer == pointer


@pytest.mark.parametrize("family", NOTED)
def test_members_that_the_schema_says_nothing_of_are_not_generated_but_read(family):
    tools = tool(a={"type": "integer"})
    text = written(family, "", ("f", {"a": 1, "b": "x", "c": [1, "y"], "d": "5"}))
    assert not sgl.grammar.matches(calls_constraint(family, tools, "required"), text)
    (call,) = parse_answer(family, text, tools=tools).calls
    assert json.loads(call.arguments) == {"a": 1, "b": "x", "c": [1, "y"], "d": "5"}


def test_lists_in_text_are_no_calls():
    text = "See [now](x), [now (1)], [a(b=1)], [send(it)], [1, 2] and [send"
    answer = parse_answer("pythonic", text, tools={**SENDING, "now": json_schema({})})
    assert (answer.content, answer.calls, answer.complete) == (text, (), True)
    assert not parse_answer("pythonic", f"{text}(", tools=SENDING).complete
    constraint = calls_constraint("pythonic", SENDING)
    text = text.replace("[send(it)], ", "")
    assert sgl.grammar.matches(constraint, text)
    assert not sgl.grammar.matches(constraint, f"{text}(it)]")
    assert sgl.grammar.matches(calls_constraint("pythonic", {}, "none"), "[x(1)]")


def test_marks_of_python_are_no_text():
    text = '<|python_start|>[send(text="a", kind="a")]<|python_end|>'
    answer = parse_answer("pythonic", text, tools=SENDING)
    assert (answer.content, len(answer.calls), answer.complete) == ("", 1, True)


def test_values_of_any_type_are_written():
    """Also where a schema allows anything."""
    for notation in (PYTHON, GEMMA):
        constraint = sgl.grammar.ArgumentList(json_schema({"properties": {"a": {}}}), notation)
        draw = random.Random(1)
        for value in (None, True, 1.5, "x", [None, ["y"]], {"k": {"l": False}}):
            text = argument_list_text(notation, {"a": value})
            assert sgl.grammar.matches(constraint, text), text
            found, _, _ = read(notation, text + ")}"[notation.nested], size=draw.randint(1, 4))
            assert json.loads(found) == {"a": value}


def test_a_constraint_needs_a_schema_and_a_notation():
    with pytest.raises(sgl.ConstraintError, match="`notation` a Notation"):
        sgl.grammar.ArgumentList(json_schema({}), "=")  # type: ignore[arg-type] # on purpose
    assert Notation("=").words == ("null", "false", "true")


@pytest.mark.parametrize("family", NOTED)
def test_as_many_tools_as_agents_send_are_one_constraint(family):
    """Text may precede a call without marks only if there are few tools."""
    properties = {
        name: {"type": kind}
        for name, kind in (("query", "string"), ("count", "integer"), ("deep", "boolean"))
    }
    schema = json_schema({"type": "object", "properties": properties})
    for count, before in ((20, True), (60, family != "pythonic")):
        constraint = calls_constraint(family, {f"search_{i}": schema for i in range(count)})
        call = written(family, "", ("search_11", {"query": "x", "count": 3}))
        assert sgl.grammar.matches(constraint, call)
        assert sgl.grammar.matches(constraint, f"Let me look. {call}") == before
        assert sgl.grammar.matches(constraint, "Let me [see](x).")
        assert not sgl.grammar.matches(constraint, call.replace("3", "x"))
