"""Templates are rendered turn by turn, and the turns together are what the model's template writes."""

import pytest

from sglang_lite.protocol import TemplateError
from sglang_lite.text.chat_template import JinjaTemplate, load_template

CHATML_JINJA = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2_JINJA = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') "
    "+ m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ 'S:default\n' }}{% endif %}"
    "{% for m in messages %}{{ m['role'][0]|upper + ':' + m['content']|trim + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
TURNS = [("user", "hi"), ("assistant", "hello"), ("user", "bye"), ("assistant", "ciao")]


def incrementally(template, turns):
    text, history = "", []
    for role, content in turns:
        prefix, suffix = template.get_prefix_and_suffix(role, history)
        text += prefix + content + suffix
        history.append({"role": role, "content": content})
    return text


@pytest.mark.parametrize("source", [CHATML_JINJA, LLAMA2_JINJA, DEFAULT_SYSTEM])
def test_turn_by_turn_equals_the_whole(source):
    template = JinjaTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    for count in range(1, len(TURNS) + 1):
        messages = [{"role": r, "content": c} for r, c in TURNS[:count]]
        # Llama 2 shows a finished answer after a blank that it does not prompt with.
        assert incrementally(template, TURNS[:count]).replace("] ", "]") == template.render(
            messages
        ).replace("] ", "]")


def test_an_assistant_turn_starts_with_the_generation_prompt():
    thinking = CHATML_JINJA.replace("assistant\n", "assistant\n<think>\n")
    prefix, suffix = JinjaTemplate(thinking).get_prefix_and_suffix(
        "assistant", [{"role": "user", "content": ""}]
    )
    assert (prefix, suffix) == ("<|im_start|>assistant\n<think>\n", "<|im_end|>\n")


def test_the_real_model_template(engine):
    template = engine.chat_template()
    assert "helpful AI assistant named SmolLM" in template.get_prefix_and_suffix("user", [])[0]
    messages = [{"role": r, "content": c} for r, c in TURNS]
    assert incrementally(template, TURNS) == template.render(messages)


def test_a_template_that_merges_roles_says_so():
    merging = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(TemplateError, match="'system' turn as one piece"):
        JinjaTemplate(merging).get_prefix_and_suffix("system", [])


def test_a_template_that_rewrites_history_is_refused():
    rewriting = (
        "{% for m in messages %}{{ m['content'] }}{{ '!' if loop.last else '?' }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(TemplateError, match="changes earlier turns"):
        JinjaTemplate(rewriting).get_prefix_and_suffix("user", [{"role": "user", "content": "x"}])


ENDS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '<return>' if loop.last and m.role == 'assistant' else '<end>' }}{% endfor %}"
NO_SYSTEM_ALONE = (
    "{% if messages[-1].role == 'system' %}{{ raise_exception('no query') }}{% endif %}" + ENDS
)


@pytest.mark.parametrize("source", [ENDS, NO_SYSTEM_ALONE])
def test_the_end_of_a_turn_that_depends_on_the_next_is_written_with_it(source):
    template = JinjaTemplate(source + "{% if add_generation_prompt %}<assistant>{% endif %}")
    roles = ["system", "user", "assistant", "user", "assistant"]
    history = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]
    text = ""
    for i, message in enumerate(history):
        prefix, suffix = template.get_prefix_and_suffix(message["role"], history[:i])
        text += prefix
        if message["role"] == "assistant":
            assert text == template.render(history[:i], add_generation_prompt=True)
        text += message["content"] + suffix


def test_a_template_that_moves_the_systems_turn_is_refused_once_it_does():
    template = JinjaTemplate(
        "{% set system = messages[0].content %}{% for m in messages[1:] %}"
        "[{{ system ~ ' ' if loop.last and m.role == 'user' }}{{ m.content }}]{% endfor %}"
    )
    turns: list = [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]
    assert template.get_prefix_and_suffix("user", turns[:1]) == (" ", "]")
    with pytest.raises(TemplateError, match="changes earlier turns when a 'user' turn follows"):
        template.get_prefix_and_suffix("user", turns)


