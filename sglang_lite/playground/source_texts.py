"""Prompts and constraints in the source of a program, as texts that can be edited.

Nothing that is typed becomes Python: the text of a string is replaced in the syntax tree, and an
f-string keeps its expressions.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from sglang_lite.constraints.coerce import as_constraint
from sglang_lite.lang.function import SglFunction
from sglang_lite.page.data import replace_surrogates
from sglang_lite.protocol import JsonSchema, ParameterError, SglError

_ROLES: Final = ("system", "user", "assistant", "tool", "add")
_ASKING: Final = ("gen", "gen_int", "gen_string", "gen_bool", "select")
_CONSTRAINTS: Final = ("json_schema", "type", "regex", "ebnf")


@dataclass(frozen=True, slots=True)
class SourceText:
    """Text in a program's source that can be edited.

    Attributes:
        kind: "prompt", or the kind of a constraint: "json_schema", "regex" or "ebnf".
        line: line of the text in the file.
        program: name of the program that contains it; "" if none does.
        text: the text. The expressions of an f-string are in braces; a schema is JSON.
        change: replaces the text in the tree. Raises ParameterError if the new text is invalid.
    """

    kind: str
    line: int
    program: str
    text: str
    change: Callable[[str], None]


class _Finder(ast.NodeVisitor):
    """Finds the texts in a syntax tree that a user can edit, in reading order.

    Args:
        values: values of the file's names, for schemas that are referred to by name.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.found: list[SourceText] = []
        self._values = values
        self._program = ""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if isinstance(self._values.get(node.name), SglFunction):
            self._program = node.name
            for each in node.body:
                self.visit(each)
            self._program = ""

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        pass

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._find_prompt_texts(node.value)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        if node.value is not None:
            self._find_prompt_texts(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_Assign(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._find_prompt_texts(node)

    def _find_prompt_texts(self, node: ast.expr) -> None:
        """Finds the editable texts in an expression that a program adds to its state."""
        match node:
            case ast.Constant(str() as text):
                self._add_source_text("prompt", node, text, lambda new: setattr(node, "value", new))
            case ast.JoinedStr():
                self._add_source_text("prompt", node, *_f_string_text(node))
            case ast.BinOp(left, ast.Add(), right) | ast.IfExp(_, left, right):
                self._find_prompt_texts(left)
                self._find_prompt_texts(right)
            case ast.Lambda(_, body):
                self._find_prompt_texts(body)
            case ast.List(several) | ast.Tuple(several):
                for each in several:
                    self._find_prompt_texts(each)
            case ast.Call(ast.Name(name) | ast.Attribute(_, name)) if name in _ROLES:
                for each in node.args:
                    self._find_prompt_texts(each)
            case ast.Call(ast.Name(name) | ast.Attribute(_, name)) if name in _ASKING:
                for keyword in node.keywords:
                    self._find_constraint_text(keyword)

    def _find_constraint_text(self, keyword: ast.keyword) -> None:
        if keyword.arg not in _CONSTRAINTS:
            return
        value = self._evaluate_node(keyword.value)
        kind = keyword.arg
        text = value
        if kind == "type":
            schema = _schema_of(value)
            kind = "json_schema"
            text = schema and json.dumps(json.loads(schema), indent=2)
        elif kind == "json_schema" and isinstance(value, dict):
            text = json.dumps(value, indent=2)
        if isinstance(text, str):
            self._add_source_text(
                kind, keyword.value, text, lambda new: _replace_constraint(keyword, kind, new)
            )

    def _evaluate_node(self, node: ast.expr) -> Any:  # of the user's program
        if isinstance(node, ast.Name):
            return self._values.get(node.id)
        try:
            return ast.literal_eval(node)
        except ValueError:
            return None

    def _add_source_text(
        self, kind: str, node: ast.expr, text: str, change: Callable[[str], None]
    ) -> None:
        if text.strip():
            self.found.append(SourceText(kind, node.lineno, self._program, text, change))


def _f_string_text(node: ast.JoinedStr) -> tuple[str, Callable[[str], None]]:
    """Returns the text of an f-string, with its expressions in braces. Also returns a function that
    replaces this text.
    """
    parts = {}
    text = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        written = ast.unparse(ast.JoinedStr([part]))
        shown = written[written.index("{") : written.rindex("}") + 1]
        parts[shown] = part
        text += shown

    def change(new: str) -> None:
        pieces = re.split(f"({'|'.join(map(re.escape, parts))})", new) if parts else [new]
        node.values = [parts[piece] if piece in parts else ast.Constant(piece) for piece in pieces]

    return text, change


def _schema_of(kind: Any) -> str | None:
    """Returns the JSON schema that `gen(type=…)` uses for a Python type, or None if it uses none."""
    try:
        constraint = as_constraint(kind)
    except SglError:
        return None
    return constraint.schema if isinstance(constraint, JsonSchema) else None


def _replace_constraint(keyword: ast.keyword, kind: str, text: str) -> None:
    if kind == "json_schema":
        try:
            if not isinstance(json.loads(text), dict | bool):
                raise ValueError(f"{text!r:.60} is not an object")
        except (ValueError, RecursionError) as error:
            raise ParameterError("json_schema", f"{error}.", hint="Give a JSON schema.") from None
    keyword.arg = kind
    keyword.value = ast.Constant(text)


def find_source_texts(source: str, module: ModuleType) -> tuple[ast.Module, list[SourceText]]:
    """Parses a file's source, and finds the texts in it that can be edited. Returns the syntax tree
    and these texts.
    """
    tree = ast.parse(source)
    finder = _Finder(vars(module))
    for statement in tree.body:
        finder.visit(statement)
    return tree, finder.found


def apply_edits(source: str, module: ModuleType, edits: Mapping[int, str]) -> dict[str, object]:
    """Returns the global names of a module after replacing some of its texts. Creates new programs,
    and new values for other names that depend on an edited text. The module itself stays unchanged.

    Args:
        edits: new texts, by their indices.

    Raises:
        ParameterError: a text is invalid.
    """
    tree, found = find_source_texts(source, module)
    lines = set()
    for place, text in edits.items():
        if not 0 <= place < len(found):
            raise ParameterError("edits", f"there is no text {place}.", hint="Reload the page.")
        if text != replace_surrogates(found[place].text):  # the page shows it like this
            found[place].change(text)
            lines.add(found[place].line)
    names: dict[str, object] = dict(vars(module))
    changed = set[str]()
    future = [
        each
        for each in tree.body
        if isinstance(each, ast.ImportFrom) and each.module == "__future__"
    ]
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            again = isinstance(names.get(statement.name), SglFunction)
        else:
            used = [each for each in ast.walk(statement) if isinstance(each, ast.Name)]
            span = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
            again = isinstance(statement, ast.Assign | ast.AnnAssign) and (
                not lines.isdisjoint(span) or any(each.id in changed for each in used)
            )
            changed |= {each.id for each in used if again and isinstance(each.ctx, ast.Store)}
        if again:
            part = ast.fix_missing_locations(ast.Module([*future, statement], []))
            exec(compile(part, str(module.__file__), "exec", dont_inherit=True), names)
    return names
