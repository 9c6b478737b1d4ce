"""Parses a model's program, and rejects everything outside the supported subset of Python."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Container, Iterator
from typing import Final

from sglang_lite.errors import CodeError
from sglang_lite.lang.code_mode.builtin_types import BUILTINS, METHOD_NAMES, ORDERS
from sglang_lite.lang.code_mode.limits import MAX_BITS

MAX_CHARACTERS: Final = 20_000  # characters of a program
MAX_NESTING: Final = 60  # levels of nested statements and expressions
MAX_POWER: Final = 64
_FENCE: Final = re.compile(r"\s*```[a-z]*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
_FORMAT: Final = re.compile(r"[<>^]?0?[0-9]{0,2},?(?:\.[0-9]{1,2})?[defgs%]?")
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Expr, ast.For, ast.If, ast.Return)
_EXPRESSIONS = (
    ast.BinOp,
    ast.BoolOp,
    ast.UnaryOp,
    ast.Compare,
    ast.IfExp,
    ast.Call,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Name,
    ast.Constant,
    ast.JoinedStr,
    ast.FormattedValue,
    ast.List,
    ast.Dict,
    ast.Tuple,
    ast.ListComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Lambda,
)
_OTHERS = (
    ast.Module,
    ast.Load,
    ast.Store,
    ast.comprehension,
    ast.keyword,
    ast.arguments,
    ast.arg,
    ast.And,
    ast.Or,
    ast.Not,
    ast.USub,
    ast.UAdd,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Pow,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.Is,
    ast.IsNot,
    ast.In,
    ast.NotIn,
)
_ALLOWED: Final = frozenset((*_STATEMENTS, *_EXPRESSIONS, *_OTHERS))
_WORDS: Final = {
    "Import": "import",
    "ImportFrom": "import",
    "FunctionDef": "def",
    "AsyncFunctionDef": "async def",
    "ClassDef": "class",
    "While": "while",
    "Starred": "*",
    "NamedExpr": ":=",
    "AnnAssign": "an annotation",
    "SetComp": "a set",
    "AsyncFor": "async for",
    "AsyncWith": "async with",
}
_LAMBDA: Final = ("a lambda is the key= of min(), max() or sorted().", "Write key=lambda x: …")
_SUBSET: Final = (
    "A program has assignments, calls, if, for and return, with lists, dicts, comprehensions, f-strings, arithmetic, "
    "comparisons, and, or, not."
)


def strip_fence(text: str) -> str:
    """Returns a program without the Markdown fence around it, if there is one."""
    found = _FENCE.fullmatch(text)
    return text if found is None else found[1]


def parse_program(text: str, tools: Container[str]) -> ast.Module:
    """Parses a program.

    Args:
        text: the program; a fence around it is left out.
        tools: names of the functions that it may call.

    Raises:
        CodeError: the text is not Python, or uses something outside the supported subset.
    """
    source = strip_fence(text)
    if len(source) > MAX_CHARACTERS:
        raise syntax_error(
            text,
            1,
            f"the program has more than {MAX_CHARACTERS:,} characters.",
            "Write a shorter one.",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about odd escapes in texts
            tree = ast.parse(source)
    except SyntaxError as error:
        problem = f"SyntaxError: {error.msg}."
        raise syntax_error(text, error.lineno or 1, problem, "Write Python.") from None
    except (ValueError, RecursionError, MemoryError):  # null characters, or brackets too deep
        raise syntax_error(text, 1, "the program can't be read as Python.", _SUBSET) from None
    _check_nesting(tree, text)
    for node, parent, line in _walk(tree):
        _check_node(node, parent, tools, text, line)
    _OrderNormalizer().visit(tree)
    return tree


class _OrderNormalizer(ast.NodeTransformer):
    """Replaces the function in `max(…, key=function)` with a lambda that calls the function."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        for each in node.keywords if _takes_order(node) else ():
            if each.arg == "key" and isinstance(each.value, ast.Name):
                made = ast.parse(f"lambda _item: {each.value.id}(_item)", mode="eval").body
                each.value = ast.copy_location(made, each.value)
                for inside in ast.walk(made):
                    ast.copy_location(inside, each.value)
        return node


