"""Templates whose loops remember their iterations write what plain jinja2 writes."""

import contextlib
import copy
import functools
import os
import random
import tracemalloc
from typing import Any

import pytest
from jinja2 import Environment
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang_lite.protocol import TemplateError
from sglang_lite.text import bounded_jinja, chat_template, loop_memo
from sglang_lite.text.bounded_jinja import BoundedEnvironment
from sglang_lite.text.chat_template import JinjaTemplate
from sglang_lite.text.loop_memo import ListPrefix, LoopMemo, LoopText
from sglang_lite.text.loop_reads import rewrite_loops
from sglang_lite.text.plain_bytes import UnchangedDict, write_plain

LOOP_CONTROLS = Environment(extensions=["jinja2.ext.loopcontrols"])
EXAMPLES = int(os.environ.get("SGLANG_LITE_EXAMPLES", "200"))

NEIGHBOURS = """{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<tools>{% endif %}[{{ message.content }}]
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}</tools>{% endif %}
{%- else %}{{ loop.index }} {{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.name }} {{ call.arguments | tojson }}</call>{% endfor %}
{%- endif %}
{%- endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""

LAST_QUESTION = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set text = message.content %}
{%- if message.thinking is defined and loop.index0 > ns.last %}<think>{{ message.thinking }}</think>{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}!{% endif %}{{ message.role }}: {{ text | trim }}
{%- endfor %}"""

WITHOUT_SYSTEM = """{% if messages[0].role == "system" %}{% set rest = messages[1:] %}{{ messages[0].content }}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}{% if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("order") }}
{%- endif %}{% if loop.index0 == 0 and tools %}{{ tools | tojson }}{% endif %}
{{- bos }}{{ message.role }} {{ message.content }}{% if not loop.last %} / {{ rest[loop.index0 + 1].content }}
{%- endif %}{% endfor %}"""

COUNTED = """{% set ns = namespace(images=0) %}{% for message in messages %}
{%- set ns.images = ns.images + 1 %}{{ ns.images }}{{ message.content }}{% endfor %}"""

TEMPLATES = {
    "neighbours": NEIGHBOURS,
    "last question": LAST_QUESTION,
    "without system": WITHOUT_SYSTEM,
    "counted": COUNTED,
}


def fail(message):
    raise TemplateError(message)


@functools.cache
def plain_template(source):
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = chat_template.to_json
    plain.globals["raise_exception"] = fail
    return plain.from_string(source)


def render_plainly(source, messages, **variables):
    defaults = {"tools": None, "documents": None}
    return plain_template(source).render(messages=messages, **{**defaults, **variables})


def outcome(render):
    """The text, or that there is none."""
    try:
        return render()
    except Exception:
        return None


def assert_renders_as_jinja(template, messages, **variables):
    variables = {"add_generation_prompt": False, **variables}
    given = copy.deepcopy(messages)
    text = outcome(lambda: template.render(messages, **variables))
    assert text == outcome(lambda: render_plainly(template.source, messages, **variables))
    assert messages == given


def conversation(length):
    draw = random.Random(3)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number in range(length):
        messages += [
            {"role": "user", "content": f" question {number} "},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"name": "f", "arguments": {"x": draw.random()}}],
            },
            *({"role": "tool", "content": f"result {i}"} for i in range(draw.randrange(1, 3))),
            {"role": "assistant", "content": f"answer {number}"},
        ]
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [True, False])
def test_a_growing_conversation_is_written_as_jinja_writes_it(name, system):
    template = JinjaTemplate(TEMPLATES[name])
    messages = conversation(6)[not system :]
    for length in range(1, len(messages) + 1):
        assert_renders_as_jinja(template, messages[:length])
        assert_renders_as_jinja(template, messages[:length], add_generation_prompt=True)
    for length in (3, 9, 4):  # shorter ones again
        assert_renders_as_jinja(template, messages[:length])


