"""Infers the types of a program's expressions, and reports type errors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from sglang_lite.errors import CodeError
from sglang_lite.lang.code_mode.builtin_types import (
    BUILTINS,
    METHODS,
    ORDERS,
    can_be_text,
    check_order,
    is_number,
    is_text,
    item_type,
    result_of_builtin,
    result_of_method,
)
from sglang_lite.lang.code_mode.static_types import (
    ANY,
    BOOL,
    FLOAT,
    INT,
    NEVER,
    NONE,
    STR,
    StaticType,
    dict_of,
    fits,
    items_of_dict,
    iterable_of,
    join_types,
    limit_size,
    list_of,
    may_be_none,
    widen,
    without_none,
)
from sglang_lite.lang.code_mode.tool_signatures import ToolSignature

Types: TypeAlias = Mapping[str, StaticType]  # types of the variables that are set

_SIGNS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_KEYS = ("str", "int", "bool", "float", "none", "any", "never")

_MAX_STEPS: Final = 100_000  # checks of expressions and statements, repeated ones included
_MAX_SHOWN: Final = 400  # characters of an error message, which may contain long types


class ExpressionTypes:
    """Finds the types of expressions.

    Args:
        tools: the functions, by name.
        text: the program, for errors.
    """

    def __init__(self, tools: Mapping[str, ToolSignature], text: str) -> None:
        self._tools = tools
        self._text = text
        self._steps = 0
        self._unset: set[str] = set()  # variables that only some paths set

    def error(self, where: ast.expr | ast.stmt | int, problem: str, cure: str) -> CodeError:
        """Returns an error about an expression, a statement or a line."""
        line = where if isinstance(where, int) else where.lineno
        if len(problem) > _MAX_SHOWN:
            problem = f"{problem[:_MAX_SHOWN]}…"
        return CodeError(
            f"line {line}: {problem}", text=self._text, line=line, kind="type", hint=cure
        )

    def note_unset(self, names: Iterable[str]) -> None:
        """Notes variables that are set on only some paths, for errors."""
        self._unset.update(names)

    def value_type(self, node: ast.expr, env: Types) -> StaticType:
        """Returns the type of an expression. Raises CodeError if its values can only be iterated
        over.
        """
        found = self.type_of(node, env)
        if found.kind == "iterable":
            raise self.error(node, "this can only be iterated over.", "Make a list of it: list(…).")
        return found

    def item_of(self, node: ast.expr, env: Types) -> StaticType:
        """Returns the type of the items of an expression that is iterated over."""
        found = self.type_of(node, env)
        item = item_type(found)
        if item is None:
            raise self.error(
                node, f"{found} has no items.", "Iterate over a list, or over range(…)."
            )
        return item

    def bind_target(self, target: ast.expr, item: StaticType, env: Types) -> dict[str, StaticType]:
        """Returns the types of variables inside a loop, whose target is one name or several."""
        if isinstance(target, ast.Name):
            return {**env, target.id: item}
        assert isinstance(target, ast.Tuple)
        names = [each.id for each in target.elts if isinstance(each, ast.Name)]
        parts = []
        for option in item.options():
            if option.kind == "tuple" and len(option.items) != len(names):
                problem = f"the items have {len(option.items)} values, not {len(names)}."
                raise self.error(target, problem, "Write as many names.")
            if option.kind == "tuple":
                parts.append(option.items)
            elif option.kind in ("list", "any", "never"):
                parts.append((option.items[0] if option.items else ANY,) * len(names))
            else:
                raise self.error(target, f"{option} can't be taken apart.", "Write one name.")
        return {**env, **dict(zip(names, map(join_types, zip(*parts))))}

    def type_of(self, node: ast.expr, env: Types) -> StaticType:
        """Returns the type of an expression. Raises CodeError if it has none."""
        self.count_steps(node)
        return limit_size(self._find_type(node, env))

    def count_steps(self, node: ast.expr | ast.stmt, count: int = 1) -> None:
        """Counts the checks of expressions and statements, since those in nested loops are checked
        many times. Raises CodeError if there were too many.
        """
        self._steps += count
        if self._steps > _MAX_STEPS:
            raise self.error(node, "the loops are too deep to be checked.", "Nest fewer of them.")

    def _find_type(self, node: ast.expr, env: Types) -> StaticType:
        match node:
            case ast.Constant(value=None):
                return NONE
            case ast.Constant(value=value):
                return FLOAT if isinstance(value, float) else StaticType("literal", values=(value,))
            case ast.Name(id=name):
                return self._type_of_name(node, name, env)
            case ast.JoinedStr():
                return self._type_of_text(node, env)
            case ast.List(elts=items):
                return list_of(join_types(self.value_type(each, env) for each in items))
            case ast.Dict():
                return self._type_of_dict(node, env)
            case ast.ListComp() | ast.GeneratorExp():
                item = self.value_type(node.elt, self._bind_comprehension(node.generators, env))
                return list_of(item) if isinstance(node, ast.ListComp) else iterable_of(item)
            case ast.DictComp():
                inside = self._bind_comprehension(node.generators, env)
                key = widen(self.value_type(node.key, inside))
                self._check_key(node.key, key)
                return dict_of(key, self.value_type(node.value, inside))
            case ast.Call():
                return self._type_of_call(node, env)
            case ast.Attribute(value=value, attr=name):
                return self._type_of_field(node, self.value_type(value, env), name)
            case ast.Subscript():
                return self._type_of_item(node, self.value_type(node.value, env), env)
        return self._type_of_operation(node, env)

    def _type_of_name(self, node: ast.expr, name: str, env: Types) -> StaticType:
        if name not in env:
            if name in self._unset:
                problem = f"{name!r} may not be set, as only some paths set it."
                raise self.error(node, problem, "Set it before.")
            cure = f"Set it before, or call one of the functions {', '.join(self._tools)}."
            raise self.error(node, f"{name!r} is not set.", cure)
        return env[name]

    def _type_of_text(self, node: ast.JoinedStr, env: Types) -> StaticType:
        for each in node.values:
            if isinstance(each, ast.FormattedValue):
                found = self.value_type(each.value, env)
                if not can_be_text(found):
                    raise self.error(
                        each, f"{found} can't be written as text.", "Write its fields."
                    )
                if each.format_spec is not None and not (is_number(found) or is_text(found)):
                    raise self.error(each, f"{found} has no format.", "Leave the format out.")
        return STR

    def _type_of_dict(self, node: ast.Dict, env: Types) -> StaticType:
        keys = [each for each in node.keys if each is not None]
        values = [self.value_type(each, env) for each in node.values]
        names = [each.value for each in keys if isinstance(each, ast.Constant)]
        if names and len(names) == len(keys) and all(isinstance(each, str) for each in names):
            fields = tuple({str(name): kind for name, kind in zip(names, values)}.items())
            return StaticType("object", fields=fields)
        types = [widen(self.value_type(each, env)) for each in keys]
        for each, kind in zip(keys, types):
            self._check_key(each, kind)
        return dict_of(join_types(types), join_types(values))

    def _check_key(self, node: ast.expr, kind: StaticType) -> None:
        if any(each.kind not in _KEYS for each in widen(kind).options()):
            raise self.error(node, f"{kind} can't be a key.", "Use a text or a number.")

    def _bind_comprehension(self, parts: list[ast.comprehension], env: Types) -> Types:
        inside: Types = self.bind_target(parts[0].target, self.item_of(parts[0].iter, env), env)
        for test in parts[0].ifs:
            self.value_type(test, inside)
            inside = self.narrow(test, inside, holds=True)
        return inside

    # ------------------------------------------------------------------------------ operations

    def _type_of_operation(self, node: ast.expr, env: Types) -> StaticType:
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                return self.arithmetic(
                    node, op, self.value_type(left, env), self.value_type(right, env)
                )
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.value_type(operand, env)
                return BOOL
            case ast.UnaryOp(operand=operand):
                found = widen(self.value_type(operand, env))
                if not is_number(found):
                    raise self.error(node, f"{found} has no sign.", "Use a number.")
                return join_types(INT if each.kind == "bool" else each for each in found.options())
            case ast.BoolOp():
                return self._type_of_bool_op(node, env)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.value_type(test, env)
                first = self.value_type(body, self.narrow(test, env, holds=True))
                return join_types(
                    [first, self.value_type(orelse, self.narrow(test, env, holds=False))]
                )
            case ast.Compare():
                return self._type_of_comparison(node, env)
        raise AssertionError(node)

    def arithmetic(
        self, node: ast.expr | ast.stmt, op: ast.operator, left: StaticType, right: StaticType
    ) -> StaticType:
        """Returns the type of an operation on two values."""
        left, right = widen(left), widen(right)
        if "any" in (left.kind, right.kind) or "never" in (left.kind, right.kind):
            return ANY
        if is_number(left) and is_number(right):
            floats = any("float" in (each.kind) for each in (*left.options(), *right.options()))
            return FLOAT if floats or isinstance(op, ast.Div) else INT
        whole = [each for each in (left, right) if each.kind in ("int", "bool")]
        match op:
            case ast.Add():
                if left.kind == right.kind == "str":
                    return STR
                if left.kind == right.kind == "list":
                    return join_types([left, right])
            case ast.Mult() if whole:
                (other,) = [each for each in (left, right) if each is not whole[0]] or [NEVER]
                if other.kind in ("str", "list"):
                    return other
        cure = "Convert one with str(), int() or float(), or write an f-string."
        if may_be_none(left) or may_be_none(right):
            cure = "One may be None: ask with `is not None` before."
        raise self.error(node, f"{left} {_SIGNS[type(op)]} {right} is not possible.", cure)

    def _type_of_bool_op(self, node: ast.BoolOp, env: Types) -> StaticType:
        found = []
        for each in node.values:
            found.append(self.value_type(each, env))
            env = self.narrow(each, env, holds=isinstance(node.op, ast.And))
        if isinstance(node.op, ast.Or):
            found[:-1] = map(without_none, found[:-1])
        return join_types(found)

    def _type_of_comparison(self, node: ast.Compare, env: Types) -> StaticType:
        left = self.value_type(node.left, env)
        for op, each in zip(node.ops, node.comparators):
            right = self.value_type(each, env)
            match op:
                case ast.Is() | ast.IsNot():
                    if right.kind != "none":
                        raise self.error(node, "is compares with None only.", "Write ==.")
                case ast.In() | ast.NotIn():
                    self._check_membership(node, left, right)
                case ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE():
                    both = is_number(left) and is_number(right)
                    if not both and not (is_text(left) and is_text(right)):
                        shown = f"{widen(left)} {_SIGNS[type(op)]} {widen(right)}"
                        raise self.error(
                            node, f"{shown} is not possible.", "Compare two numbers or two texts."
                        )
            left = right
        return BOOL

    def _check_membership(self, node: ast.expr, left: StaticType, right: StaticType) -> None:
        for option in map(widen, right.options()):
            if option.kind == "str" and not is_text(left):
                raise self.error(
                    node, f"{widen(left)} can't be in a text.", "Look for a text in it."
                )
            if option.kind not in ("str", "list", "tuple", "dict", "object", "any", "never"):
                raise self.error(
                    node, f"{right} has no items.", "Look for it in a list, dict or text."
                )

    def narrow(self, test: ast.expr, env: Types, *, holds: bool) -> Types:
        """Returns the types that variables have if a test succeeds, or with `holds=False` if it
        fails.
        """
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.narrow(operand, env, holds=not holds)
            case ast.BoolOp(op=op, values=values) if isinstance(op, ast.And) == holds:
                for each in values:
                    env = self.narrow(each, env, holds=holds)
                return env
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as op], comparators=[_]
            ):
                is_none = isinstance(op, ast.Is) == holds
            case ast.Name(id=name) if holds:
                is_none = False
            case _:
                return env
        own = env[name]
        if not may_be_none(own):
            return env
        return {**env, name: NONE if is_none else without_none(own) if own != NONE else NEVER}

    # ----------------------------------------------------------------------------------- items

    def _type_of_field(self, node: ast.expr, owner: StaticType, name: str) -> StaticType:
        found = []
        for option in owner.options():
            fields = dict(option.fields)
            if option.kind in ("any", "never"):
                found.append(ANY)
            elif option.kind == "record" and name in fields:
                found.append(fields[name])
            elif option.kind == "record":
                raise self.error(
                    node, f"{option} has no field {name!r}.", f"Its fields: {', '.join(fields)}."
                )
            elif option.kind in ("object", "dict"):
                raise self.error(node, f"a dict has no field {name!r}.", f"Write [{name!r}].")
            elif option.kind == "none":
                raise self.error(node, "the value may be None.", "Ask with `is not None` before.")
            else:
                raise self.error(
                    node, f"{widen(option)} has no field {name!r}.", "Use the value itself."
                )
        return join_types(found)

    def _type_of_item(self, node: ast.Subscript, owner: StaticType, env: Types) -> StaticType:
        if isinstance(node.slice, ast.Slice):
            return self._type_of_slice(node, node.slice, owner, env)
        key = self.value_type(node.slice, env)
        return join_types(
            self._item_of_option(node, option, key) for option in widen(owner).options()
        )

    def _item_of_option(
        self, node: ast.Subscript, option: StaticType, key: StaticType
    ) -> StaticType:
        whole = all(each.kind in ("int", "bool", "any", "never") for each in widen(key).options())
        match option.kind:
            case "any" | "never":
                return ANY
            case "list" | "str" | "tuple" if not whole:
                raise self.error(
                    node, f"{key} can't be an index of {option}.", "Use a whole number."
                )
            case "list":
                return option.items[0] if option.items[0] != NEVER else ANY
            case "str":
                return STR
            case "tuple":
                return _item_of_tuple(option.items, key)
            case "object" if key.kind == "literal":
                fields = dict(option.fields)
                found = [fields.get(str(each)) for each in key.values]
                if option.has_more:
                    found = [each or ANY for each in found]
                if None in found:
                    known = ", ".join(map(repr, fields))
                    raise self.error(node, f"there is no key {key}.", f"The keys: {known}.")
                return join_types(each for each in found if each is not None)
            case "object" | "dict":
                self._check_key(node.slice, key)
                value = items_of_dict(option)[1]
                return ANY if value == NEVER else value
            case "record":
                fields = dict(option.fields)
                raise self.error(
                    node, f"{option} has no items.", f"Its fields: {', '.join(fields)}."
                )
            case "none":
                raise self.error(node, "the value may be None.", "Ask with `is not None` before.")
        raise self.error(node, f"{option} has no items.", "Use the value itself.")

    def _type_of_slice(
        self, node: ast.Subscript, ends: ast.Slice, owner: StaticType, env: Types
    ) -> StaticType:
        for each in (ends.lower, ends.upper):
            kinds = () if each is None else widen(self.value_type(each, env)).options()
            if any(kind.kind not in ("int", "bool", "any", "never") for kind in kinds):
                raise self.error(node, "a slice has whole numbers.", "Write [start:end].")
        owner = widen(owner)
        if any(each.kind not in ("str", "list", "any", "never") for each in owner.options()):
            raise self.error(node, f"{owner} can't be sliced.", "Slice a list or a text.")
        return owner

    def check_item_store(
        self, node: ast.Subscript, owner: StaticType, value: StaticType, env: Types
    ) -> None:
        """Checks `owner[key] = value`."""
        if isinstance(node.slice, ast.Slice):
            raise self.error(node, "a slice can't be set.", "Set one item, or make a new list.")
        key = self.value_type(node.slice, env)
        for option in owner.options():
            if option.kind == "list":
                self._item_of_option(node, option, key)
            elif option.kind in ("dict", "object"):
                self._check_key(node.slice, key)
            elif option.kind not in ("any", "never"):
                raise self.error(
                    node, f"items of {option} can't be set.", "Set those of a list or dict."
                )

    # ----------------------------------------------------------------------------------- calls

    def _type_of_call(self, node: ast.Call, env: Types) -> StaticType:
        if isinstance(node.func, ast.Attribute):
            return self._type_of_method(node, node.func, env)
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        if name in self._tools:
            return self._type_of_tool_call(node, self._tools[name], env)
        if name in ORDERS and node.keywords:
            return self._type_of_order(node, name, env)
        self._check_arity(node, f"{name}()", BUILTINS[name])
        found = result_of_builtin(name, [self.type_of(each, env) for each in node.args])
        if isinstance(found, str):
            raise self.error(node, found, f"Give {name}() another value.")
        return found

    def _type_of_order(self, node: ast.Call, name: str, env: Types) -> StaticType:
        """Returns the type of min(), max() or sorted() with `key` or `reverse`."""
        given = {each.arg: each.value for each in node.keywords}
        names = ["key", "reverse"] if name == "sorted" else ["key"]
        if len(node.args) != 1 or not given.keys() <= {*names}:
            problem = f"{name}() takes one list, and {' and '.join(names)} by name."
            raise self.error(node, problem, f"Write {name}(…, key=lambda x: …).")
        item = kind = self.item_of(node.args[0], env)
        match given.get("key"):
            case ast.Lambda(args=parameters, body=body):
                kind = self.value_type(body, {**env, parameters.args[0].arg: item})
            case ast.expr() as other:
                raise self.error(other, "the key is no function.", "Write key=lambda x: …")
        if "reverse" in given and not fits(self.value_type(given["reverse"], env), BOOL):
            raise self.error(given["reverse"], "reverse is True or False.", "Write reverse=True.")
        ordered = check_order(name, widen(kind))
        if isinstance(ordered, str):
            raise self.error(node, ordered, "Write a key that is a number or a text.")
        return list_of(item) if name == "sorted" else item

    def _check_arity(self, node: ast.Call, shown: str, arity: tuple[int, int]) -> None:
        least, most = arity
        if node.keywords or not least <= len(node.args) <= most:
            count = f"{least}" if least == most else f"{least} to {most}"
            problem = f"{shown} takes {count} argument{'s' * (most != 1)}, without names."
            raise self.error(node, problem, f"Give it {count}.")

    def _type_of_method(self, node: ast.Call, func: ast.Attribute, env: Types) -> StaticType:
        owner = self.value_type(func.value, env)
        arities = [names[func.attr] for names in METHODS.values() if func.attr in names]
        self._check_arity(node, f"{func.attr}()", arities[0])
        joins = func.attr == "join"
        arguments = [(self.type_of if joins else self.value_type)(each, env) for each in node.args]
        results = []
        for option in owner.options():
            found = result_of_method(option, func.attr, arguments)
            if isinstance(found, str):
                raise self.error(node, found, "Use what the type has.")
            results.append(found)
        return join_types(results)

    def _type_of_tool_call(self, node: ast.Call, tool: ToolSignature, env: Types) -> StaticType:
        names = [each.name for each in tool.parameters]
        if len(node.args) > (len(names) if tool.positional else 0):
            problem = f"{tool.name}() takes {len(names)} arguments, not {len(node.args)}."
            if not tool.positional:
                problem = f"{tool.name}() takes its arguments by name."
            raise self.error(node, problem, f"It is {tool}.")
        given = dict(zip(names, node.args))
        for keyword in node.keywords:
            if keyword.arg not in names or keyword.arg in given:
                twice = "gets the argument twice:" if keyword.arg in names else "has no parameter"
                raise self.error(node, f"{tool.name}() {twice} {keyword.arg!r}.", f"It is {tool}.")
            given[str(keyword.arg)] = keyword.value
        for each in tool.parameters:
            if each.name in given:
                found = self.value_type(given[each.name], env)
                if not fits(found, each.type):
                    problem = f"{tool.name}({each.name}=…) takes {each.type}, not {found}."
                    raise self.error(given[each.name], problem, f"It is {tool}.")
            elif each.required:
                raise self.error(
                    node, f"{tool.name}() lacks the argument {each.name!r}.", f"It is {tool}."
                )
        return tool.result


def _item_of_tuple(items: tuple[StaticType, ...], key: StaticType) -> StaticType:
    """Returns the type of a tuple's item. Without a literal index, joins the types of all items."""
    size = len(items)
    if key.kind == "literal" and all(-size <= place < size for place in key.values):
        return join_types(items[place] for place in key.values)
    return join_types(items)
