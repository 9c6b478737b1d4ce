"""CPU matmuls of many bfloat16 rows that use a checkpoint's quantised blocks directly. Compiled
from `block_product_many.cpp` for processors with AVX512_BF16. The reference is torch's matmul with
the decoded matrix.

Weights are rounded to bfloat16, and sums are float32. The result of a row doesn't depend on the
other rows.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from sglang_lite.runtime.kernels.block_product import PackedBlocks

SOURCE = Path(__file__).with_suffix(".cpp")
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_int64


def supports_avx512_bf16(library: ctypes.CDLL) -> bool:
    """Returns whether the library was compiled for a processor with AVX512_BF16."""
    return hasattr(library, "product_4")


class _Product(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("blocks", "bias")),
        *((name, _LONG) for name in ("outputs", "inputs")),
        *((name, _POINTER) for name in ("x", "out")),
        *((name, _LONG) for name in ("rows", "apart")),
    ]


class ManyRowsProduct:
    """Multiplies many rows by a quantised matrix [N, K].

    Args:
        library: compiled `block_product_many.cpp`, for which `supports_avx512_bf16` returns True.
        packed: the matrix.
        bias: bfloat16 [N], or None.
    """

    def __init__(
        self, library: ctypes.CDLL, packed: PackedBlocks, bias: torch.Tensor | None
    ) -> None:
        self.packed = packed
        self.bias = bias
        self._run = library[f"product_{packed.kind}"]
        self._run.argtypes = [ctypes.POINTER(_Product), _INT]

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes x times the matrix to `out`.

        Args:
            x: bfloat16 [rows, K], contiguous.
            out: bfloat16 [rows, N], each row contiguous (written).
        """
        assert x.dtype == out.dtype == torch.bfloat16
        packed = self.packed
        bias = self.bias
        product = _Product(
            packed.data.data_ptr(),
            None if bias is None else bias.data_ptr(),
            packed.outputs,
            packed.inputs,
            x.data_ptr(),
            out.data_ptr(),
            len(x),
            out.stride(0),
        )
        self._run(product, torch.get_num_threads())