@pytest.mark.parametrize("name", TEMPLATES)
def test_changed_messages_and_variables_are_noticed(name):
    template = JinjaTemplate(TEMPLATES[name])
    messages = conversation(3)
    assert_renders_as_jinja(template, messages)
    for i in range(len(messages)):
        for change in ({"content": "other"}, {"role": "tool"}, {"thinking": "hm"}, {"content": 7}):
            changed = [*messages[:i], {**messages[i], **change}, *messages[i + 1 :]]
            assert_renders_as_jinja(template, changed)
    for variables in ({"bos": "<s>"}, {"enable_thinking": False}, {"tools": [{"name": "f"}]}):
        assert_renders_as_jinja(template, messages, **variables)
        assert_renders_as_jinja(template, messages)


@pytest.mark.parametrize(
    "values",
    [
        (1, True, 1.0, "1"),
        (0, False, 0.0, -0.0, "", None),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], (1,)),
        ("...", ...),
    ],
    ids=str,
)
def test_values_that_are_equal_but_written_differently(values):
    source = "{% for m in messages %}{{ m.content }} {{ x }} {{ m.content | string }}{% endfor %}"
    template = JinjaTemplate(source)
    for value in values:
        assert_renders_as_jinja(template, [{"role": "user", "content": value}], x=value)
    for value in values:
        assert_renders_as_jinja(template, [{"role": "user", "content": "x"}], x=value)
    assert_renders_as_jinja(template, [{"role": "user", "content": "x"}])  # x is undefined
    assert_renders_as_jinja(template, [{"role": "user"}])


def test_a_namespace_that_may_be_missing():
    source = (
        "{% if tools %}{% set ns = namespace(a=1) %}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% if tools %}{{ ns.a }}{% endif %}{% endfor %}"
    )
    template = JinjaTemplate(source)
    for tools in ([{}], None, [{}]):
        assert_renders_as_jinja(template, conversation(1), tools=tools)


SHAPES = {
    "an inner loop's position": "{% for m in messages %}{% for c in m.calls or [] %}{{ messages[loop.index0].content }}"
    "{% endfor %}{% endfor %}",
    "a guarded item of a neighbour": "{% for m in messages %}{% if not loop.last and messages[loop.index0 + 1].calls %}"
    "{{ messages[loop.index0 + 1]['calls'][0].x }}{% endif %}{{ m.content }}{% endfor %}",
    "an index that is set": "{% for m in messages %}{% set i = 1 %}{{ messages[i]['content'][0] }}{% endfor %}",
    "a call in an index": "{% set y = cycler(0, 1) %}{% for m in messages %}{{ messages[y.next()]['content'][0] }}"
    "{% endfor %}",
    "a block that reads its own name": "{% for m in messages %}{% set bos %}{{ bos }}!{% endset %}{{ bos }}{% endfor %}",
    "a namespace that is replaced": "{% set ns = namespace(a=1) %}{% set ns = nope %}{% for m in messages %}"
    "{% if m.q %}{{ ns.a }}{% endif %}x{% endfor %}",
    "messages that are replaced": "{% set messages = nope %}{% for m in [1, 2] %}{% if not m %}{{ messages[0] }}"
    "{% endif %}x{% endfor %}",
    "a neighbour as an index": "{% for i in [0, 1] %}{% if not loop.first %}{{ messages[loop.previtem + 1].content }}"
    "{% endif %}{% endfor %}",
    "a set of the same list": "{% set rest = messages %}{% for m in rest %}{{ messages[loop.index0].content }}"
    "{{ rest[loop.index0 - 1].content }}{% endfor %}",
    "sums": "{% set loop = namespace(index='x') %}{% set loop.index = loop.index + loop.index %}{{ loop.index }}",
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_an_eager_reader_gets_wrong(name):
    template = JinjaTemplate(SHAPES[name])
    for last in ("b", "c", "b"):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "a", "calls": [{"x": 1}, {"x": 2}]},
            {"role": "user", "content": last},
        ]
        assert_renders_as_jinja(template, messages)
        assert_renders_as_jinja(template, messages, bos="<s>")
        assert_renders_as_jinja(template, [*messages, {**messages[0], "content": last}])


