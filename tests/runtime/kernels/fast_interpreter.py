"""Triton's interpreter in a part of its time, with the same results.

It spends nearly all of it on making records of types, and on asking them what they are, again and
again the same ones: here they, and the answers, are kept.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_block_init, _tensor_init = tl.block_type.__init__, tl.tensor.__init__
_np_dtype = interpreter._get_np_dtype
_semantic = type(interpreter.interpreter_semantic)
_broadcast, _cast, _check_types = (
    _semantic.broadcast_impl_value,
    _semantic.cast,
    _semantic.binary_op_type_checking_impl,
)
_computed, _make_constant = _semantic.computation_type_impl, _semantic.scalar_constant
_make_range = interpreter.InterpreterBuilder.create_make_range
_PLAIN = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)}
_OFFSETS = {"int32", "int64"}
_NUMBERS = {"fp32", "bf16", "fp16", "int1", *_OFFSETS}
_unwrap, _equal = core._unwrap_if_constexpr, tl.dtype.__eq__
_blocks: dict[tuple[Any, ...], tl.block_type] = {}
_np_dtypes: dict[str, Any] = {}
_computation_types: dict[tuple[Any, ...], tl.dtype] = {}
_operands: dict[tuple[str, str], tuple[Any, ...]] = {}
_constants: dict[tuple[int, str], tl.tensor] = {}
_ranges: dict[tuple[int, int], interpreter.TensorHandle] = {}
_builtins: dict[Any, list[tuple[str, Any]]] = {}


def _patch_once(fn):
    """Replacement for the interpreter's patch of `tl`, which it looks for in all of `tl` at each
    call of a function in a kernel, too: half of its time.
    """
    seen = [module for module in fn.__globals__.values() if module is tl or module is core]
    if any(core.is_builtin(module.load) for module in seen):
        return _patch_lang(fn)
    return SimpleNamespace(restore=lambda: None)  # the kernel's call restores what it has patched


def _patch_found(pkg, builder, scope):
    """Replacement for `_patch_builtin`, which looks for the functions of a module, and wraps them,
    at each launch.
    """
    if pkg not in _builtins:
        found = [each for each in inspect.getmembers(pkg) if core.is_builtin(each[1])]
        _builtins[pkg] = [(name, _interpreted(member)) for name, member in found]
    for name, member in _builtins[pkg]:
        scope.set_attr(pkg, name, member)


def _interpreted(member):
    """A function of `tl`, which the interpreter calls without looking whether it does."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args, _semantic=None, **kwargs):
        return inner(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    return call


def _block(self, element_ty, shape):
    """Replacement for `block_type.__init__`: blocks of one shape and type have one dictionary.
    Gluon's have a layout, too.
    """
    if type(self) is not tl.block_type:
        _block_init(self, element_ty, shape)
        return
    key = (
        element_ty.name,
        *[size if type(size) is int else getattr(size, "value", size) for size in shape],
    )
    if key not in _blocks:
        _block_init(self, element_ty, shape)
        _blocks[key] = self
    self.__dict__ = vars(_blocks[key])


def _tensor(self, handle, type):
    """Replacement for `tensor.__init__`: tensors of one type share all but their handle, which is
    kept with the type.
    """
    like = vars(type).get("_tensor")
    if like is None:
        _tensor_init(self, handle, type)
        vars(type)["_tensor"] = {
            name: value for name, value in vars(self).items() if name != "handle"
        }
    else:
        vars(self).update(like, handle=handle)


def _broadcast_unequal(self, lhs, rhs):
    """Replacement for `broadcast_impl_value`, which is mostly asked for blocks of one shape."""
    left, right = lhs.type, rhs.type
    blocks = type(left) is type(right) is tl.block_type
    if blocks and (left.shape is right.shape or list(left.shape) == list(right.shape)):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _typed_alike(self, lhs, rhs):
    """Operands with the type that `broadcast_impl_value` gives them and the numbers that they have:
    an operator is numpy's, which broadcasts them itself.
    """
    key = lhs.type.name, rhs.type.name
    if key not in _operands:
        _operands[key] = tuple(
            None if wide is own else wide.type
            for own, wide in zip((lhs, rhs), _broadcast(self, lhs, rhs))
        )
    left, right = _operands[key]
    return lhs if left is None else tl.tensor(
        lhs.handle, left
    ), rhs if right is None else tl.tensor(rhs.handle, right)


def _check_unequal(
    self, lhs, rhs, left_ptr=False, right_ptr=False, arithmetic_check=True, div_or_mod=False
):
    """Replacement for `binary_op_type_checking_impl`: numbers of one type are computed in it,
    unless they are divided.
    """
    plain = type(lhs) is tl.tensor and not div_or_mod
    if plain and arithmetic_check and type(rhs) is int and lhs.dtype.name in _OFFSETS:
        rhs = self._cast_to_computation_type(rhs, lhs.dtype)
    if plain and type(rhs) is tl.tensor:
        left, right = lhs.dtype, rhs.dtype
        if (left is right and left.name in _NUMBERS) or (
            left_ptr and type(left) is tl.pointer_type and right.name in _OFFSETS
        ):
            if type(self) is _semantic:
                return _typed_alike(self, lhs, rhs)
            return self.broadcast_impl_value(lhs, rhs)  # which Gluon has its own of
    return _check_types(self, lhs, rhs, left_ptr, right_ptr, arithmetic_check, div_or_mod)


def _unwrap_by_type(o):
    """Replacement for `_unwrap_if_constexpr`, which is mostly asked for what holds no constant."""
    return o if type(o) in _PLAIN else _unwrap(o)


def _same(self, other):
    """Replacement for `dtype.__eq__`: most types are compared with themselves."""
    return self is other or _equal(self, other)


def _cast_other(self, input, dst_ty, fp_downcast_rounding=None):
    """Replacement for `cast`, mostly to the type that a tensor has."""
    return (
        input
        if input.type.scalar is dst_ty.scalar
        else _cast(self, input, dst_ty, fp_downcast_rounding)
    )


def _known_computation_type(self, *of):
    """Replacement for `computation_type_impl`, which asks types for their kinds."""
    key = tuple([each if type(each) is bool else each.name for each in of])
    if key not in _computation_types:
        _computation_types[key] = _computed(self, *of)
    return _computation_types[key]


def _known_constant(self, value, dtype):
    """Replacement for `scalar_constant`: a kernel computes with the same few integers."""
    if type(value) is not int:
        return _make_constant(self, value, dtype)
    key = value, dtype.name
    if key not in _constants:
        _constants[key] = _make_constant(self, value, dtype)
    return _constants[key]


def _known_range(self, kind, start, stop):
    """Replacement for `create_make_range`, whose numbers nothing may write to."""
    key = start, stop
    if key not in _ranges:
        _ranges[key] = _make_range(self, kind, start, stop)
        _ranges[key].data.setflags(write=False)
    return _ranges[key]


def _known_np_dtype(kind):
    """Replacement for `_get_np_dtype`, which writes its table anew at each call."""
    name = kind.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype(kind)
    return _np_dtypes[name]


def install() -> None:
    """Puts the replacements in place, unless kernels are compiled, which calls the same functions
    with other arguments. Each sum of integers is only checked for its room with
    `SGLANG_LITE_CASES=all`.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter._patch_lang = _patch_once
    interpreter._patch_builtin = _patch_found
    interpreter._get_np_dtype = _known_np_dtype
    tl.block_type.__init__ = _block
    tl.tensor.__init__ = _tensor
    _semantic.broadcast_impl_value = _broadcast_unequal
    _semantic.binary_op_type_checking_impl = _check_unequal
    _semantic.computation_type_impl = _known_computation_type
    _semantic.scalar_constant = _known_constant
    _semantic.cast = _cast_other
    interpreter.InterpreterBuilder.create_make_range = _known_range
    core._unwrap_if_constexpr = _unwrap_by_type
    tl.dtype.__eq__ = _same
    checked = os.environ.get("SGLANG_LITE_CASES") == "all"
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=checked)
