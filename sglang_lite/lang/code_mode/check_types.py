"""Checks the types of a program before it runs."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from sglang_lite.lang.code_mode.expression_types import ExpressionTypes, Types
from sglang_lite.lang.code_mode.static_types import (
    ANY,
    StaticType,
    dict_of,
    items_of_dict,
    join_types,
    limit_size,
    list_of,
    widen,
)
from sglang_lite.lang.code_mode.tool_signatures import ToolSignature

_Env: TypeAlias = Types
_MAX_ROUNDS: Final = 4  # checks of a loop's body, after which types that still change become "any"


def check_types(tree: ast.Module, tools: Mapping[str, ToolSignature], text: str) -> None:
    """Checks the types of a program that `parse_program` has accepted.

    Raises:
        CodeError: a call has wrong arguments, a variable may be unset, an operation is not possible
            for the types of its values, or the program may end without a result.
    """
    checker = _TypeChecker(tools, text)
    after = checker.check_block(tree.body, {})
    if after is not None:
        last = tree.body[-1].lineno if tree.body else 1
        raise checker.expressions.error(
            last, "the program may end without a result.", "End it with return and the result."
        )


class _TypeChecker:
    """Checker that infers the types of a program's variables, statement by statement. Checking a
    block gives the types of the variables after it, or None if the block always returns.
    """

    def __init__(self, tools: Mapping[str, ToolSignature], text: str) -> None:
        self.expressions = ExpressionTypes(tools, text)

    def check_block(self, body: Sequence[ast.stmt], env: _Env | None) -> _Env | None:
        for statement in body:
            if env is None:  # what follows is never reached
                return None
            env = self._check_statement(statement, env)
        return env

    def _check_statement(self, node: ast.stmt, env: _Env) -> _Env | None:
        types = self.expressions
        types.count_steps(node, 1 + len(env) // 30)  # the variables are copied
        match node:
            case ast.Assign(targets=[target], value=value):
                return self._assign(target, types.value_type(value, env), env)
            case ast.AugAssign(target=target, value=value):
                assert isinstance(target, ast.Name | ast.Subscript)
                read = types.value_type(_as_load(target), env)
                added = types.value_type(value, env)
                return self._assign(target, types.arithmetic(node, node.op, read, added), env)
            case ast.Expr(value=value):
                types.type_of(value, env)
                return _note_append(value, types, env)
            case ast.Return(value=value):
                assert value is not None
                types.value_type(value, env)
                return None
            case ast.If():
                return self._check_if(node, env)
            case ast.For():
                return self._check_for(node, env)
        raise AssertionError(node)

    def _check_if(self, node: ast.If, env: _Env) -> _Env | None:
        types = self.expressions
        types.value_type(node.test, env)
        first = self.check_block(node.body, types.narrow(node.test, env, holds=True))
        second = self.check_block(node.orelse, types.narrow(node.test, env, holds=False))
        if first is None or second is None:
            return second if first is None else first
        types.note_unset(first.keys() ^ second.keys())
        return {
            name: limit_size(join_types([kind, second[name]]))
            for name, kind in first.items()
            if name in second
        }

    def _check_for(self, node: ast.For, env: _Env) -> _Env:
        types = self.expressions
        for count in range(_MAX_ROUNDS + 1):
            item = types.item_of(node.iter, env)
            inside = types.bind_target(node.target, item, env)
            after = self.check_block(node.body, inside)
            if after is None:
                problem = "the loop always returns in its first round."
                cure = "Return after the loop, or under an if. Write list(…)[0] for the first item."
                raise types.error(node, problem, cure)
            types.note_unset(after.keys() - env.keys())
            changed = {
                name: ANY
                if count == _MAX_ROUNDS - 1
                else limit_size(join_types([kind, after[name]]))
                for name, kind in env.items()
                if not _has_all(kind, after[name])
            }
            if not changed:
                break
            env = {**env, **changed}
        return env

    def _assign(self, target: ast.expr, value: StaticType, env: _Env) -> _Env:
        if isinstance(target, ast.Name):
            return {**env, target.id: value}
        assert isinstance(target, ast.Subscript)
        types = self.expressions
        owner = types.value_type(target.value, env)
        types.check_item_store(target, owner, value, env)
        if not isinstance(target.value, ast.Name):
            return env
        changed = _with_item(owner, target.slice, value, types, env)
        return {**env, target.value.id: limit_size(changed)}


def _has_all(kind: StaticType, other: StaticType) -> bool:
    return kind is other or join_types([kind, other]) == kind


def _as_load(target: ast.Name | ast.Subscript) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)


def _note_append(call: ast.expr, types: ExpressionTypes, env: _Env) -> _Env:
    """Returns the types of variables after a statement that may append to a list."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[item]):
            if env[name].kind == "list":
                added = join_types([*env[name].items, widen(types.type_of(item, env))])
                return {**env, name: limit_size(list_of(added))}
    return env


def _with_item(
    owner: StaticType, key: ast.expr, value: StaticType, types: ExpressionTypes, env: _Env
) -> StaticType:
    """Returns the type of a list or dict after one of its items was set."""
    if owner.kind == "list":
        return list_of(join_types([*owner.items, value]))
    if owner.kind == "object" and isinstance(key, ast.Constant) and isinstance(key.value, str):
        fields = tuple(({**dict(owner.fields), key.value: value}).items())
        return replace(owner, fields=fields)
    if owner.kind in ("dict", "object"):
        keys, values = items_of_dict(owner)
        return dict_of(
            join_types([keys, widen(types.type_of(key, env))]), join_types([values, value])
        )
    return owner
