"""Launches of kernels at little cost for the host.

At each launch, Triton determines which variant of a kernel the arguments need, which takes 20 µs and more. Here,
variants are cached by what decides that: data types and alignment of tensors, Triton's own classification of numbers,
and values of constants. Unknown variants are launched by Triton itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import BaseBackend
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

try:
    from triton._C.libtriton import native_specialize_impl as _specialized
except ImportError:  # Triton 3.5
    _specialized = None


class KernelLauncher:
    """Triton kernel, launched as usual: `kernel[grid](*arguments, **constants_and_options)`. Hooks of profilers are
    called only at the first launch of a variant.

    Args:
        function: Triton function, whose constants must come last.
    """

    def __init__(self, function: Any) -> None:  # object of Triton
        self.function = function
        constant = [parameter.is_constexpr for parameter in function.params]
        self._arguments = constant.index(True) if True in constant else len(constant)
        assert all(constant[self._arguments :]), "constants come last"
        self._constant_slots = (None,) * (
            len(constant) - self._arguments
        )  # placeholders for constants, which are compiled in
        self._kernels: dict[tuple[Any, ...], CompiledKernel] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        key, values = variant_key(arguments)
        device = driver.active.get_current_device() if key else None
        key += device, *options, *options.values()
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self.function.run(*arguments, grid=grid, warmup=False, **options)
            if device is not None and isinstance(kernel, CompiledKernel) and len(arguments) == self._arguments:
                self._kernels[key] = kernel
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        kernel.run(
            x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *values, *self._constant_slots
        )  # fmt: skip


def cached_launch(function: Any) -> Any:  # object of Triton
    """Decorator of kernels that the host launches. Leaves functions of the interpreter unchanged."""
    return KernelLauncher(function) if isinstance(function, JITFunction) and _specialized is not None else function


def variant_key(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:  # any types that kernels take
    """Returns a key that is at least as specific as Triton's choice of a variant, and the arguments in the driver's
    form.

    Both are empty if a tensor has no memory, as nothing can be launched then.
    """
    found: list[Any] = []
    values: list[Any] = []
    for argument in arguments:
        of = type(argument)
        if of is torch.Tensor:
            address = argument.data_ptr()
            if not address:
                return (), []
            found.append((argument.dtype, address % 16) if address % 16 else argument.dtype)
            values.append(address)
        else:
            if argument is None:
                found.append(None)
            elif of is int or of is float or of is bool:
                found.append(_number_key(argument))
            else:
                found.append(_specialized(BaseBackend, argument, False, True, True))
            values.append(argument)
    return tuple(found), values


@functools.lru_cache(maxsize=4096, typed=True)  # typed: 1, 1.0 and True are distinct kinds
def _number_key(number: float) -> Any:
    """Returns Triton's classification of a number: its type, and if it is 1, which is compiled in, or divisible by
    16."""
    return _specialized(BaseBackend, number, False, True, True)
