"""Runs a program by walking its syntax tree. Python itself executes none of the program. A program
can only use its own variables, the caller's functions and the functions in builtin_calls.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from sglang_lite.errors import CodeError
from sglang_lite.lang.code_mode.builtin_calls import (
    call_builtin,
    call_method,
    iterate,
    order_items,
)
from sglang_lite.lang.code_mode.limits import Meter, ProgramFault
from sglang_lite.lang.code_mode.operations import (
    check_key,
    compare,
    compute,
    format_value,
    get_field,
    get_item,
    is_true,
    negate,
    python_fault,
    set_item,
    slice_of,
    type_error,
)
from sglang_lite.lang.code_mode.values import original_value
from sglang_lite.protocol.anything import UserValue

_Env: TypeAlias = dict[str, Any]
# Calls a function: its name, positional and keyword arguments, and the line of the call.
CallTool: TypeAlias = Callable[[str, Sequence[Any], Mapping[str, Any], int], UserValue]


class _NotReturned:
    """Result of a block that has not returned."""


_NOT_RETURNED: Final = _NotReturned()


class ProgramInterpreter:
    """Runs one program.

    Args:
        tools: names of the caller's functions.
        call: calls one of them.
        meter: counts what the program uses.
        text: the program, for errors.
    """

    def __init__(
        self, tools: Mapping[str, object], call: CallTool, meter: Meter, text: str
    ) -> None:
        self._tools = tools
        self._call = call
        self._meter = meter
        self._text = text
        self._line = 1
        self._call_error: Exception | None = None  # ends the whole program of the caller

    def run(self, tree: ast.Module) -> UserValue:
        """Runs the program and returns its result.

        Raises:
            CodeError: the program fails or exceeds a limit. The error has the line of the failing
                statement.
        """
        try:
            result = self._run_block(tree.body, {})
            return None if result is _NOT_RETURNED else original_value(result, self._meter)
        except ProgramFault as fault:
            raise self._error(fault) from fault.__cause__
        except Exception as error:  # an object of the caller's may raise anything
            if error is self._call_error:
                raise
            raise self._error(python_fault(error)) from error

    def _error(self, fault: ProgramFault) -> CodeError:
        return CodeError(
            f"line {self._line}: {fault.problem}",
            text=self._text,
            line=self._line,
            kind=fault.kind,
            hint=fault.cure,
        )

    # ------------------------------------------------------------------------------ statements

    def _run_block(self, body: Sequence[ast.stmt], env: _Env) -> UserValue:
        for statement in body:
            result = self._run_statement(statement, env)
            if result is not _NOT_RETURNED:
                return result
        return _NOT_RETURNED

    def _run_statement(self, node: ast.stmt, env: _Env) -> UserValue:
        self._meter.count_steps()
        self._line = node.lineno
        match node:
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self._evaluate(value, env), env)
            case ast.AugAssign():
                self._assign_augmented(node, env)
            case ast.Expr(value=value):
                self._evaluate(value, env)
            case ast.Return(value=value):
                assert value is not None
                return self._evaluate(value, env)
            case ast.If(test=test):
                chosen = node.body if is_true(self._evaluate(test, env)) else node.orelse
                return self._run_block(chosen, env)
            case ast.For():
                return self._run_loop(node, env)
        return _NOT_RETURNED

    def _run_loop(self, node: ast.For, env: _Env) -> UserValue:
        for item in iterate(self._evaluate(node.iter, env), self._meter):
            self._line = node.lineno
            self._set_target(node.target, item, env)
            result = self._run_block(node.body, env)
            if result is not _NOT_RETURNED:
                return result
        return _NOT_RETURNED

    def _assign(self, target: ast.expr, value: UserValue, env: _Env) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
            return
        assert isinstance(target, ast.Subscript)
        owner = self._evaluate(target.value, env)
        set_item(owner, self._evaluate(target.slice, env), value, self._meter)

    def _assign_augmented(self, node: ast.AugAssign, env: _Env) -> None:
        target = node.target
        if isinstance(target, ast.Name):
            owner, key = None, None
            old = self._read_name(target.id, env)
        else:
            assert isinstance(target, ast.Subscript)
            owner = self._evaluate(target.value, env)
            key = self._evaluate(target.slice, env)
            old = get_item(owner, key)
        new = self._evaluate(node.value, env)
        if isinstance(old, list) and isinstance(new, list) and isinstance(node.op, ast.Add):
            self._meter.count_memory(len(new))
            old += new  # the list itself grows, as in Python
            result: Any = old
        else:
            result = compute(node.op, old, new, self._meter)
        if isinstance(target, ast.Name):
            env[target.id] = result
        else:
            set_item(owner, key, result, self._meter)

    def _set_target(self, target: ast.expr, item: UserValue, env: _Env) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = item
            return
        assert isinstance(target, ast.Tuple)
        items = list(iterate(item, self._meter))
        if len(items) != len(target.elts):
            raise ProgramFault(
                "ValueError",
                f"ValueError: an item has {len(items)} values, not {len(target.elts)}.",
                "Write as many names.",
            )
        for each, value in zip(target.elts, items):
            assert isinstance(each, ast.Name)
            env[each.id] = value

    # ----------------------------------------------------------------------------- expressions

    def _evaluate(self, node: ast.expr, env: _Env) -> UserValue:
        self._meter.count_steps()
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._read_name(name, env)
            case ast.Call():
                return self._evaluate_call(node, env)
            case ast.Attribute(value=value, attr=name):
                return get_field(self._evaluate(value, env), name)
            case ast.Subscript(value=value, slice=key):
                owner = self._evaluate(value, env)
                if isinstance(key, ast.Slice):
                    start = key.lower and self._evaluate(key.lower, env)
                    end = key.upper and self._evaluate(key.upper, env)
                    return slice_of(owner, start, end, self._meter)
                return get_item(owner, self._evaluate(key, env))
            case ast.BinOp(left=left, op=op, right=right):
                first = self._evaluate(left, env)
                return compute(op, first, self._evaluate(right, env), self._meter)
            case ast.UnaryOp(op=op, operand=operand):
                return negate(op, self._evaluate(operand, env))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                chosen = body if is_true(self._evaluate(test, env)) else orelse
                return self._evaluate(chosen, env)
            case ast.BoolOp():
                return self._evaluate_bool_op(node, env)
            case ast.Compare():
                return self._evaluate_comparison(node, env)
        return self._evaluate_display(node, env)

    def _evaluate_display(self, node: ast.expr, env: _Env) -> UserValue:
        match node:
            case ast.JoinedStr(values=values):
                return self._join_texts([self._format(each, env) for each in values])
            case ast.List(elts=items):
                self._meter.count_memory(len(items) + 1)
                return [self._evaluate(each, env) for each in items]
            case ast.Dict(keys=keys, values=values):
                self._meter.count_memory(len(keys) + 1)
                return {
                    check_key(self._evaluate(key, env)): self._evaluate(value, env)
                    for key, value in zip(keys, values)
                    if key is not None
                }
            case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item):
                return [
                    self._evaluate(item, inside)
                    for inside in self._comprehend(node.generators[0], env)
                ]
            case ast.DictComp(key=key, value=value):
                return {
                    check_key(self._evaluate(key, inside)): self._evaluate(value, inside)
                    for inside in self._comprehend(node.generators[0], env)
                }
        raise AssertionError(node)

    def _comprehend(self, part: ast.comprehension, env: _Env) -> Iterator[_Env]:
        """Yields the variables for each item of a comprehension."""
        source = self._evaluate(part.iter, env)
        inside = dict(env)
        for item in iterate(source, self._meter):
            self._meter.count_memory(1)
            self._set_target(part.target, item, inside)
            if all(is_true(self._evaluate(test, inside)) for test in part.ifs):
                yield inside

    def _format(self, node: ast.expr, env: _Env) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        assert isinstance(node, ast.FormattedValue)
        spec = ""
        if isinstance(node.format_spec, ast.JoinedStr):
            spec = "".join(
                str(each.value)
                for each in node.format_spec.values
                if isinstance(each, ast.Constant)
            )
        return format_value(self._evaluate(node.value, env), spec, self._meter)

    def _join_texts(self, texts: Sequence[str]) -> str:
        self._meter.count_memory(sum(map(len, texts)))
        return "".join(texts)

    def _read_name(self, name: str, env: _Env) -> UserValue:
        if name not in env:
            raise ProgramFault("NameError", f"{name!r} is not set.", "Set it before.")
        return env[name]

    def _evaluate_bool_op(self, node: ast.BoolOp, env: _Env) -> UserValue:
        value = None
        for each in node.values:
            value = self._evaluate(each, env)
            if is_true(value) != isinstance(node.op, ast.And):
                return value
        return value

    def _evaluate_comparison(self, node: ast.Compare, env: _Env) -> bool:
        left = self._evaluate(node.left, env)
        for op, each in zip(node.ops, node.comparators):
            right = self._evaluate(each, env)
            if not compare(op, left, right, self._meter):
                return False
            left = right
        return True

    def _evaluate_call(self, node: ast.Call, env: _Env) -> UserValue:
        if isinstance(node.func, ast.Attribute):
            owner = self._evaluate(node.func.value, env)
            arguments = [self._evaluate(each, env) for each in node.args]
            return call_method(owner, node.func.attr, arguments, self._meter)
        if not isinstance(node.func, ast.Name):
            raise type_error("only functions can be called.")
        name = node.func.id
        if node.keywords and name not in self._tools:
            return self._order(name, node, env)
        arguments = [self._evaluate(each, env) for each in node.args]
        if name not in self._tools:
            return call_builtin(name, arguments, self._meter)
        named = {str(each.arg): self._evaluate(each.value, env) for each in node.keywords}
        try:
            return self._call(name, arguments, named, node.lineno)
        except ProgramFault:
            raise
        except Exception as error:
            self._call_error = error
            raise

    def _order(self, name: str, node: ast.Call, env: _Env) -> UserValue:
        """Evaluates min(), max() or sorted() with `key` or `reverse`."""
        items = list(iterate(self._evaluate(node.args[0], env), self._meter))
        self._meter.count_memory(2 * len(items))
        given = {each.arg: each.value for each in node.keywords}
        reverse = "reverse" in given and is_true(self._evaluate(given["reverse"], env))
        key = given.get("key")
        keys = self._evaluate_keys(key, items, env) if isinstance(key, ast.Lambda) else items
        return order_items(name, items, keys, self._meter, reverse=reverse)

    def _evaluate_keys(
        self, function: ast.Lambda, items: Sequence[UserValue], env: _Env
    ) -> list[UserValue]:
        inside = dict(env)
        keys = []
        for item in items:
            inside[function.args.args[0].arg] = item
            keys.append(self._evaluate(function.body, inside))
        return keys
