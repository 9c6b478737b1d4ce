"""Programs that would cost the host time or memory, or leave the interpreter with Python's own errors:
each ends as a CodeError, soon and with a short message.
"""

import threading

import pytest

import sglang_lite as sgl


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
