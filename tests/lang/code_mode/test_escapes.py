"""Attempts to leave the little language: each is refused before any call."""

import threading

import pytest

import sglang_lite as sgl

ESCAPES = [
    "import os\nreturn os.getcwd()",
    "from os import system\nreturn system('id')",
    "return __import__('os')",
    "return eval('1')",
    "return exec('x = 1')",
    "return compile('1', '', 'eval')",
    "return open('/etc/passwd')",
    "return globals()",
    "return getattr(tool, 'x')",
    "return setattr(tool, 'x', 1)",
    "return type(1)",
    "return vars()",
    "return dir()",
    "return tool.__globals__",
    "return tool.func",
    "x = tool\nreturn x(1)",
    "return [tool][0](1)",
    "return ().__class__",
    "return ''.__class__.__mro__[1].__subclasses__()",
    "return (1).__class__",
    "return [].append.__self__",
    "return '{0.__class__}'.format(1)",
    "return '{x}'.format_map({'x': 1})",
    "return '%s' % tool",
    "return '%999999999d' % 1",
    "return f'{tool}'",
    "return f'{1!r}'",
    "return f'{1:999999999}'",
    "return f'{1:{tool(1)}}'",
    "x = lambda: 1\nreturn x()",
    "def f():\n    return 1\nreturn f()",
    "class A:\n    x = 1\nreturn A",
    "while True:\n    x = 1\nreturn x",
    "try:\n    x = 1\nexcept Exception:\n    x = 2\nreturn x",
    "with tool(1) as x:\n    y = 1\nreturn 1",
    "global x\nreturn 1",
    "del tool\nreturn 1",
    "tool = 1\nreturn tool",
    "for tool in [1]:\n    x = 1\nreturn 1",
    "len = 1\nreturn len",
    "return 9 ** 9 ** 9",
    "return 2 ** 1000000",
    "x = 100\nreturn 2 ** x",
    "return (x := 1)",
    "return [*[1]]",
    "return {**{}}",
    "return tool(*[1])",
    "return tool(**{'x': 1})",
    "return tool(x=1, _x=2)",
    "return await tool(1)",
    "yield 1",
    "return sorted([1], key=lambda x: x.__class__)",
    "return sorted([1], key=(lambda: tool)())",
    "return tool.__call__(1)",
    "return max([1], key=len)",
    "assert tool(1)\nreturn 1",
    "raise ValueError\nreturn 1",
    "return b'a'",
    "return ...",
    "return 1j",
    "return " + "(" * 300 + "1" + ")" * 300,
    "return " + "-" * 5000 + "1",
    "return " + "1 + " * 3000 + "1",
    "return 1" + " " * 30_000,
    "return '\0'",
]
RUNNING = [
    "x = 2\nfor i in range(100):\n    x = x * x\nreturn x",
    "return 'a' * 99999999999",
    "return [0] * 99999999999",
    "return sum(range(99999999999))",
    "x = [0]\nfor i in x:\n    x.append(i)\nreturn 1",
    "x = 'a'\nfor i in range(60):\n    x = x.replace('a', 'aa')\nreturn x",
    "x = []\nfor i in range(60):\n    x = [x, x]\nreturn str(x)",
    "x = []\nx.append(x)\nreturn str(x)",
    "return int('9' * 5000)",
    "return round(1, -99999999)",
]


def tool(x: int) -> int:
    calls.append(x)
    return x


calls: list[int] = []


@pytest.mark.parametrize("text", ESCAPES)
def test_an_escape_is_refused_before_anything_runs(text):
    with pytest.raises(sgl.CodeError) as caught:
        sgl.CodeTools([tool]).parse(text)
    assert caught.value.kind in ("syntax", "type")
    assert caught.value.hint
    assert not calls


@pytest.mark.parametrize("text", RUNNING)
def test_what_only_a_run_shows_ends_at_a_limit(text):
    code = sgl.CodeTools([tool])
    with pytest.raises(sgl.CodeError) as caught:
        code.run(code.parse(text), threading.Event(), [])
    assert caught.value.kind == "limit"
    assert caught.value.hint


def test_a_method_of_an_object_can_not_be_called():
    class Odd:
        def __init__(self) -> None:
            self.secret = "s"

        def upper(self) -> str:
            raise AssertionError("called")

    def get():
        return Odd()

    code = sgl.CodeTools([get])
    for text in (
        "return get().upper()",
        "return get().secret",
        "return get().__init__",
        "return f'{get()}'",
    ):
        with pytest.raises(sgl.CodeError):
            code.run(code.parse(text), threading.Event(), [])
