"""Variants of kernels that launches ask for: told and compiled where the card is not.

Tensors of the device "meta" have no memory, but all that Triton compiles by: formats, alignment, sizes. So whatever
launches kernels tells here which variants it needs, for any card, and leaves them compiled in Triton's cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
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

    def compile(self) -> Any:  # of Triton
        """Triton's compiled kernel, from its cache or left there."""
        return triton.compile(self._source, target=self._target, options=self.launch)


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
            tell(Variant(f"{function.__module__.rpartition('.')[2]}.{function.__name__}", key, launch, source, target))
        return True  # nothing to run

    nothing = SimpleNamespace(
        get_current_device=lambda: card, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    before = triton.knobs.runtime.jit_cache_hook
    own = driver._active  # noqa: SLF001 # asking for it by name would look for a GPU
    triton.knobs.runtime.jit_cache_hook = hook
    driver.set_active(nothing)
    try:
        with standing_for(card):
            yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before
        driver.set_active(own)
