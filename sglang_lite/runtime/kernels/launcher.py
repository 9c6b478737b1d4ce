"""Launches Triton kernels with little overhead on the host.

At each launch, Triton determines which variant of a kernel the arguments need, which takes 20 µs or
more. Here, variants are cached by what determines them: data types and alignment of tensors,
Triton's own classification of numbers, and values of constants. Unknown variants are launched by
Triton itself.

Cached launches pass addresses to the driver, which reads whatever is there. An address on another
device ends all work of the process with an illegal memory access. So tensors on other devices have
keys of their own, and the launcher checks the devices of each new key.
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

from sglang_lite.errors import SglError

try:
    from triton._C.libtriton import native_specialize_impl as _specialized
except ImportError:  # Triton 3.5
    _specialized = None


_PINNED = "pinned"  # memory of the host that GPUs read, too
_EMPTY = "empty"


class KernelLauncher:
    """Triton kernel, launched as usual: `kernel[grid](*arguments, **constants_and_options)`. Hooks
    of profilers are called only at the first launch of a variant.

    Args:
        function: Triton function, whose constants must come last.

    Raises:
        SglError: at a launch, if the GPU can't read a tensor's memory.
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
        device = driver.active.get_current_device()
        key, values = variant_key(arguments, device)
        if not key:
            device = None
        key += device, *options, *options.values()
        kernel = self._kernels.get(key)
        if kernel is None:
            self._check_devices(arguments)
            kernel = self.function.run(*arguments, grid=grid, warmup=False, **options)
            if (
                device is not None
                and isinstance(kernel, CompiledKernel)
                and len(arguments) == self._arguments
            ):
                self._kernels[key] = kernel
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        kernel.run(
            x,
            y,
            z,
            stream,
            kernel.function,
            kernel.packed_metadata,
            None,
            None,
            None,
            *values,
            *self._constant_slots,
        )

    def _check_devices(self, arguments: tuple[Any, ...]) -> None:
        """Raises an SglError if the current device can't read the memory of some argument."""
        current = driver.active.get_current_device()
        if not isinstance(current, int):  # stand-in for an absent GPU: nothing is launched
            return
        for parameter, argument in zip(self.function.params, arguments, strict=False):
            memory = _argument_memory(argument)
            if memory is None or _memory_device_code(memory) in (current, _PINNED, _EMPTY):
                continue
            raise SglError(
                f"{self.function.__name__}: the kernel runs on device {_device_name(current)}, and its argument "
                f"{parameter.name!r} is on {memory.device}.",
                hint=f"Make the tensor with device={_device_name(current)!r}, or pin the host's memory that it is in.",
            )


def cached_launch(function: Any) -> Any:  # object of Triton
    """Wraps a kernel in a `KernelLauncher`, through which the host launches it. Returns functions
    of Triton's interpreter unchanged.
    """
    return (
        KernelLauncher(function)
        if isinstance(function, JITFunction) and _specialized is not None
        else function
    )


# any types of kernels
def variant_key(arguments: tuple[Any, ...], device: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Returns a key that distinguishes at least as many kernel variants as Triton does. Also
    returns the arguments as the driver takes them. Tensors on a device other than `device`, a torch
    device index, get separate keys.

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
            kind: Any = (argument.dtype, address % 16) if address % 16 else argument.dtype
            if argument.get_device() != device:
                kind = kind, _memory_device_code(argument)
            values.append(address)
        else:
            if argument is None:
                kind = None
            elif of is int or of is float or of is bool:
                kind = _number_key(argument)
            else:
                kind = _specialized(BaseBackend, argument, False, True, True)
                memory = _argument_memory(argument)
                if memory is not None and memory.get_device() != device:
                    kind = kind, _memory_device_code(memory)
            values.append(argument)
        found.append(kind)
    return tuple(found), values


def _argument_memory(argument: Any) -> Any:
    """Returns the object that holds the memory of a kernel argument: the argument itself or, for a
    descriptor, its base. Returns None for arguments without memory, such as numbers.
    """
    memory = argument.base if hasattr(argument, "block_shape") else argument
    return memory if hasattr(memory, "data_ptr") else None


def _memory_device_code(memory: Any) -> Any:  # of a tensor or a descriptor
    """Returns the torch index of the device that holds a tensor's memory, or -1 for the host.
    Returns `_PINNED` for pinned host memory, and `_EMPTY` for a tensor without elements.
    """
    if isinstance(memory, torch.Tensor):
        if not memory.numel():
            return _EMPTY
        if memory.device.type == "cpu" and memory.is_pinned():
            return _PINNED
    return memory.get_device()


@functools.lru_cache(maxsize=4096, typed=True)  # typed: 1, 1.0 and True are distinct kinds
def _number_key(number: float) -> Any:
    """Returns how Triton classifies a number: by its type, by whether it is 1 (which is compiled
    in), and by whether it is divisible by 16.
    """
    return _specialized(BaseBackend, number, False, True, True)


def _device_name(number: int) -> str:
    """Returns torch's name of the device with this index."""
    return "cpu" if number < 0 else f"cuda:{number}"
