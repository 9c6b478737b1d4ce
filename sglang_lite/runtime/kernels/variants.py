"""Determines which kernel variants a launch needs, and compiles them, on machines without the GPU.

Tensors on the device "meta" have no memory, but everything that Triton compiles for: data types,
alignment and sizes. So code that launches kernels can report here which variants it needs, for any
GPU, and have them compiled into Triton's cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from sglang_lite.runtime.kernels.device_properties import DeviceProperties, assume_device


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """Kernel as compiled for one combination of argument types.

    Attributes:
        name: name of the kernel's module and function.
        key: Triton's key of the variant among those of its kernel; the same in every process.
        launch: num_warps, num_stages and further options.
    """

    name: str
    key: str
    launch: dict[str, Any]
    _source: Any  # object of Triton
    _target: GPUTarget

    @property
    def digest(self) -> str:
        """Short name of the variant, the same in every process."""
        return _digest_variant(self.name, self.key)

    @property
    def content(self) -> str:
        """Digest of everything that the variant is compiled from: source of the kernel and of the
        functions it calls, arguments, options and GPU.
        """
        return hashlib.sha256(
            f"{self._source.hash()} {self.launch} {self._target}".encode()
        ).hexdigest()

    @property
    def launcher(self) -> str:
        """Identifier of the C code that launches the variant. Variants with the same argument types
        share it.
        """
        return f"{self.name} {list(self._source.signature.values())}"

    def compile(self) -> Any:  # object of Triton
        """Returns Triton's compiled kernel, from its cache if possible. Otherwise compiles it into
        the cache.
        """
        with _active(SimpleNamespace(get_current_target=lambda: self._target)):
            return triton.compile(self._source, target=self._target, options=self.launch)

    def compile_launcher(self) -> None:
        """Compiles the C code that launches the kernel into Triton's cache. Only Triton up to 3.6
        has such code.
        """
        if hasattr(nvidia, "make_launcher") and _has_driver():
            nvidia.CudaLauncher(self._source, self.compile().metadata)


def compile_driver_bindings() -> None:
    """Compiles the C code through which Triton calls the GPU driver into Triton's cache."""
    if _has_driver():
        nvidia.CudaUtils()


def _has_driver() -> bool:
    """Returns whether the GPU driver's library is installed. The C code is linked with it."""
    try:
        return bool(nvidia.library_dirs())
    except (AssertionError, OSError):  # Triton's errors for a missing library
        return False


@contextmanager
def intercept_launches(
    properties: DeviceProperties, on_variant: Callable[[KernelVariant], object]
) -> Iterator[None]:
    """Skips launches on "meta" tensors within a `with` block, and calls `on_variant` once with each
    variant that they would launch.

    Args:
        properties: properties of the GPU that the tensors stand for.
        on_variant: callback for each variant.
    """
    major, minor = properties.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    seen: set[tuple[Any, str]] = set()

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # Triton's names
        function = fn.jit_function
        if (function, key) not in seen:
            seen.add((function, key))
            source = function.ASTSource(
                function, compile["signature"], compile["constants"], compile["configs"][0]
            )
            options = json.loads(compile["specialization_data"])["options"]
            launch = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in options.items()
            }
            on_variant(KernelVariant(_name(function), key, launch, source, target))
        return True  # True: skip the launch

    nothing = SimpleNamespace(
        get_current_device=lambda: properties,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    with _install_hook(hook), _active(nothing), assume_device(properties):
        yield


@contextmanager
def waiting_for_variants(wait_for: Callable[[str], object]) -> Iterator[None]:
    """Calls `wait_for` with a kernel variant's digest before this process first launches that
    variant, within a `with` block.
    """

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        wait_for(_digest_variant(_name(fn.jit_function), key))
        return False  # False: launch it

    with _install_hook(hook):
        yield


def _name(function: Any) -> str:  # object of Triton
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def _digest_variant(name: str, key: str) -> str:
    return hashlib.sha256(f"{name} {key}".encode()).hexdigest()


@contextmanager
def _install_hook(hook: Callable[..., bool]) -> Iterator[None]:
    """Installs a hook, within a `with` block, that Triton calls before it looks for a kernel in its
    cache.
    """
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


@contextmanager
def _active(stand_in: SimpleNamespace) -> Iterator[None]:
    """Replaces Triton's GPU driver with a stand-in within a `with` block."""
    own = driver._active  # noqa: SLF001 # the public property would look for a GPU
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver.set_active(own)