def _takes_order(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ORDERS


def syntax_error(text: str, line: int, problem: str, cure: str) -> CodeError:
    return CodeError(f"line {line}: {problem}", text=text, line=line, kind="syntax", hint=cure)


def _check_nesting(tree: ast.Module, text: str) -> None:
    level: list[tuple[ast.AST, int]] = [(tree, 1)]
    for _ in range(MAX_NESTING):
        level = [
            (child, getattr(child, "lineno", line))
            for node, line in level
            for child in ast.iter_child_nodes(node)
        ]
    if level:
        problem = f"the expressions are nested more than {MAX_NESTING} times."
        raise syntax_error(text, level[0][1], problem, "Assign their parts to variables.")


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST, int]]:
    """Yields all nodes below a tree with their parents and lines."""
    waiting: list[tuple[ast.AST, ast.AST, int]] = [(tree, tree, 1)]
    while waiting:
        node, parent, line = waiting.pop()
        yield node, parent, line
        waiting += [
            (child, node, getattr(child, "lineno", line)) for child in ast.iter_child_nodes(node)
        ]


def _check_node(
    node: ast.AST, parent: ast.AST, tools: Container[str], text: str, line: int
) -> None:
    problem = _find_problem(node, parent, tools)
    if problem:
        raise syntax_error(text, line, *problem)


def _find_problem(node: ast.AST, parent: ast.AST, tools: Container[str]) -> tuple[str, str] | None:
    """Returns a problem of a node itself and a hint for fixing it, or None if there is none."""
    if type(node) not in _ALLOWED:
        name = type(node).__name__
        return f"a program can't have {_WORDS.get(name, name.lower())!r}.", _SUBSET
    match node:
        case ast.Call():
            return _find_call_problem(node, tools)
        case ast.Attribute(attr=name):
            return _find_attribute_problem(node, name, parent)
        case ast.arg(arg=name):
            return _find_set_problem(name, tools)
        case ast.keyword(value=ast.Name(id=name)) if node.arg == "key" and _takes_order(parent):
            if name not in BUILTINS and name not in tools:
                return f"there is no function {name!r}.", _list_functions(tools)
        case ast.Name():
            return _find_name_problem(node, parent, tools)
        case ast.Constant(value=value):
            if value is not None and type(value) not in (bool, int, float, str):
                return "a literal is a number, a text, True, False or None.", "Write one of these."
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                return f"a number has more than {MAX_BITS} bits.", "Write a smaller one."
        case ast.BinOp(op=ast.Pow(), right=right):
            small = isinstance(right, ast.Constant) and type(right.value) is int
            if not small or not 0 <= right.value <= MAX_POWER:  # type: ignore[attr-defined] # a constant
                return (
                    f"the exponent of ** is a literal from 0 to {MAX_POWER}.",
                    "Multiply in a loop instead.",
                )
        case ast.Assign(targets=targets):
            if len(targets) > 1 or not isinstance(targets[0], ast.Name | ast.Subscript):
                return "an assignment has one target.", "Write name = value."
        case ast.AugAssign(target=target):
            if isinstance(target, ast.Attribute) or isinstance(node.op, ast.Pow):
                return "this assignment is not possible.", "Write name = value."
        case ast.Expr(value=value):
            if not isinstance(value, ast.Call):
                return "the line does nothing.", "Assign it to a variable, or return it."
        case _:
            return _find_structure_problem(node, parent)
    return None