def test_a_broken_or_hostile_template_is_an_error():
    with pytest.raises(TemplateError, match="not valid"):
        JinjaTemplate("{% for %}")
    with pytest.raises(TemplateError, match="no system please"):
        JinjaTemplate("{{ raise_exception('no system please') }}").render(
            [{"role": "system", "content": ""}]
        )
    with pytest.raises(TemplateError, match="failed"):
        JinjaTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render([])
    with pytest.raises(TemplateError, match="the limit is"):
        JinjaTemplate("x" * 1_000_001)


def test_helpers_that_templates_use():
    source = "{{ messages[0]['content']|tojson }}{{ strftime_now('%Y')|length }}"
    assert JinjaTemplate(source).render([{"role": "user", "content": "é"}]) == '"é"4'


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Wetter für <b>Köln</b> \x7f\x01 😀",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}},
                "required": ["town"],
            },
        },
    }
]
CALL = {
    "id": "look_up:0",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"town": "Köln"}},
}
CONVERSATION: list[dict] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm?"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "name": "look_up", "tool_call_id": "look_up:0", "content": "21"},
    {"role": "assistant", "thinking": "so", "content": "Yes."},
    {"role": "user", "content": "Thanks"},
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "shown",
    [
        "{{ tools | tojson }}",
        "{{ tools | tojson(indent=4) }}",
        "{{ tools | tojson(4) }}",
        "{{ tools | tojson(separators=(',', ':')) }}",
        "{{ tools | tojson(separators=[',', ':'], sort_keys=true) }}",
        "{{ tools | tojson(ensure_ascii=true) }}",
        "{% if tools is defined %}defined{% endif %}{% if tools is not none %}{{ tools | length }}{% endif %}",
        "{% if not tools is defined %}none{% else %}{{ tools }}{% endif %}",
        "{{ documents is none }}{{ documents is defined }}",
        "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.reasoning is defined }}{% endfor %}",
        "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}\n{% endgeneration %}{{ x }}{% endfor %}",
        "{% for m in messages if m.tool_calls %}{{ m.tool_calls | map(attribute='function') | list }}{% endfor %}",
        "{% for m in messages %}\n    {{- m | tojson }}\n  {% endfor %}\n{{ bos_token }}{{ add_generation_prompt }}\n",
    ],
)
def test_texts_are_those_of_transformers(shown, tools):
    import transformers
    from transformers.utils.chat_template_utils import render_jinja_template

    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    if release < (5, 22) and ("m.thinking" in shown or "m | tojson" in shown):
        pytest.skip("older releases show reasoning under one more name")
    special = {"bos_token": "<s>"}
    (theirs,), _ = render_jinja_template(
        [CONVERSATION], tools=tools, chat_template=shown, add_generation_prompt=True, **special
    )
    given = {} if tools is None else {"tools": tools}
    assert (
        JinjaTemplate(shown, special).render(CONVERSATION, add_generation_prompt=True, **given)
        == theirs
    )


def test_json_of_a_template_has_a_limit_on_what_separates():
    with pytest.raises(TemplateError, match="more than 100 characters"):
        JinjaTemplate("{{ messages | tojson(separators=('x' * 101, ':')) }}").render(CONVERSATION)


def test_a_turn_is_found_with_few_renderings_of_the_conversation(monkeypatch):
    rendered = []
    render = JinjaTemplate.render

    def count(self, messages, **options):
        rendered.append(len(messages))
        return render(self, messages, **options)

    monkeypatch.setattr(JinjaTemplate, "render", count)
    template = load_template(CHATML_JINJA, {"bos_token": "<few>"})
    roles = ["user", "assistant"] * 20
    found = [
        template.get_prefix_and_suffix(role, [{"role": each} for each in roles[:i]])
        for i, role in enumerate(roles)
    ]
    assert found[2:4] * 19 == found[2:]
    assert len(rendered) <= 2 * len(roles)  # one for each turn, and one for each prompt to write
    again = load_template(CHATML_JINJA, {"bos_token": "<few>"})
    rendered.clear()
    again.get_prefix_and_suffix("assistant", [{"role": role} for role in roles[:-1]])
    assert rendered == []


def test_templates_with_other_texts_are_others():
    assert load_template(CHATML_JINJA, {}) is load_template(CHATML_JINJA, {})
    assert load_template(CHATML_JINJA, {}) is not load_template(CHATML_JINJA, {"bos_token": "<s>"})
    assert load_template(CHATML_JINJA + " ", {}) is not load_template(CHATML_JINJA, {})
