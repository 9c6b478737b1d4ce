"""Templates of strangers: what they do and write is bounded, and what an ordinary one does is what
Jinja does.
"""

import contextlib
import os
import random
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglang_lite.protocol import TemplateError
from sglang_lite.text import bounded_jinja, chat_template
from sglang_lite.text.chat_template import JinjaTemplate

EXAMPLES = int(os.environ.get("SGLANG_LITE_HOSTILE_FILES", "200"))
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "hi\nthere", "tags": ["a", "b"]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": [1.5, None]}}}]},
    {"role": "tool", "content": "42", "name": "f"},
]  # fmt: skip


@pytest.fixture
def few_steps(monkeypatch):
    """Limits that are reached at once."""
    monkeypatch.setattr(bounded_jinja, "MAX_STEPS", 300_000)


# Or the steps that measuring it takes, which are few here.
STEPS, TEXT, WRITES, VALUE = (
    "more than 300,000 steps",
    "makes a text of",
    "writes more than",
    "makes a value of",
)
GROWING = "{% set ns = namespace(x='aa', l=[1]) %}{% for i in range(99) %}{% set ns.x = BY %}{% endfor %}{{ ns.x }}"
LONG = "{% set s = 'a' * 9999999 %}{% set l = range(99999)|list %}{% for i in range(99999) %}DO{% endfor %}"
HOSTILE = [
    # loops
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", STEPS),
    ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", STEPS),
    ("{% for i in range(99999) if i in range(99999)|list %}{% endfor %}", STEPS),
    ("{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}", "recursion"),
    ("{% for i in [range(999)] * 99 recursive %}{% if i is iterable %}{{ loop(i) }}{% endif %}{% endfor %}" * 9, STEPS),
    ("{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}", STEPS),
    ("{% for i in range(99999) %}" + "{{ i }}" * 1000 + "{% endfor %}", STEPS),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ("{{ lipsum(n=100000) }}", "'lipsum' is undefined"),
    ("{{ range(99999)|map('string')|select('in', range(99999)|list)|list|length }}", STEPS),
    ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}", STEPS),
    ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "recursion"),
    ("{{ self.a() }}{% block a %}{{ self.a() }}{% endblock %}", "recursion"),
    ("{% macro m() %}{% for i in range(999) %}{{ caller() }}{% endfor %}{% endmacro %}"
     "{% call m() %}{% call m() %}{% call m() %}{% endcall %}{% endcall %}{% endcall %}", STEPS),
    # one large value
    ("{{ 'a' * 10 ** 10 }}", TEXT), ("{{ 10 ** 10 * 'a' }}", TEXT), ("{{ [1] * 10 ** 10 }}", VALUE),
    ("{{ (1, 2) * 10 ** 10 }}", VALUE), ("{{ 10 ** 10 ** 10 ** 10 ** 10 }}", "an integer of"),
    ("{{ 9 ** 9999999 }}", "an integer of"), ("{{ '%9999999999d' % 1 }}", "a field 9999999999 wide"),
    ("{{ '%.9999999999f' % 1 }}", "a field 9999999999 wide"), ("{{ '%*d' % (10 ** 9, 1) }}", r"a field \* wide"),
    ("{{ '%(a)s' * 3000 % {'a': 'b'} }}", "formats with a text of"), ("{{ '%(a)s' * 99 % {'a': 'b' * 999999} }}", TEXT),
    ("{{ '%9999999999s'|format(1) }}", "a field 9999999999 wide"), ("{{ '{:>9999999999}'.format(1) }}", "a field"),
    ("{{ '{:{}}'.format(1, 10 ** 10) }}", "a field"), ("{{ ('{0}' * 99999).format('a' * 9999) }}", WRITES),
    ("{{ ('{a}' * 99999).format_map({'a': 'a' * 9999}) }}", WRITES),
    *((f"{{{{ 'a'.{name}(10 ** 9) }}}}", TEXT) for name in ("center", "ljust", "rjust", "zfill")),
    ("{{ 'a\t'.expandtabs(10 ** 10) }}", TEXT), ("{{ 'a\t'.expandtabs(tabsize=10 ** 10) }}", TEXT),
    ("{{ ('a' * 999999).replace('a', 'b' * 999999) }}", TEXT), ("{{ ('a' * 999999)|replace('a', 'b' * 999999) }}", TEXT),
    ("{{ ('b' * 999).join(['a'] * 99999) }}", TEXT), ("{{ (['a'] * 99999)|join('b' * 999) }}", TEXT),
    ("{{ (['a' * 999] * 99999)|join }}", TEXT), ("{{ 'a'|center(10 ** 9) }}", TEXT), ("{{ 'a'|indent(10 ** 9) }}", TEXT),
    ("{{ ('a\n' * 99999)|indent('a' * 999) }}", TEXT), ("{{ messages|tojson(indent=10 ** 9) }}", "indents JSON"),
    ("{{ [1]|batch(10 ** 9, 0)|list }}", VALUE), ("{{ [1]|slice(10 ** 9)|list }}", VALUE),
    ("{{ 1.5|round(10 ** 9, 'ceil') }}", "rounds to"), ("{{ ('f' * 9999999)|int(0, 16) }}", "an integer of 9,999,999 digits"),
    ("{{ ([[1]] * 9)|sum(start=[]) }}", "no number"), ("{{ ['a', 'b']|sum(start='') }}", "no number"),
    ("{{ [[1], [2]]|sum }}", "unsupported operand"),
    ("{{ (1).to_bytes(10 ** 9, 'big') }}", "int.to_bytes, which is not for templates"),
    ("{{ 'a'.translate({97: 'b' * 999999}) }}", "str.translate"), ("{{ {}.fromkeys(range(99999)) }}", "fromkeys"),
    *((f"{{{{ 'a'|{name} }}}}", f"No filter named '{name}'") for name in ("pprint", "urlize", "striptags", "wordwrap")),
    # values that grow
    (GROWING.replace("BY", "ns.x ~ ns.x"), TEXT), (GROWING.replace("BY", "ns.x + ns.x"), TEXT),
    (GROWING.replace("BY", "ns.x * 9"), TEXT), (GROWING.replace("BY", "[ns.x, ns.x]"), VALUE),
    (GROWING.replace("BY", "(ns.x, ns.x)"), VALUE), (GROWING.replace("BY", "{1: ns.x, 2: ns.x}"), VALUE),
    (GROWING.replace("BY", "dict(a=ns.x, b=ns.x)"), VALUE), (GROWING.replace("BY", "namespace(a=ns.x, b=ns.x)"), VALUE),
    (GROWING.replace("BY", "ns.l.copy()").replace("ns.l.copy()", "(ns.l + ns.l) * 99999"), VALUE),
    (GROWING.replace("BY", "ns.x|map('string')|list|string"), TEXT + "|" + VALUE + "|" + STEPS),
    (GROWING.replace("BY", "ns.x|escape ~ '<' * 999999"), TEXT + "|" + STEPS),
    ("{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}", WRITES),
    ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", VALUE),
    ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", WRITES + "|" + STEPS),
    # many times over a large value
    *((LONG.replace("DO", do), STEPS) for do in (
        "{% if 'b' in s %}{% endif %}", "{% if s == s ~ 'b' %}{% endif %}", "{% if s is eq('b') %}{% endif %}", "{{ s[1:]|length }}",
        "{{ s.count('b') }}", "{{ s|upper|length }}", "{{ s.upper()|length }}", "{{ l[1:]|length }}", "{% if l == [1] %}{% endif %}",
        "{{ l|sort|length }}", "{{ l|list|length }}", "{{ l|sum }}", "{{ l.index(99998) }}", "{{ l|tojson|length }}",
        "{{ l|max }}", "{{ l|reverse|first }}", "{{ (l + l[:0])|length }}", "{{ dict(a=l)|length }}", "{{ loop.changed(l) }}",
        "{{ l|groupby('x')|length }}", "{{ l|unique|list|length }}", "{{ s|wordcount }}", "{{ s|urlencode|length }}",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("source", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_work_and_size_end_at_a_limit(few_steps, source, message):
    with pytest.raises(TemplateError, match=f"{message}|{STEPS}") as caught:
        JinjaTemplate(source).render(MESSAGES)
    assert "the model's chat template" in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + " }}", "{{ " + "[" * 500 + "]" * 500 + " }}", "{{ 1" + "+1" * 20_000 + " }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300, "{% for i in x %}" * 30 + "{% endfor %}" * 30, "{{ " + "9" * 5000 + " }}",
        "{{ 0x" + "f" * 90_000 + " // 0x" + "f" * 45_000 + " }}", "{% break %}", "{{ a.b.c(", "{#" * 9999, "a" * 200_001,
    ],
)  # fmt: skip
def test_what_can_not_be_compiled_is_an_error_of_ours(source):
    with pytest.raises(TemplateError):
        JinjaTemplate(source).render(MESSAGES)


ORDINARY = """
{%- set ns = namespace(count=0, text='', found=[]) -%}
{%- macro show(value, deep=false) -%}<{{ value if value is string else value|tojson }}{{ '!' if deep }}>{%- endmacro -%}
{{ bos_token }}{% for m in messages if m.role != 'nobody' %}{% set ns.count = ns.count + 1 %}
{{- loop.index }}/{{ loop.length }} {{ m['role'][0]|upper ~ m.role[1:] }}: {{ m.content|trim|replace('\n', ' ') }}
{%- if m.tool_calls is defined and m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ show(value, loop.first) }}{{ ', ' if not loop.last }}{% endfor %})
{%- endfor %}{{ m.tool_calls|tojson(indent=2) }}{% endif %}
{%- for tag in m.tags or [] %}[{{ tag }}]{% else %}-{% endfor %}
{%- set ns.found = ns.found + [m.role] %}{% if loop.index0 > 8 %}{% break %}{% endif %}{% endfor %}
{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list|join('; ') }}
{{ ns.found|unique|sort|join(',') }} {{ messages[-1].get('x', 'none') }} {{ messages[1:][0].content.split('\n')[-1].strip() }}
{{ '%s-%05d' % ('a', 42) }} {{ '{}:{:>4}'.format('b', 2) }} {{ messages|length * 2 // 3 }} {{ (7 % 4) ** 2 }} {{ 1.5|round(1) }}
{{ messages[0].content|e }} {{ messages[0]|items|list|length }} {{ messages[0]|dictsort }} {{ range(5)|batch(2)|list }}
{{ [3, 1, 2]|sort|reverse|list }} {{ [1, 2]|sum }} {{ ['a', 'b']|last }} {{ 'abc'|indent(2, true) }} {{ none|default('d', true) }}
{% filter upper %}block{% endfilter %} {% set text %}a{{ ns.count }}{% endset %}{{ text }} {{ {'a': [1, {'b': 2}]} }} {{ (1, 2) }}
{{ 'x' in 'xyz' and 'user' in ns.found and 3 not in [1, 2] }} {{ 1 < 2 <= 2 }} {{ missing is defined }}{{ missing }} {{ 'a,b'.split(',')|map('upper')|join }}
{{ 'tool'.startswith('to') }} {{ 'tool'.title().center(8) }} {{ namespace(a=1).a }} {{ dict(a=1, **{'b': 2}) }} {{ strings|d([])|length }}
{{ 'a\nb'|indent(width=2, first=true) }} {{ messages|join(', ', attribute='role') }} {{ range(5)|batch(linecount=2)|list }}
{{ range(5)|slice(slices=2, fill_with=0)|list }} {{ 'aa'|replace('a', 'b', count=1) }} {{ 2.57|round(precision=1, method='floor') }}
{{ 'x'|center(width=5) }}{{ 'abcdef'|truncate(length=4, killwords=true, end='.', leeway=0) }} {{ messages|sort(attribute='role')|first }}
{{ messages|groupby('role')|length }} {{ ['b', 'A']|sort(case_sensitive=true) }} {{ '7f'|int(default=0, base=16) }} {{ [{'n': 2}]|sum(attribute='n') }}
{{ ['b', 'a']|max }} {{ messages|rejectattr('role', 'in', ['user'])|list|length }} {{ 'a b'|urlencode }} {{ {'b': 1, 'a': 2}|dictsort(by='value') }}
{{ 'a,b'.split(sep=',', maxsplit=1) }} {{ messages|map(attribute='nothing', default='-')|join }} {{ messages[1]|tojson(ensure_ascii=False) }}
{% call(x) show2() %}{{ x }}{% endcall %}
""".replace(
    "{% call(x) show2() %}{{ x }}{% endcall %}",
    "{% macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}{% call(x) twice() %}<{{ x }}>{% endcall %}",
)


def test_an_ordinary_template_writes_what_jinja_writes():
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = chat_template.to_json
    expected = plain.from_string(ORDINARY).render(
        messages=MESSAGES, bos_token="<s>", add_generation_prompt=False
    )
    assert JinjaTemplate(ORDINARY, {"bos_token": "<s>"}).render(MESSAGES) == expected
    assert "4/4 Tool: 42" in expected


def test_long_conversations_and_documents_are_far_from_the_limits():
    messages = [{**MESSAGES[i % 4], "content": "word " * 200} for i in range(400)] + [
        {"role": "user", "content": "a" * 1_000_000}
    ]
    assert len(JinjaTemplate(ORDINARY.replace("> 8", "> 9999")).render(messages)) > 1_400_000


def test_random_templates_render_or_are_refused(few_steps):
    """Pieces of templates in a random order, and templates with a few characters changed."""
    pieces = [source for source, _ in HOSTILE if len(source) < 400] + ORDINARY.splitlines()
    draw = random.Random(7)
    for _ in range(EXAMPLES):
        source = list("".join(draw.sample(pieces, 2)))
        for _ in range(draw.randrange(6)):
            at = draw.randrange(len(source))
            source[at : at + draw.randrange(3)] = draw.choice(
                ["", "{{", "}}", "{%", "%}", "9", "(", "'", "|", " ** ", "loop", "ns", "[", "}"]
            )
        with contextlib.suppress(TemplateError):
            JinjaTemplate("".join(source)).render(MESSAGES)
