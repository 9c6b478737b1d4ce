"""Reads from an unpacked wheel of SGLang what its users can name. Nothing of it is imported or run."""

import ast
import operator
from collections.abc import Iterator
from pathlib import Path

OPERATORS = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub}
ROUTES = ("get", "post", "put", "delete", "patch", "api_route", "websocket")


class MovedError(Exception):
    """Something is not where this reader looks for it."""


def read_wheel(folder: Path) -> dict[str, dict[str, list[object]]]:
    """Returns the names of each table with their values: a list with the default of a field of
    ServerArgs, and an empty list for every other name.

    Raises:
        MovedError: a file, class or name is not where it was in SGLang 0.5.23.
    """
    root = folder / "sglang"
    choices = root / "srt/arg_groups/choices.py"
    tables = {
        "names": _strings(_value(root / "__init__.py", "__all__")),
        "routes": _routes(root / "srt/entrypoints/http_server.py", root),
        "engine_methods": _methods(root / "srt/entrypoints", "engine.py", "Engine"),
        "tool_call_parsers": _keys(
            root / "srt/function_call/function_call_parser.py", "ToolCallParserEnum"
        ),
        "reasoning_parsers": _keys(root / "srt/parser/reasoning_parser.py", "DetectorMap"),
        "quantizations": _strings(_value(choices, "QUANTIZATION_CHOICES")),
        "load_formats": _strings(_value(choices, "LOAD_FORMAT_CHOICES")),
    }
    found: dict[str, dict[str, list[object]]] = {
        table: {name: [] for name in sorted(set(names))} for table, names in tables.items()
    }
    return {"server_args": read_server_args(folder), **found}


def read_server_args(folder: Path) -> dict[str, list[object]]:
    """Returns the fields of ServerArgs: a list with the default of each, or an empty one."""
    found: dict[str, list[object]] = {}
    for file in sorted((folder / "sglang/srt/arg_groups/fields").glob("*.py")):
        for each in _parse(file).body:
            for line in each.body if isinstance(each, ast.ClassDef) else ():
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    found[line.target.id] = [] if line.value is None else [_default(line.value)]
    if not found:
        raise MovedError("srt/arg_groups/fields has no fields")
    return found


def _parse(file: Path) -> ast.Module:
    if not file.is_file():
        raise MovedError(f"there is no file {file}")
    return ast.parse(file.read_text(encoding="utf-8"))


def _default(node: ast.expr) -> object:
    """Returns the value of a constant, of an empty list from a factory, or of a sum or product."""
    if isinstance(node, ast.Call) and ast.unparse(node).endswith("(default_factory=list)"):
        return []
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_default(node.left), _default(node.right))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise MovedError(f"{ast.unparse(node)} is not a constant") from None


def _value(file: Path, name: str) -> ast.expr:
    """Returns what a file assigns to a name, in a class or outside."""
    for node in ast.walk(_parse(file)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_named = any(isinstance(each, ast.Name) and each.id == name for each in targets)
        if is_named and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            return node.value
    raise MovedError(f"{file} assigns nothing to {name}")


def _strings(node: ast.expr) -> list[str]:
    found: list[str] = ast.literal_eval(node)
    return found


def _keys(file: Path, name: str) -> list[str]:
    """Returns the keys of a dictionary that a file assigns to a name."""
    value = _value(file, name)
    if not isinstance(value, ast.Dict) or None in value.keys:
        raise MovedError(f"{file}: {name} is not a dictionary of its own keys")
    return [ast.literal_eval(key) for key in value.keys if key is not None]


def _routes(file: Path, root: Path) -> list[str]:
    """Returns the paths of the routes in a file, and in the files of the routers that it includes."""
    tree = _parse(file)
    found = list(_decorated_paths(tree, "app"))
    modules = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.name == "router"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "app.include_router":
            module = modules.get(ast.unparse(node.args[0]))
            if module is None or node.keywords:
                raise MovedError(f"{file}: {ast.unparse(node)} can't be followed")
            found += _decorated_paths(
                _parse((root.parent / module.replace(".", "/")).with_suffix(".py")), "router"
            )
    if not found:
        raise MovedError(f"{file} has no routes")
    return found


def _decorated_paths(tree: ast.Module, application: str) -> Iterator[str]:
    for node in ast.walk(tree):
        for call in getattr(node, "decorator_list", ()):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in {
                f"{application}.{method}" for method in ROUTES
            }:
                path = call.args[0]
                if isinstance(path, ast.Call):  # an environment variable with a default
                    path = path.args[-1]
                if not isinstance(path, ast.Name):  # an environment variable without one
                    yield str(ast.literal_eval(path))


def _methods(folder: Path, file: str, name: str) -> list[str]:
    """Returns the public methods of a class, and of its bases that the same folder has."""
    classes = {
        node.name: node
        for tree in map(_parse, [folder / file, *sorted(folder.glob("[eE]ngine*.py"))])
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    if name not in classes:
        raise MovedError(f"{folder / file} has no class {name}")
    waiting, found = [name], []
    while waiting:
        node = classes.get(waiting.pop())
        for each in () if node is None else node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                found += [] if each.name.startswith("_") else [each.name]
        waiting += [] if node is None else [ast.unparse(base) for base in node.bases]
    return found
