"""Mode that computes a module of 16- or 32-bit weights in float64, without a copy of the module.

Two ways to compute the same differ by rounding, in bfloat16 by as much as changes a router's choice of experts. In
float64 they agree to some 1e-13, so a larger difference is one of what is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

_SHORT = frozenset({torch.bfloat16, torch.float16, torch.float32})
# Operations that copy numbers: those taken from a table of all tokens or experts are converted where they are used.
_COPIES = frozenset(
    {torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default}
)


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Context in which operations on numbers of 16 and 32 bits compute in float64 and return that, whatever they are
    asked for. A weight is converted for each operation that uses it, and no longer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # whatever an operation takes and returns
        given, named = tree_map(_dtype, (args, kwargs or {}))
        if func.is_view or func in _COPIES:
            return func(*given, **named)
        if func.overloadpacket.__name__.endswith("_"):  # writes its first argument, which it returns
            return func(given[0], *_wide(given[1:]), **_wide(named))
        return _wide(func(*_wide(given), **_wide(named)))


def _dtype(value: Any) -> Any:  # any argument
    return torch.float64 if isinstance(value, torch.dtype) and value in _SHORT else value


def _wide(values: Any) -> Any:  # any argument or result
    return tree_map_only(torch.Tensor, lambda each: each.double() if each.dtype in _SHORT else each, values)
