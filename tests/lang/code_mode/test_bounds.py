"""Programs that would cost the host time or memory, or leave the interpreter with Python's own errors:
each ends as a CodeError, soon and with a short message.
"""

import dataclasses
import datetime
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang.tools import SchemaTool


def get() -> object:
    """Anything."""
    return {"a": 1, "b": 2}


def add_up(numbers: dict[str, int]) -> int:
    """Adds up numbers."""
    return sum(numbers.values())


def run(text, **limits):
    code = sgl.CodeTools([get, add_up], **limits)
    return code.run(code.parse(text), threading.Event(), [])


def fail(text, **limits):
    with pytest.raises(sgl.CodeError) as caught:
        run(text, **limits)
    assert len(caught.value.message) < 600
    return caught.value


@pytest.mark.parametrize("owner", ["[1]", "1", "get()"])
def test_an_item_that_is_missing_is_named_only_if_it_is_short(owner):
    loop = "d = get()\nk = [d, d]\nfor i in range(40):\n    k = [k, k]\n"
    text = f"{loop}owner = [{owner}, get()]\nreturn owner[0][[get(), k][1]]"
    error = fail(text)
    assert error.kind == "TypeError"
    assert "list" in error.message


def test_the_error_of_a_long_key_is_short():
    error = fail('d = get()\nk = "a" * 4000000\nreturn d[k]')
    assert error.kind == "KeyError"
    assert "aaa" in error.message


def test_the_error_of_wrong_arguments_is_short():
    error = fail(
        'd = get()\nfor i in range(300):\n    d["k" * 1000 + str(i)] = "x"\nreturn add_up(d)'
    )
    assert error.kind == "argument"


@pytest.mark.parametrize(
    "text",
    [
        "p = get().items()\nreturn p == p",
        "return get().keys()",
        "return [get().values()]",
        "return str(get().items())",
        "return get().items() == get().items()",
        'return f"{get().keys()}"',
    ],
)
def test_views_of_a_dict_of_any_type_are_iterated_over_alone(text):
    assert fail(text).kind == "type"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("return list(get().items())", [("a", 1), ("b", 2)]),
        ("return [k for k in get().keys()]", ["a", "b"]),
        ("return sum(get().values())", 3),
        ('d = get()\nfor k in d.keys():\n    d[k + "x"] = 1\nreturn len(d)', 4),
    ],
)
def test_views_are_read_as_lists(text, value):
    assert run(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("n = 10 ** 30\nreturn '' * n", ""),
        ("n = 10 ** 30\nreturn [] * n", []),
        ('n = -(10 ** 30)\nreturn ["a"] * n', []),
        ("x = 1\nreturn f\"{f'{x}'}a\"", "1a"),
        ("x = 2\nreturn f\"{f'{x:03}':>5}\"", "  002"),
    ],
)
def test_odd_but_valid_programs_have_their_result(text, value):
    assert run(text) == value


def test_a_literal_is_as_short_as_any_number():
    error = fail(f"return str(0x{'f' * 15000})")
    assert (error.kind, error.hint) == ("syntax", "Write a smaller one.")


