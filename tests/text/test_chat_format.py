"""Conversations: messages to prompts, and answers read back."""

import pytest

from sglang_lite.constraints.matching import matches
from sglang_lite.protocol import ParameterError, Regex, TemplateError
from sglang_lite.text.chat_format import ChatFormat, Conversation, Tool
from sglang_lite.text.chat_template import JinjaTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ thinking }}{% endif %}{# <think></think> #}"
)
CONTROL = ["<|im_start|>", "<|im_end|>", "<|im_e"]
CITY = Tool(
    "weather",
    "Weather",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)


def format_of(source=CHATML, family="qwen", reasoning=None):
    return ChatFormat(JinjaTemplate(source), CONTROL, family, reasoning)


def say(text, **options):
    return Conversation([{"role": "user", "content": text}], **options)


def test_only_the_template_writes_control_tokens():
    prompt = format_of().render(say("a<|im_end|>b<|im_eX\ue0000\ue001")).prompt
    assert (
        prompt.text
        == "<|im_start|>user\na<|im_end|>b<|im_eX\ue0000\ue001<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = [span.text for span in prompt.spans if not span.special]
    assert plain == ["<|im_end|>", "<|im_e", "\ue000", "\ue001"]


def test_variables_of_the_template_write_none_either():
    prompt = (
        format_of()
        .render(say("a", variables={"a field": {"thinking": "<|im_start|>\ue0000\ue001"}}))
        .prompt
    )
    assert "<|im_start|>" in [span.text for span in prompt.spans if not span.special]


@pytest.mark.parametrize(("thinking", "reasoning"), [
    ("", "qwen3"), ("<think>\n", "deepseek-r1"), ("<think>\n\n</think>\n\n", None),
])  # fmt: skip
def test_reasoning_is_as_the_template_has_left_it(thinking, reasoning):
    source = CHATML.replace("{{ thinking }}", thinking)
    rendered = ChatFormat(JinjaTemplate(source), CONTROL, None, None).render(say("a"))
    assert rendered.reasoning == reasoning


def test_reasoning_and_a_constraint_both_hold():
    rendered = format_of(reasoning="qwen3").render(say("a", answer=Regex("[0-9]{2}")))
    for text, allowed in (
        ("<think>hm</think>\n\n42", True), ("42", True), ("<think>hm</think>\n\nxy", False), ("<think>42", False),
    ):  # fmt: skip
        assert matches(rendered.constraint, text) is allowed
    reader = rendered.new_answer_reader()
    pieces = [reader.push(text) for text in ("<thi", "nk>hm</think>", "\n\n42")] + [reader.flush()]
    assert ("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)) == (
        "hm",
        "42",
    )


def test_calls_are_held_to_their_schema_and_read_back():
    rendered = format_of(reasoning=None).render(say("a", tools=[CITY], tool_choice="required"))
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    assert matches(rendered.constraint, text)
    assert not matches(rendered.constraint, text.replace("Rom", '", "x": 1'))
    assert not matches(rendered.constraint, "Rom")
    reader = rendered.new_answer_reader()
    pieces = [reader.push(text), reader.flush()]
    calls = [call for piece in pieces for call in piece.calls]
    assert calls[0].name == "weather"
    assert "".join(call.arguments for call in calls) == '{"city": "Rom"}'
    assert not reader.open


def test_a_call_or_a_schema_where_both_are_asked_for():
    rendered = format_of(reasoning=None).render(say("a", tools=[CITY], answer=Regex("[0-9]")))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    assert [matches(rendered.constraint, text) for text in (call, "4", "x")] == [True, True, False]


def test_a_template_without_tools_is_told_of_them_in_the_first_message():
    text = format_of().render(say("a", tools=[CITY])).prompt.text
    assert text.startswith("<|im_start|>system\n")
    assert '"city"' in text
    assert "<tool_call>" in text


def test_a_choice_changes_what_may_be_written_and_not_the_prompt():
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    auto = format_of(reasoning=None).render(say("a", tools=[CITY]))
    none = format_of(reasoning=None).render(say("a", tools=[CITY], tool_choice="none"))
    assert none.prompt == auto.prompt
    assert [matches(none.constraint, text) for text in ("Rain.", call, f"So: {call}")] == [
        True,
        False,
        False,
    ]
    assert none.family is None
    digit = say("a", tools=[CITY], tool_choice="none", answer=Regex("[0-9]"))
    constraint = format_of(reasoning=None).render(digit).constraint
    assert [matches(constraint, text) for text in ("4", "Rain.")] == [True, False]


def test_calls_of_the_past_are_written_where_a_template_has_no_place_for_them():
    call = {
        "type": "function",
        "id": "1",
        "function": {"name": "weather", "arguments": {"city": "Rom"}},
    }
    messages: list = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert '"city": "Rom"' in format_of().render(Conversation([*messages, messages[0]])).prompt.text


def test_a_message_is_continued_where_it_ends():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    rendered = format_of().render(Conversation(messages, continue_final=True))
    assert rendered.prompt.text.endswith("<|im_start|>assistant\nb c")
    assert rendered.reasoning is None


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ParameterError, match="same name"):
        format_of().render(say("a", tools=[CITY, CITY]))


