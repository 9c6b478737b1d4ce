"""Prompts that show a model its tools: those of transformers' chat templates, for every format of
calls.
"""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.base_backend import ALL_CONSTRAINTS, BaseBackend, Capabilities
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.backend.rendering import with_tools
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.tools import tool_schemas
from sglang_lite.protocol import CapabilityError, Generation, TemplateError, Usage
from sglang_lite.text.chat_template import JinjaTemplate
from sglang_lite.text.tool_calls import call_text
from sglang_lite.text.tool_formats import FORMATS, detect_tool_family, tool_format
from tests.constraints.test_generation import random_model
from tests.server.conftest import serving

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Shows all that a template can read of tools, calls and results. The signs reveal the format.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'tool' %}{{ m.name }} {{ m.tool_call_id }}: {% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# SIGNS #}"
)
SIGNS = {
    "qwen": '<tool_call>\n{"name": "", "arguments": ', "exaone": '<tool_call>{"name": "", "arguments": ',
    "llama3": '{"name": "", "parameters": ', "mistral": "[TOOL_CALLS] [", "mistral-nemo": "[TOOL_CALLS][",
    "mistral-v13": "[TOOL_CALLS][ARGS]", "deepseekv3": "<｜tool▁calls▁begin｜>```json",
    "deepseekv31": "<｜tool▁calls▁begin｜>", "deepseekv32": "｜DSML｜function_calls", "deepseekv4": "｜DSML｜tool_calls>",
    "deepseekv41": "｜DSML｜ calls", "kimi_k2": "<|tool_calls_section_begin|>", "kimi_k3": "<|open|>'tools''argument'",
    "qwen3_coder": "<tool_call>\n<function=<parameter=", "mimo": "<tool_call><function=<parameter=",
    "glm45": "<tool_call></arg_key>\n<arg_value>", "glm47": "<tool_call><arg_key>",
    "minimax-m2": "<minimax:tool_call><invoke name=", "minimax-m3": "]<]minimax[>[",
    "cohere_command4": '<|START_ACTION|>"tool_call_id": ', "cohere": "<cofl:tool_call<cofl:value",
    "gpt-oss": "<|channel|>commentary to=functions.", "hunyuan": "<tool_sep><arg_key>",
    "hunyuan-opensource": "<tool_sep:opensource>", "k2_horizon": "<ifm|tool_call><ifm|arg_key>",
    "iquest_q1": "<iquest_tool_call><arg_key>", "step3": "<steptml:invoke name=", "dots": "<dots_function_call>",
    "minicpm5": '<function name="<param name="', "interns1": "<|action_start|><|plugin|>",
    "apertus2509": "<|tools_prefix|>", "gigachat3": "function call<|role_sep|>", "gigachat35": "<｜GCML｜tool_calls>",
    "pythonic": "[func_name1(params_name1=params_value1", "muse": "<atem:function_calls><|eom|>", "lfm2": "<|tool_call_start|>[", "gemma4": "<|tool_call>call:",
}  # fmt: skip


class Model(BaseBackend):
    """A model with a chat template that answers from a list, and keeps what it has read."""

    capabilities = Capabilities(ALL_CONSTRAINTS)
    enforces = True

    def __init__(self, template, answers, family=None):
        super().__init__()
        self.chat_template = (
            JinjaTemplate(template, TOKENS) if isinstance(template, str) else template
        )
        self.answers, self.family, self.read = [*answers], family, []

    def tool_family(self):
        return self.family

    async def agenerate(self, prompt, params, constraint, *, stream):
        self.read.append(with_tools(prompt, self.chat_template).text)
        yield Generation(self.answers.pop(0), finish_reason="stop", usage=Usage(1, 1))


def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


def weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny, é <|end|> in {city}"


@sgl.function
def agent(s, /, system=None, **options):
    if system:
        s += sgl.system(system)
    s += sgl.user("2+3?")
    return sgl.use_tools(s, [add, weather], **options)


def message(family, number, name, arguments):
    """A call as chat APIs write it, and the id of its result."""
    id = f"functions.{name}:{number}" if family == "kimi_k2" else f"{number:09}"
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}, id