class Broken:
    """Object whose comparison fails."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("odd")


@dataclasses.dataclass
class Computed:
    x: int

    def __getattribute__(self, name):
        if name == "x":
            raise KeyError("computed")
        return object.__getattribute__(self, name)


class OddDate(datetime.date):
    def __str__(self) -> str:
        raise RuntimeError("odd")


def test_arguments_of_a_servers_tool_may_be_objects():
    seen = []
    schema = {"type": "object", "properties": {"at": {"type": "object"}}, "required": ["at"]}
    server = SchemaTool("visit", "Visits.", schema, seen.append)

    def find() -> object:
        return Site("a")

    code = sgl.CodeTools([server, find])
    code.run(code.parse("return visit(at=find())"), threading.Event(), [])
    assert seen == [{"at": {"name": "a"}}]


@dataclasses.dataclass
class Site:
    name: str


@pytest.mark.parametrize(
    ("made", "text", "kind"),
    [
        (Broken, "return find() == find()", "TypeError"),
        (lambda: OddDate(2020, 1, 1), "return str(find())", "RuntimeError"),
        (lambda: Computed(1), "return find()", "tool"),
    ],
)
def test_what_an_object_raises_is_an_error_of_the_program(made, text, kind):
    def find() -> object:
        return made()

    code = sgl.CodeTools([find])
    with pytest.raises(sgl.CodeError) as caught:
        code.run(code.parse(text), threading.Event(), [])
    assert caught.value.kind == kind


@pytest.mark.parametrize("note", [RuntimeError("handler"), ValueError("handler")])
def test_what_on_tool_error_raises_is_no_error_of_the_program(note):
    def failing() -> int:
        raise OSError("no")

    def handle(call, error):
        raise note

    code = sgl.CodeTools([failing], on_tool_error=handle)
    with pytest.raises(type(note), match="handler"):
        code.run(code.parse("return failing()"), threading.Event(), [])


@pytest.mark.parametrize(
    "made",
    [
        "a = [1] * 10000\nb = [1] * 10000\n",
        "a = [get()] * 10000\nb = a + []\n",
        'a = {"k" + str(i): 1 for i in range(10000)}\nb = {key: a[key] for key in a}\n',
        'a = "a" * 4000000\nb = "a" * 4000000\n',
    ],
)
@pytest.mark.parametrize("order", ["==", "!="])
def test_comparisons_are_counted_by_length(made, order):
    text = f"{made}for i in range(1000):\n    c = a {order} b\nreturn 1"
    error = fail(text, max_steps=300_000)
    assert (error.kind, "max_steps" in error.message) == ("limit", True)


def nest_loops(depth):
    """A program whose loops each have to be checked five times, within those around them."""
    lines = ["x0 = 1"]
    for i in range(depth):
        blank = "    " * i
        lines.append(f"{blank}for i{i} in [1, 2]:")
        lines += [f"{blank}    x{i} = [x{i}]", f"{blank}    x{i + 1} = 1"]
    return "\n".join([*lines, "return x0"])


def test_loops_are_checked_a_bounded_number_of_times():
    assert run(nest_loops(3)) == [[1]]
    error = fail(nest_loops(12))
    assert (error.kind, error.hint) == ("type", "Nest fewer of them.")


@pytest.mark.parametrize(
    ("begin", "line", "count"),
    [
        ("x = 1", 'x = {"a": x, "b": x}', 40),
        ("x = [1]", "x = list(zip(x, x))", 40),
        ("x = 1", "x = [x]", 1500),
        ("x = []", "x = [[y, x] for y in [x]]", 40),
        ('x = {"a": 1}', 'x["a"] = {"a": x, "b": x}', 40),
    ],
)
def test_a_type_that_grows_with_each_line_stays_small(begin, line, count):
    code = sgl.CodeTools([get])
    lines = "\n".join([begin, *[line] * count])
    code.parse(f"{lines}\nfor i in [1]:\n    x = [x]\nreturn x")
    assert fail(f"{lines}\nfor i in x + 1:\n    j = i\nreturn x").kind in ("type", "TypeError")


def test_a_list_may_have_many_different_literals():
    numbers = list(range(3000))
    assert run(f"return len({numbers})", max_steps=10_000) == 3000
    assert fail(f"return add_up({numbers})").kind == "type"


@pytest.mark.parametrize(
    "call", ["sorted(x)", "max(x)", "max(x, key=lambda y: y)", "sorted(x, reverse=True)"]
)
def test_ordering_texts_is_counted_by_length(call):
    text = f'x = ["a" * 1000000, "a" * 1000000] * 100\ny = {call}\nreturn 1'
    error = fail(text)
    assert (error.kind, "max_steps" in error.message) == ("limit", True)