def _find_structure_problem(node: ast.AST, parent: ast.AST) -> tuple[str, str] | None:
    match node:
        case ast.For(target=target) | ast.comprehension(target=target):
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            if not all(isinstance(each, ast.Name) for each in names):
                return "what a loop sets is a name, or names with commas.", "Write for name in …"
            if isinstance(node, ast.For) and node.orelse:
                return "a for can't have an else.", "Leave it out."
        case ast.ListComp() | ast.DictComp() | ast.GeneratorExp() if len(node.generators) > 1:
            return "a comprehension has one for.", "Use a loop."
        case ast.Lambda() if not isinstance(parent, ast.keyword):
            return _LAMBDA
        case ast.arguments(args=args):
            if len(args) != 1 or ast.unparse(node) != args[0].arg:
                return "a lambda has one parameter, without a default.", "Write key=lambda x: …"
        case ast.GeneratorExp() if not isinstance(parent, ast.Call):
            return "a comprehension is in brackets.", "Write [… for … in …]."
        case ast.Dict(keys=keys) if None in keys:
            return "a dict can't have **.", "Write its keys."
        case ast.Slice(step=step) if step is not None:
            return "a slice has no step.", "Write [start:end]."
        case ast.Tuple() if isinstance(node.ctx, ast.Load):
            return "a tuple can't be written.", "Write a list: […]."
        case ast.FormattedValue(conversion=conversion) if conversion != -1:
            return "an f-string can't have a conversion.", "Leave the ! out."
        case ast.JoinedStr() if getattr(parent, "format_spec", None) is node:
            return _find_format_problem(node)
        case ast.Return(value=None):
            return "return has no value.", "Write return and the result."
    return None


def _find_format_problem(spec: ast.JoinedStr) -> tuple[str, str] | None:
    texts = [each.value if isinstance(each, ast.Constant) else "?" for each in spec.values]
    if _FORMAT.fullmatch("".join(map(str, texts))):
        return None
    return "this format of an f-string is not possible.", "Write one like :.2f, :, or :>10."


def _find_call_problem(node: ast.Call, tools: Container[str]) -> tuple[str, str] | None:
    if any(keyword.arg is None for keyword in node.keywords):
        return "arguments can't have **.", "Write each by its name."
    for each in node.keywords:
        if isinstance(each.value, ast.Lambda) and not (each.arg == "key" and _takes_order(node)):
            return _LAMBDA
    match node.func:
        case ast.Name(id=name):
            if name in BUILTINS or name in tools:
                return None
            return f"there is no function {name!r}.", _list_functions(tools)
        case ast.Attribute(attr=name):
            if name in METHOD_NAMES:
                return None
            methods = ", ".join(sorted(METHOD_NAMES))
            return f"there is no method {name!r}.", f"The methods are {methods}."
    return "only functions can be called.", _list_functions(tools)


def _list_functions(tools: Container[str]) -> str:
    named = tools if isinstance(tools, dict) else ()
    return f"The functions are {', '.join([*named, *BUILTINS])}."


def _find_attribute_problem(
    node: ast.Attribute, name: str, parent: ast.AST
) -> tuple[str, str] | None:
    if name.startswith("_"):
        return f"the attribute {name!r} can't be read.", "Read fields without an underscore."
    if not isinstance(node.ctx, ast.Load):
        return "a field can't be set.", "Assign to a variable."
    called = isinstance(parent, ast.Call) and parent.func is node
    if isinstance(node.value, ast.Constant) and not called:
        return f"a literal has no field {name!r}.", "Read fields of what a function returned."
    return None


def _find_set_problem(name: str, tools: Container[str]) -> tuple[str, str] | None:
    """Returns a problem of a variable's name and a hint for fixing it, or None if there is none."""
    if name.startswith("__"):
        return f"the name {name!r} can't be used.", "Use names without underscores in front."
    if name in BUILTINS or name in tools:
        return f"{name!r} is a function, so it can't be set.", "Use another name."
    return None


def _find_name_problem(
    node: ast.Name, parent: ast.AST, tools: Container[str]
) -> tuple[str, str] | None:
    name = node.id
    called = isinstance(parent, ast.Call) and parent.func is node
    orders = isinstance(parent, ast.keyword) and parent.arg == "key"
    known = name in BUILTINS or name in tools
    if isinstance(node.ctx, ast.Store) or not known:
        return _find_set_problem(name, tools)
    if not called and not orders:
        return f"{name!r} is a function: it can only be called.", f"Write {name}(…)."
    return None