def test_a_message_of_the_language_looks_like_any_other():
    source = "{% for m in messages %}{{ m.write }}{{ m['write'] }}{% if m.write %}!{% endif %}{% endfor %}"
    template = JinjaTemplate(source)
    message = {"role": "user", "content": "a"}
    for _ in range(2):
        assert template.render([UnchangedDict(**message)]) == template.render([message]) == ""


def test_equal_messages_that_are_not_the_same():
    source = (
        "{% set first = messages[0] %}{% for m in messages %}"
        "{{ [m] | select('sameas', first) | list | length }}{% endfor %}"
    )
    template = JinjaTemplate(source)
    message = {"role": "user", "content": "a"}
    assert template.render([message, message]) == "11"
    assert template.render([message, dict(message)]) == "10"


def test_another_conversation_can_t_be_read_through_a_filter():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ['x'] | map('remember iteration') | list }}"
    with pytest.raises(TemplateError, match="remember iteration"):
        JinjaTemplate(source).render([{"role": "user", "content": "secret"}])


def test_sums_are_limited_whatever_loop_is():
    doubled = "{% set loop.index = loop.index + loop.index %}" * 31
    template = JinjaTemplate("{% set loop = namespace(index='x') %}" + doubled)
    with pytest.raises(TemplateError, match="limit"):
        template.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{% set b = 'x' * 9000000 %}{% for i in range(20000) %}{{ b[0] }}{% endfor %}",
        "{% set b = messages * 9000 %}{% for i in range(20000) %}{{ b[0].content }}{% endfor %}",
        "{% set b = 'x' * 9000000 %}"
        + "".join(f"{{% set b{i} = b %}}" for i in range(200))
        + "{% for i in range(200) %}"
        + "".join(f"{{{{ b{i}[0] }}}}" for i in range(200))
        + "{% endfor %}",
    ],
)
def test_large_values_are_not_written_in_each_iteration(source):
    """Each took minutes or gigabytes when all reads were written."""
    template = JinjaTemplate(source)
    tracemalloc.start()
    try:
        with contextlib.suppress(TemplateError):
            template.render([{"role": "user", "content": "a"}])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000


def test_whether_a_limit_is_reached_does_not_depend_on_what_is_remembered(monkeypatch):
    source = "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% endfor %}"
    messages = [{"role": "user", "content": "ab" * 10}] * 50
    monkeypatch.setattr(bounded_jinja, "MAX_CHARS", 1500)
    template = JinjaTemplate(source)
    first, second = (outcome(lambda: template.render(messages)) for _ in range(2))
    assert first == second


def test_known_messages_count_as_many_steps_as_new_ones(monkeypatch):
    """They cost only their output, so a long conversation grew past the limit step by step."""
    guarded = "{% if m.x %}" + "{{ messages[loop.index0 - 1] }}" * 100 + "{% endif %}"
    source = f"{{% for m in messages %}}{guarded}x{{% endfor %}}"
    messages = [{"role": "user", "content": str(number)} for number in range(100)]
    monkeypatch.setattr(bounded_jinja, "MAX_STEPS", 40_000)
    template = JinjaTemplate(source)
    texts = list[str | None]()
    for length in range(10, 101, 10):
        for each in (template, template, JinjaTemplate(source)):  # the last one remembers nothing
            texts.append(outcome(functools.partial(each.render, messages[:length])))
        assert texts[-3] == texts[-2] == texts[-1]
    assert texts[0] == "x" * 10
    assert texts[-1] is None


def test_a_message_is_written_as_bytes_once_however_many_loops_there_are(monkeypatch):
    written = []

    def note(value):
        written.append(value)
        return write_plain(value)

    template = JinjaTemplate("{% for m in messages %}{{ m.role }}{% endfor %}" * 20)
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    template.render(messages)
    monkeypatch.setattr(loop_memo, "write_plain", note)
    template.render(messages)
    assert [each for each in written if isinstance(each, dict)] == messages