def as_messages(family, system=None, content=None):
    """The conversation of `agent` as messages of a chat API."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "2+3?"})
    calls = (
        ("add", {"a": 2, "b": 3}, "5"),
        ("weather", {"city": "Rome"}, json.dumps(weather("Rome"), ensure_ascii=False)),
    )
    for number, (name, arguments, result) in enumerate(calls):
        call, id = message(family, number, name, arguments)
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "name": name, "content": result},
        ]
    return messages


def rendered(template, messages):
    """The prompt of transformers. Some templates fail on None for no text or print it, some want
    arguments as text.
    """
    options = {
        "tools": tool_schemas([add, weather]),
        "chat_template": template,
        "add_generation_prompt": True,
        **TOKENS,
    }
    error = None
    for content in (None, ""):
        for as_text in (False, True):
            given = [
                {**each, "content": content} if each["content"] is None else each
                for each in messages
            ]
            given = [_as_text(each) if as_text else each for each in given]
            try:
                text = render_jinja_template([given], **options)[0][0]
            except Exception as failed:  # a template may raise anything
                error = error or failed
            else:
                if "None" not in text:
                    return text
    raise error


def _as_text(message):
    calls = [
        {
            **each,
            "function": {
                **each["function"],
                "arguments": json.dumps(each["function"]["arguments"]),
            },
        }
        for each in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def answers(family):
    """What the model writes: two calls, and an answer."""
    before, after = tool_format(family).final
    return [
        call_text(family, "add", {"a": 2, "b": 3}), call_text(family, "weather", {"city": "Rome"}),
        f"{before}It is 5.{after}",
    ]  # fmt: skip


@pytest.mark.parametrize("system", [None, "Be good."])
@pytest.mark.parametrize("family", FORMATS)
def test_prompts_of_every_format_are_those_of_transformers(family, system):
    template = TEMPLATE.replace("SIGNS", SIGNS[family])
    assert detect_tool_family(template) == family
    model = Model(template, answers(family), family)
    assert "It is 5." in agent.run(system, backend=model).ret_value
    whole = as_messages(family, system)
    own = len(whole) - 5
    assert model.read == [rendered(template, whole[: own + count]) for count in (1, 3, 5)]


PUBLISHED = (
    sorted(Path(os.environ["CHAT_TEMPLATES"]).glob("*.jinja"))
    if "CHAT_TEMPLATES" in os.environ
    else []
)


@pytest.mark.skipif(not PUBLISHED, reason="CHAT_TEMPLATES names no folder of chat templates")
@pytest.mark.parametrize("system", [None, "Be good."])
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_prompts_of_published_templates_are_those_of_transformers(path, system):
    template = path.read_text("utf-8")
    family = detect_tool_family(template)
    if (
        family is None
        or "tool_calls" not in template
        or "tools" not in JinjaTemplate(template, TOKENS).variables
    ):
        pytest.skip("it has no place for tools, or another format")
    whole = as_messages(family, system)
    own = len(whole) - 5
    try:
        wanted = [rendered(template, whole[: own + count]) for count in (1, 3, 5)]
    except Exception as error:  # a template may raise anything
        pytest.skip(f"transformers can't render it: {error}")
    model = Model(template, answers(family), family)
    try:
        agent.run(system, backend=model).text()
    except TemplateError as error:
        pytest.skip(f"the template can't write this conversation turn by turn: {error}")
    assert model.read == wanted
    assert not any("None" in read for read in model.read)


def test_several_calls_of_a_turn_have_a_result_each():
    family = "qwen"
    both = "\n".join(answers(family)[:2])
    model = Model(TEMPLATE.replace("SIGNS", SIGNS[family]), [both, "Done."], family)
    agent.run(backend=model, parallel_tool_calls=True)
    calls = [
        message(family, *each)[0]
        for each in ((0, "add", {"a": 2, "b": 3}), (1, "weather", {"city": "Rome"}))
    ]
    results = [m for m in as_messages(family) if m["role"] == "tool"]
    wanted = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
    ]
    assert model.read[1] == rendered(model.chat_template.source, wanted)


def test_text_of_a_turn_is_continued_and_a_forced_tool_is_shown_among_all():
    model = Model(TEMPLATE.replace("SIGNS", SIGNS["qwen"]), answers("qwen")[:1], "qwen")

    @sgl.function
    def program(s):
        s += "Before. " + sgl.user("2+3?")
        s += sgl.assistant("I add: " + sgl.gen("call", tools=[add, weather], tool_choice=add))

    assert program.run(backend=model)["call"].run() == 5
    shown = rendered(model.chat_template.source, [{"role": "user", "content": "2+3?"}])
    assert model.read == [f"Before. {shown}I add: "]


def test_a_model_whose_format_is_not_known_reads_of_tools_in_the_first_message():
    call = json.dumps({"tool": "add", "arguments": {"a": 2, "b": 3}})
    for template in (TEMPLATE, get_chat_template("chatml"), get_chat_template("gemma-it")):
        model = Model(template, [call, json.dumps({"answer": "5"})])
        assert agent.run(backend=model).ret_value == "5"
        first, second = model.read
        for schema in tool_schemas([add, weather]):
            assert json.dumps(schema, ensure_ascii=False) in first
        assert 'To call one, write {"tool": "NAME", "arguments": {"ARGUMENT": "VALUE"}}.' in first
        assert f"{call}" in second
        assert "Result of add: 5" in second


def test_without_turns_or_tools_the_prompt_is_the_text():
    model = Model(TEMPLATE.replace("SIGNS", SIGNS["qwen"]), [*answers("qwen")[:1], "x"], "qwen")

    @sgl.function
    def program(s):
        s += "2+3: " + sgl.gen("call", tools=[add, weather])
        s += sgl.user("And?") + sgl.assistant(sgl.gen("x"))

    program.run(backend=model).text()
    assert model.read == ["2+3: ", f"2+3: {answers('qwen')[0]}<|user|>And?<|end|>\n<|assistant|>"]


def test_text_between_turns_is_refused_where_tools_are_shown():
    @sgl.function
    def program(s):
        s += sgl.user("a") + "between" + sgl.user("b") + sgl.assistant(sgl.gen("x", tools=[add]))

    model = Model(TEMPLATE.replace("SIGNS", SIGNS["qwen"]), ["x"], "qwen")
    with pytest.raises(
        CapabilityError, match="would not see the text between the turns: 'between'"
    ):
        program.run(backend=model).text()


def test_text_of_users_and_tools_never_becomes_special_tokens():
    def lookup(key: str) -> str:
        """Looks up <|im_end|>."""
        return "<|im_end|>"

    @sgl.function
    def program(s):
        s += sgl.user("x<|im_end|>y")
        return sgl.use_tools(s, [lookup])

    spans = []

    class Reads(Model):
        async def agenerate(self, prompt, params, constraint, *, stream):
            spans.append(with_tools(prompt, self.chat_template, ["<|im_end|>"]).spans)
            async for event in super().agenerate(prompt, params, constraint, stream=stream):
                yield event

    template = TEMPLATE.replace("<|end|>", "<|im_end|>").replace("SIGNS", SIGNS["qwen"])
    program.run(
        backend=Reads(template, [call_text("qwen", "lookup", {"key": "<|im_end|>"}), "ok"], "qwen")
    )
    plain = [span.text for span in spans[1] if not span.special]
    # in the docstring, the question, the arguments and the result
    assert plain == ["<|im_end|>"] * 4


def test_texts_of_the_model_keep_their_tokens():
    @sgl.function
    def program(s):
        for name in ("first", "second"):
            s += sgl.user("2+3?")
            s += sgl.assistant(sgl.gen(name, tools=[add], tool_choice="required", max_tokens=300))

    spans = []

    class Reads(LocalBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            spans.append(
                with_tools(
                    prompt, self.get_chat_template(), self.engine.tokenizer.control_texts
                ).spans
            )
            async for event in super().agenerate(prompt, params, constraint, stream=stream):
                yield event

    call = '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    template = TEMPLATE.replace("SIGNS", SIGNS["qwen"]).replace(
        "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]",
        f"{call}</tool_call>",
    )
    with Engine.of(replace(random_model(), context_length=8192), chat_template=template) as engine:
        state = program.run(backend=Reads(engine), seed=5, temperature=0.3)
        text = state.raw("first")
        state.sync()  # the second is asked for
    kept = [span for span in spans[1] if span.ids is not None]
    assert [span.text for span in kept] == [text]
    assert "".join(span.text for span in spans[1]).count(text) == 1


@contextlib.contextmanager
def closing_endpoint(url):
    endpoint = sgl.RuntimeEndpoint(url)
    try:
        yield endpoint
    finally:
        endpoint.shutdown()


def test_an_engine_shows_tools_in_whatever_way_the_program_is_run():
    template = TEMPLATE.replace("SIGNS", SIGNS["qwen"])

    @sgl.function
    def program(s):
        s += sgl.user("2+3?")
        s += sgl.assistant(sgl.gen("call", tools=[add], tool_choice="required", max_tokens=300))
        s += sgl.user("So?") + sgl.assistant(sgl.gen("x", max_tokens=3))

    with Engine.of(replace(random_model(), context_length=8192), chat_template=template) as engine:
        usages, texts = set(), set()
        for push_down, stream in ((True, False), (False, False), (True, True)):
            state = program.run(
                backend=engine, seed=5, temperature=0.3, push_down=push_down, stream=stream
            )
            # to the end of the body, which a stream does not wait for
            texts.add("".join(state.text_iter()))
            usages.add(state.usage("call").prompt_tokens)
        with serving(engine) as url, closing_endpoint(url) as endpoint:
            state = program.run(backend=endpoint, seed=5, temperature=0.3)
            usages.add(state.usage("call").prompt_tokens)
            texts.add(state.text())
        messages, schemas = [{"role": "user", "content": "2+3?"}], tool_schemas([add])
        shown = render_jinja_template(
            [messages], schemas, chat_template=template, add_generation_prompt=True
        )[0][0]
        assert usages == {len(engine.tokenizer.encode(shown))}
        assert len(texts) == 1


def test_a_rerun_keeps_a_call_unless_its_tools_have_changed():
    def in_other_words(a: int, b: int = 1) -> int:
        """Adds, in other words."""
        return a + b

    in_other_words.__name__ = "add"
    tools = [add]

    @sgl.function
    def program(s):
        s += sgl.user("2+3?") + sgl.assistant(sgl.gen("call", tools=tools))
        s += sgl.user("And?") + sgl.assistant(sgl.gen("x"))

    call = answers("qwen")[0]
    model = Model(TEMPLATE.replace("SIGNS", SIGNS["qwen"]), [call, "x1", "x2", call, "x3"], "qwen")
    state = program.run(backend=model).rerun("x")
    assert (state["x"], len(model.read)) == ("x2", 3)
    tools[0] = in_other_words
    state = state.rerun("x")
    assert (state["x"], len(model.read)) == ("x3", 5)
    assert "in other words" in model.read[3]


def test_a_trace_says_nothing_of_cached_text_that_no_prompt_had():
    @sgl.function
    def program(s):
        s += sgl.user("2+3?" * 20) + sgl.assistant(
            sgl.gen("call", tools=[add], tool_choice=add, max_tokens=300)
        )

    template = TEMPLATE.replace("SIGNS", SIGNS["qwen"])
    with Engine.of(replace(random_model(), context_length=8192), chat_template=template) as engine:
        for _ in range(2):
            state = program.run(backend=engine, seed=5, temperature=0.3)
            assert state.usage("call").prompt_tokens > 0
    assert not any(node.cached for node in state.trace().nodes if node.kind == "text")


def test_a_template_that_drops_the_systems_turn_shows_tools_in_the_first_message():
    template = (
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    model = Model(template, [json.dumps({"answer": "5"})])
    agent.run(backend=model)
    assert '"name": "weather"' in model.read[0]


def test_a_turn_without_any_text_before_it_has_tools_too():
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    model = Model(template, [json.dumps({"answer": "5"})])
    sgl.function(lambda s: s.__iadd__(sgl.assistant(sgl.gen("a", tools=[add])))).run(
        backend=model
    ).text()
    assert '"name": "add"' in model.read[0]
