"""Triton's interpreter in half of its time, with the same results.

It spends nearly all of it on making records of types, again and again the same ones: here they are kept.
"""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_block_init, _tensor_init = tl.block_type.__init__, tl.tensor.__init__
_np_dtype = interpreter._get_np_dtype
_semantic = type(interpreter.interpreter_semantic)
_broadcast = _semantic.broadcast_impl_value
_blocks: dict[tuple[Any, ...], tl.block_type] = {}
_np_dtypes: dict[str, Any] = {}


def _patch_once(fn):
    """Replacement for the interpreter's patch of `tl`, which it looks for in all of `tl` at each call of a function in
    a kernel, too: half of its time."""
    seen = [module for module in fn.__globals__.values() if module is tl or module is tl.core]
    if any(tl.core.is_builtin(module.load) for module in seen):
        return _patch_lang(fn)
    return SimpleNamespace(restore=lambda: None)  # the kernel's call restores what it has patched


def _block(self, element_ty, shape):
    """Replacement for `block_type.__init__`: blocks of one shape and type have one dictionary. Gluon's have a layout, too."""
    if type(self) is not tl.block_type:
        _block_init(self, element_ty, shape)
        return
    key = (str(element_ty), *(getattr(size, "value", size) for size in shape))
    if key not in _blocks:
        _block_init(self, element_ty, shape)
        _blocks[key] = self
    self.__dict__ = vars(_blocks[key])


def _tensor(self, handle, type):
    """Replacement for `tensor.__init__`: tensors of one type share all but their handle, which is kept with the type."""
    like = vars(type).get("_tensor")
    if like is None:
        _tensor_init(self, handle, type)
        vars(type)["_tensor"] = {name: value for name, value in vars(self).items() if name != "handle"}
    else:
        vars(self).update(like, handle=handle)


def _broadcast_unequal(self, lhs, rhs):
    """Replacement for `broadcast_impl_value`, which is mostly asked for blocks of one shape."""
    left, right = lhs.type, rhs.type
    if type(left) is type(right) is tl.block_type and list(left.shape) == list(right.shape):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _known_np_dtype(kind):
    """Replacement for `_get_np_dtype`, which writes its table anew at each call."""
    name = kind.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype(kind)
    return _np_dtypes[name]


def install() -> None:
    """Puts the replacements in place. Each sum of integers is only checked for its room with `SGLANG_LITE_CASES=all`."""
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _known_np_dtype
    tl.block_type.__init__ = _block
    tl.tensor.__init__ = _tensor
    _semantic.broadcast_impl_value = _broadcast_unequal
    checked = os.environ.get("SGLANG_LITE_CASES") == "all"
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=checked)