def test_variables_that_many_loops_read_count_as_work(monkeypatch):
    monkeypatch.setattr(bounded_jinja, "MAX_STEPS", 100_000)
    template = JinjaTemplate("{% for m in [1] %}{{ m in documents }}{% endfor %}" * 20)
    with pytest.raises(TemplateError, match="takes more than 100,000 steps"):
        template.render([], documents=list(range(20_000)))


def test_variables_are_those_that_the_template_reads():
    source = "{% for m in messages %}{% set x = 1 %}{{ x }}{{ y }}{% endfor %}"
    assert JinjaTemplate(source).variables == {"messages", "y"}


REMEMBERED = {
    "neighbours": (NEIGHBOURS, 1),
    "the last question": (LAST_QUESTION, 1),  # its first loop sets a namespace
    "without system": (WITHOUT_SYSTEM, 1),
    "a counter": (COUNTED, 0),
    "a break": ("{% for m in messages %}{% if m.x %}{% break %}{% endif %}{% endfor %}", 0),
    "a macro": (
        "{% macro f() %}{{ x }}{% endmacro %}{% for m in messages %}{{ f() }}{% endfor %}",
        0,
    ),
    "all messages": ("{% for m in messages %}{{ messages | length }}{% endfor %}", 0),
    "a cycle": ("{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}", 0),
    "a block": ("{% for m in messages %}{% set x %}{{ m }}{% endset %}{{ x }}{% endfor %}", 0),
    "recursion": ("{% for m in messages recursive %}{{ loop(m.x) }}{% endfor %}", 0),
    "tools": ("{% for tool in tools %}{{ tool | tojson }}{% endfor %}", 1),
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_which_loops_are_remembered(name):
    source, count = REMEMBERED[name]
    assert len(rewrite_loops(LOOP_CONTROLS.parse(source))) == count


def test_a_body_that_is_remembered_is_not_executed_again():
    ran = []

    def note(text):
        ran.append(text)
        return text.upper()

    environment = BoundedEnvironment({"upper": note}, {})
    template = environment.from_string("{% for m in messages %}{{ m | upper }}{% endfor %}")
    with bounded_jinja.meter_rendering():
        assert template.render(messages=list("abcabd")) == "ABCABD"
    with bounded_jinja.meter_rendering():
        assert template.render(messages=list("abcabde")) == "ABCABDE"
    assert ran == [*"abcabde"]


def test_two_templates_of_an_environment_are_kept_apart():
    environment = BoundedEnvironment({}, {})
    sources = (
        "{% for m in x %}{{ m }}{{ y }}{% endfor %}",
        "{% for m in x %}{{ z }}{{ m }}{% endfor %}",
    )
    templates = [environment.from_string(source) for source in sources]
    for _ in range(2):
        with bounded_jinja.meter_rendering():
            assert [t.render(x="ab", y="y", z="z") for t in templates] == ["ayby", "zazb"]


def test_remembered_iterations_count_as_work(monkeypatch):
    template = JinjaTemplate("{% for m in messages %}{{ m.content * 10 }}{% endfor %}")
    messages = [{"role": "user", "content": "ab"}] * 50
    monkeypatch.setattr(bounded_jinja, "MAX_CHARS", 1000)
    assert len(template.render(messages)) == 1000
    with pytest.raises(TemplateError, match="writes more than 1,000 characters"):
        template.render([*messages, messages[0]])
    monkeypatch.setattr(bounded_jinja, "MAX_STEPS", 1000)
    with pytest.raises(TemplateError, match="takes more than 1,000 steps"):
        template.render(messages)


def test_what_is_remembered_stays_small():
    template = JinjaTemplate("{% for m in messages %}{{ m.content * 100 }}{% endfor %}")
    tracemalloc.start()
    try:
        for number in range(2000):
            template.render([{"role": "user", "content": f"{number:160}"}] * 5)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 1_000_000 < kept < 20_000_000  # of 160 MB


def test_long_texts_are_not_remembered():
    memo = LoopMemo({})
    node = ListPrefix()
    memo.add_text(node, b"", LoopText("x" * 20_000, 1, 1))
    assert not node.texts


PARTS = (
    "{{ m.role }}", "{{ m.content }}", "{{ m['x'] }}", "{{ m.calls | tojson }}", "{{ loop.index }}", "{{ loop.last }}",
    "{{ loop.first }}", "{{ loop.revindex0 }}", "{{ loop.length }}", "{{ messages[0].role }}", "{{ m == messages[-1] }}",
    "{{ messages[loop.index0 - 1].content }}", "{{ messages[loop.index0 + 1].x }}", "{{ loop.previtem.role }}",
    "{{ loop.nextitem.role }}", "{% set y = m.x %}", "{{ y }}", "{{ z }}", "{{ ns.a }}", "{% set z = 3 %}",
    "{% for c in m.calls or [] %}{{ c }}{{ loop.index }}{{ y }}{% endfor %}", "{{ messages | length }}",
    "{% for m in m.calls or [] %}{{ m }}{% endfor %}", "{% if m.x is defined %}{{ m.x + 1 }}{% endif %}",
    "{{ tools | length if tools else 0 }}", "{% for t in tools or [] if t.a %}{{ t.a }}{% endfor %}",
    "{% set ns.a = ns.a + 1 %}", "{{ m.content[0:2] }}", "{{ m.content.split('e') | join(y or '-') }}", "{{ later }}",
    "{% filter upper %}{{ m.content }}{{ z }}{% endfilter %}", "{% set block %}{{ m.x }}{% endset %}{{ block }}",
    "{{ raise_exception('no') if m.x == 9 }}", "{% if loop.index0 % 2 %}odd{% else %}even{% endif %}",
    "{{ range(m.x or 0) | list }}", "{{ 'a' ~ m.x ~ loop.index0 }}", "{% if m.x == 5 %}{% continue %}{% endif %}",
)  # fmt: skip
BEFORE = (
    "{% set ns = namespace(a=1) %}", "{% set z = 2 %}", "{% set z = messages | length %}",
    "{% if tools %}{% set y = 5 %}{% endif %}", "{% for m in messages %}{% if m.x %}{% set ns.a = m.x %}{% endif %}{% endfor %}",
)  # fmt: skip


def draw_messages(draw):
    return [
        {
            "role": draw.choice(["user", "assistant", "tool"]),
            "content": draw.choice(["eel", "tree", "see me"]),
            **(
                {"x": draw.choice([0, 1, True, 1.0, None, "1", 5, 9])}
                if draw.random() < 0.6
                else {}
            ),
            **({"calls": draw.choice([[], ["a"], [1, True]])} if draw.random() < 0.4 else {}),
        }
        for _ in range(draw.randrange(1, 6))
    ]


def test_random_templates_write_what_jinja_writes():
    draw = random.Random(20261201)
    rewritten = 0
    for _ in range(EXAMPLES):
        before = [part for part in BEFORE if draw.random() < 0.5]
        body = draw.sample(PARTS, draw.randrange(1, 6))
        loop = draw.choice(
            [
                "{% for m in messages %}%s{% endfor %}",
                "{% for m in messages[1:] %}%s{% endfor %}",
                "{% if tools %}{% for m in messages %}%s{% else %}none{% endfor %}{% endif %}",
                "{% for m in messages if m.x %}%s{% endfor %}",
            ]
        )
        source = "".join(before) + loop.replace("%s", "|".join(body)) + "{% set later = 1 %}"
        template = JinjaTemplate(source)
        rewritten += bool(rewrite_loops(LOOP_CONTROLS.parse(source)))
        for _ in range(6):
            messages = draw_messages(draw)
            for length in range(1, len(messages) + 1):
                tools = draw.choice([None, [{"a": 1}], [{"a": True}, {}]])
                assert_renders_as_jinja(template, messages[:length], tools=tools)
    assert rewritten > EXAMPLES // 4
