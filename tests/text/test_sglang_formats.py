"""SGLang's formats of tool calls: which of its names are known, and its examples of each format."""

import json

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.text.tool_calls import ToolParser, calls_constraint, parse_answer
from sglang_lite.text.tool_formats import tool_format
from tests.server.sglang.surface import read_decisions, read_surface


def test_all_but_a_few_of_sglangs_names_are_known():
    unknown = []
    for name in read_surface()["tool_call_parsers"]:
        try:
            tool_format(name)
        except sgl.ParameterError:
            unknown.append(name)
    assert unknown == list(read_decisions("tool_call_parsers"))


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "rain": {"type": "boolean"},
        "where": {"type": "object", "properties": {"city": {"type": "string"}}},
        "list": {"type": "array", "items": {}},
    },
}
TOOLS = {"weather": json_schema(WEATHER), "now": json_schema({"type": "object", "properties": {}})}


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("hunyuan", "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", "", [("now", {})]),
        ("hunyuan", "a<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
         "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n"
         "</tool_calls>", "a", [("weather", {"city": "Oslo", "days": 3}), ("now", {})]),
        ("hunyuan-opensource", "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
         "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n"
         "</tool_call:opensource>\n</tool_calls:opensource>", "", [("weather", {"city": "Oslo"})]),
        ("step3", "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"weather\">"
         '<steptml:parameter name="city">if a < b: print(a)</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
         "<｜tool_calls_end｜>", "", [("weather", {"city": "if a < b: print(a)"})]),
        ("interns1", 'Hm.<|action_start|> <|plugin|>\n{"name": "weather", "parameters": {"city": "Oslo"}}<|action_end|>',
         "Hm.", [("weather", {"city": "Oslo"})]),
        ("interns1", '<|action_start|><|plugin|>\n{\n    "name": "weather",\n    "parameters": {\n        "city": "Oslo"\n'
         "    }\n}\n<|action_end|>", "", [("weather", {"city": "Oslo"})]),
        ("apertus2509", 'a<|tools_prefix|>[{"weather": {"city": "Oslo"}}, {"now": {}}]<|tools_suffix|>b', "ab",
         [("weather", {"city": "Oslo"}), ("now", {})]),
        ("minicpm5", '<function name="weather"><param name="city">北京</param><param name="days">2</param></function>\n'
         '<function name="weather"><param name="city"><![CDATA[a\n<b> & ]]></param></function>', "",
         [("weather", {"city": "北京", "days": 2}), ("weather", {"city": "a\n<b> & "})]),
        ("minicpm5", '<function name="weather"><param name="city"><![CDATA[]]></param><param name="list"><![CDATA[["<"]]]>'
         "</param></function>", "", [("weather", {"city": "", "list": ["<"]})]),
        ("gigachat3", 'Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather", "arguments": {"city": "Oslo"}}'
         "<|message_sep|>", "Hm.", [("weather", {"city": "Oslo"})]),
        ("gigachat3", 'Hm.<|function_call|>{"name": "weather", "arguments": {"city": "Oslo"}}', "Hm.",
         [("weather", {"city": "Oslo"})]),
        ("gigachat35", '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="weather">\n<｜GCML｜parameter name="city" string="true">1'
         '</｜GCML｜parameter>\n<｜GCML｜parameter name="days" string="false">1</｜GCML｜parameter>\n</｜GCML｜invoke>\n'
         "</｜GCML｜tool_calls>", "", [("weather", {"city": "1", "days": 1})]),
        ("dots", 'ok<dots_function_call><invoke name="weather"><parameter name="where">{"city": "Oslo"}</parameter>'
         '<parameter name="days">3</parameter><parameter name="rain">true</parameter></invoke></dots_function_call>', "ok",
         [("weather", {"where": {"city": "Oslo"}, "days": 3, "rain": True})]),
        ("dots", '<dots_function_call>\n<invoke name="weather">\n<parameter name="city">\n a\n\n</parameter>\n<parameter '
         'name="list">\n["NE", 1]\n</parameter>\n</invoke>\n</dots_function_call>', "",
         [("weather", {"city": " a\n", "list": ["NE", 1]})]),
        ("iquest_q1", '<iquest_tool_call>weather\n<arg_key>city</arg_key><arg_value>  "123"\n</arg_value><arg_key>days'
         "</arg_key> <arg_value>42</arg_value><arg_key>list</arg_key><arg_value>[1, null]</arg_value></iquest_tool_call>",
         "", [("weather", {"city": '  "123"\n', "days": 42, "list": [1, None]})]),
        ("k2_horizon", "<ifm|tool_calls>\n<ifm|tool_call>weather\n<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>Seoul"
         "</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>", "", [("weather", {"city": "Seoul"})]),
        ("ling3", "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", "",
         [("weather", {"city": "Oslo"})]),
        ("poolside_v1", "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>7</arg_value>\n</tool_call>", "",
         [("weather", {"days": 7})]),
        ("spark25", "<tool_call>weather\n<arg_key>city</arg_key><arg_value>7</arg_value>\n</tool_call>", "",
         [("weather", {"city": "7"})]),
        ("pythonic", '[weather(city="San Francisco", days=3), now()]', "",
         [("weather", {"city": "San Francisco", "days": 3}), ("now", {})]),
        ("pythonic", "Sure.\n[weather(rain=True, where={'city': 'Oslo'}, list=['a', None])]", "Sure.\n",
         [("weather", {"rain": True, "where": {"city": "Oslo"}, "list": ["a", None]})]),
        ("lfm2", 'Let me check.<|tool_call_start|>[weather(city="12345")]<|tool_call_end|>', "Let me check.",
         [("weather", {"city": "12345"})]),
        ("lfm2", "<|tool_call_start|>[weather(city='ls',days=2),weather(where={\"city\": \"x\"})]<|tool_call_end|>Done.",
         "Done.", [("weather", {"city": "ls", "days": 2}), ("weather", {"where": {"city": "x"}})]),
        ("gemma4", 'a<|tool_call>call:weather{city:<|"|>Oslo, "N"<|"|>,rain:false,where:{city:<|"|>x<|"|>}}<tool_call|>'
         "<|tool_call>call:now{}<tool_call|>b", "ab",
         [("weather", {"city": 'Oslo, "N"', "rain": False, "where": {"city": "x"}}), ("now", {})]),
        ("muse", ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">a\n'
         '</atem:parameter>\n<atem:parameter name="list">[1]</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
         '<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n'
         "</atem:function_calls><|eot|>", "", [("weather", {"city": "a\n", "list": [1]}), ("now", {})]),
        ("muse", " to=user<|message|>I write to=f and to=user.<|eot|>", "I write to=f and to=user.", []),
        ("trinity", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", {})]),
    ],
)  # fmt: skip
def test_examples_are_read(family, text, content, calls):
    """As SGLang and the models' makers document them, whole and one character at a time."""
    answer = parse_answer(family, text, tools=TOOLS)
    assert (answer.content, answer.complete) == (content, True)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    parser = ToolParser(family, tools=TOOLS)
    pieces = [*map(parser.push, text), parser.flush()]
    assert "".join(piece.content for piece in pieces) == content
    read = {}
    for call in (call for piece in pieces for call in piece.calls):
        name, arguments = read.get(call.index, ("", ""))
        read[call.index] = name + call.name, arguments + call.arguments
    assert list(read.values()) == [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("a", True),
        ("<![CDATA[a\n<b]]>", True),
        ("<![CDATA[a", False),
        ("<![CDATA[abcdefg]]>", False),
    ],
)
def test_a_wrapped_string_is_held_to_its_schema(value, allowed):
    schema = {"properties": {"x": {"type": "string", "maxLength": 6}}, "required": ["x"]}
    tools = {"f": json_schema({"type": "object", **schema})}
    text = f'<function name="f"><param name="x">{value}</param></function>'
    assert sgl.grammar.matches(calls_constraint("minicpm5", tools, "required"), text) == allowed