SHOWING_TOOLS = CHATML.replace("{% for", "{% if tools %}{{ TOOLS }}\n{% endif %}{% for", 1).replace(
    "{{ m.content }}",
    "{{ m.content }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}",
)


@pytest.mark.parametrize(
    "options", ["", "indent=4", "separators=(',', ':')", "sort_keys=true", "ensure_ascii=true"]
)
def test_a_prompt_with_tools_is_that_of_transformers(options):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = SHOWING_TOOLS.replace("TOOLS", f"tools | tojson({options})")
    tool = Tool("weather", 'In <|im_end|> "é\x7f😀\ue000"\n', CITY.parameters)
    call = {
        "type": "function",
        "id": "1",
        "function": {"name": "weather", "arguments": {"city": "<|im_start|>ö"}},
    }
    messages: list[dict] = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "21<|im_end|>"},
    ]  # fmt: skip
    prompt = format_of(source).render(Conversation(messages, [tool])).prompt
    (theirs,), _ = render_jinja_template(
        [messages], tools=[tool.shown], chat_template=source, add_generation_prompt=True
    )
    if "ascii" in options:  # hidden from the template, so nothing escapes it
        theirs = theirs.replace("\\ue000", "\ue000")
    assert prompt.text == theirs
    assert [span.text for span in prompt.spans if not span.special] == [
        "<|im_end|>", "\ue000", "<|im_start|>", "<|im_end|>",
    ]  # fmt: skip


DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% for call in m.tool_calls %}"
    "{{ '<call>' + call.function.name + '<sep>' + call.function.arguments + '</call>' }}{% endfor %}{% endif %}"
    "{% if m.role == 'tool' %}{{ '<output>' + m.content + '</output>' }}{% endif %}{% endfor %}"
    "{% if refused %}{{ raise_exception('refused') }}{% endif %}"
)


def test_a_template_that_adds_arguments_to_text_is_given_them_as_text():
    arguments = {"city": "<|im_end|>ö", "days": [1, None]}
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": arguments}}
    messages: list[dict] = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "21"},
    ]  # fmt: skip
    prompt = format_of(DEEPSEEK).render(Conversation(messages)).prompt
    written = '<call>weather<sep>{"city": "<|im_end|>ö", "days": [1, null]}</call>'
    assert prompt.text == f"<User>a{written}<output>21</output>"
    assert [span.text for span in prompt.spans if not span.special] == ["<|im_end|>"]
    with pytest.raises(TemplateError, match="refused"):
        format_of(DEEPSEEK).render(Conversation(messages, variables={"a field": {"refused": True}}))
