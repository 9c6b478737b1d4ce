"""Variants of kernels that launches ask for: told and compiled where the card is not.

Tensors of the device "meta" have no memory, but all that Triton compiles by: formats, alignment, sizes. So whatever
launches kernels tells here which variants it needs, for any card, and leaves them compiled in Triton's cache.
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

from sglang_lite.runtime.kernels.card import Card, standing_for


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel as it is compiled for one kind of arguments.

    Attributes:
        name: of the kernel's module and function.
        key: distinguishes its variants; the same in every process.
        launch: num_warps, num_stages and whatever else is set.
    """

    name: str
    key: str
    launch: dict[str, Any]
    _source: Any  # of Triton
    _target: GPUTarget

    @property
    def digest(self) -> str:
        """Short name, the same in every process."""
        return _digest(self.name, self.key)

    @property
    def content(self) -> str:
        """Digest of all that it is compiled from: the kernel's source and what that calls, arguments, options, card."""
        return hashlib.sha256(f"{self._source.hash()} {self.launch} {self._target}".encode()).hexdigest()

    @property
    def launcher(self) -> str:
        """Name of the C code that launches it, which kernels of the same arguments share."""
        return f"{self.name} {list(self._source.signature.values())}"

    def compile(self) -> Any:  # of Triton
        """Triton's compiled kernel, from its cache or left there."""
        with _active(SimpleNamespace(get_current_target=lambda: self._target)):
            return triton.compile(self._source, target=self._target, options=self.launch)

    def compile_launcher(self) -> None:
        """Leaves the C code that launches the kernel compiled in the cache, which Triton has for each kind of arguments
        up to 3.6."""
        if hasattr(nvidia, "make_launcher") and _has_driver():
            nvidia.CudaLauncher(self._source, self.compile().metadata)


def compile_driver() -> None:
    """Leaves the C code by which Triton calls the driver compiled in the cache."""
    if _has_driver():
        nvidia.CudaUtils()


def _has_driver() -> bool:
    """True where the driver's library is, with which such code is linked."""
    try:
        return bool(nvidia.library_dirs())
    except (AssertionError, OSError):  # as Triton says that
        return False


@contextmanager
def telling(card: Card, tell: Callable[[Variant], object]) -> Iterator[None]:
    """Context in which launches on tensors of "meta" run nothing: each of their variants is told, once.

    Args:
        card: that the tensors stand for.
    """
    major, minor = card.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    seen: set[tuple[Any, str]] = set()

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # Triton's name
        function = fn.jit_function
        if (function, key) not in seen:
            seen.add((function, key))
            source = function.ASTSource(function, compile["signature"], compile["constants"], compile["configs"][0])
            options = json.loads(compile["specialization_data"])["options"]
            launch = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
            tell(Variant(_name(function), key, launch, source, target))
        return True  # nothing to run

    nothing = SimpleNamespace(
        get_current_device=lambda: card, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    with _hooked(hook), _active(nothing), standing_for(card):
        yield


@contextmanager
def awaiting(wait_for: Callable[[str], object]) -> Iterator[None]:
    """Context in which kernels that this process has not launched yet are first waited for: by their variants'
    digests."""

    def hook(*, key: str, fn: Any, **_: Any) -> bool:
        wait_for(_digest(_name(fn.jit_function), key))
        return False  # it is to run

    with _hooked(hook):
        yield


def _name(function: Any) -> str:  # of Triton
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def _digest(name: str, key: str) -> str:
    return hashlib.sha256(f"{name} {key}".encode()).hexdigest()


@contextmanager
def _hooked(hook: Callable[..., bool]) -> Iterator[None]:
    """Context in which Triton calls a hook before it looks for a kernel in its cache."""
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


@contextmanager
def _active(stand_in: SimpleNamespace) -> Iterator[None]:
    """Context in which Triton asks no GPU's driver."""
    own = driver._active  # noqa: SLF001 # asking for it by name would look for a GPU
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver.set_active(own)
