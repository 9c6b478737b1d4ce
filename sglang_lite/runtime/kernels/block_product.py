"""CPU matmuls that use a checkpoint's quantised blocks directly, compiled from `block_product.cpp`.
The reference is torch's matmul with the decoded matrix.

Activations are rounded to 16-bit integers with a scale for each 32 of a row, which loses a
hundredth of what bfloat16 loses. The result of a row doesn't depend on the other rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_lite.runtime.kernels.huge_pages import allocate_huge_page_tensor

SOURCE = Path(__file__).with_suffix(".cpp")
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_int64
_OUTPUTS = 16  # outputs in a register; the outputs of a matrix must be a multiple
BLOCK = 32  # columns of a block


def is_supported() -> bool:
    """Returns whether the processor has the necessary instructions."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def supports_shape(outputs: int, inputs: int) -> bool:
    """Returns whether matrices [outputs, inputs] can be multiplied: outputs must be a multiple of
    16, inputs of 32.
    """
    return outputs % _OUTPUTS == 0 and inputs % BLOCK == 0


class Matrix(ctypes.Structure):
    """C structure `Matrix` of block_product.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("round", "multiply", "blocks", "bias")),
        ("outputs", _LONG),
        ("inputs", _LONG),
    ]


# Bytes that 32 numbers take in each kind of blocks: the numbers, and 2 for each scale and minimum.
KIND_BYTES = {"4": 20, "8": 34, "8_minimum": 36, "8_halves": 36}


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """Matrix [outputs, inputs] in the layout that the compiled matmuls read.

    Attributes:
        kind: "4" for 4-bit numbers with a minimum; "8" for 8-bit ones without, "8_minimum" with a
            minimum, "8_halves" with a scale for each half of a block.
        data: uint8, its blocks.
    """

    kind: str
    data: torch.Tensor
    outputs: int
    inputs: int

    @classmethod
    def allocate_packed(cls, kind: str, outputs: int, inputs: int) -> PackedBlocks:
        """Returns a matrix with uninitialised blocks, for the caller to write."""
        size = outputs * inputs // BLOCK * KIND_BYTES[kind]
        return cls(kind, allocate_huge_page_tensor(size), outputs, inputs)


def pack_blocks(
    library: ctypes.CDLL, q: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None
) -> PackedBlocks:
    """Packs a quantised matrix for the compiled matmuls.

    Args:
        library: compiled `block_product.cpp`.
        q: uint8 [N, K] with values 0 … 15, or int8 [N, K]; K must be a multiple of 32, N of 16.
        scale: [N, K / 32], scale of each block; or [N, K / 16], of each half of a block, for int8
            without a minimum. Rounded to float16.
        minimum: [N, K / 32], value of 0 in each block, rounded to float16; None, which int8 allows,
            means 0.
    """
    outputs, inputs = q.shape
    if q.dtype == torch.uint8:
        kind = "4"
    elif minimum is not None:
        kind = "8_minimum"
    else:
        kind = "8" if scale.shape[1] * BLOCK == inputs else "8_halves"
    packed = PackedBlocks.allocate_packed(kind, outputs, inputs)
    halves = [None if x is None else x.half().contiguous() for x in (scale, minimum)]
    run = library[f"pack_{kind}"]
    run.argtypes = [*[_POINTER] * 3, _LONG, _INT, _POINTER]
    run(
        q.contiguous().data_ptr(),
        *map(_address_or_none, halves),
        outputs,
        inputs,
        packed.data.data_ptr(),
    )
    return packed


class BlockProduct:
    """Linear layer with a quantised matrix [N, K]: maps activations [rows, K] to [rows, N].

    Args:
        library: compiled `block_product.cpp`.
        packed: the matrix.
        bias: [N] or None.

    Attributes:
        packed, bias: the arguments.
        matrices: C structures for the functions that multiply, by data type of activations, which
            must also be the bias's.
    """

    def __init__(
        self, library: ctypes.CDLL, packed: PackedBlocks, bias: torch.Tensor | None
    ) -> None:
        self.packed = packed
        self.bias = bias
        self._outputs = packed.outputs
        self._inputs = packed.inputs
        self.matrices = {
            dtype: Matrix(
                _function_address(library, f"round_{name}"),
                _function_address(library, f"multiply_{packed.kind}_{name}"),
                packed.data.data_ptr(),
                _address_or_none(bias),
                packed.outputs,
                packed.inputs,
            )
            for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
        }
        self._run = library["product"]
        self._run.argtypes = [ctypes.POINTER(Matrix), _POINTER, _POINTER, _LONG, _POINTER, _INT]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, rows = x.contiguous(), len(x)
        out = x.new_empty((rows, self._outputs))
        # integers, scales and sums
        buffer = torch.empty(rows * (self._inputs // 2 + 2 * self._inputs // BLOCK))
        matrix = self.matrices[x.dtype]
        self._run(
            matrix, x.data_ptr(), out.data_ptr(), rows, buffer.data_ptr(), torch.get_num_threads()
        )
        return out


def decode_blocks(
    library: ctypes.CDLL,
    q: torch.Tensor,
    scale: torch.Tensor,
    minimum: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Dequantises a matrix: writes scale * q + minimum to `out`, rounded to bfloat16.

    Args:
        library: compiled `block_product.cpp`.
        q: uint8 or int8 [N, K].
        scale, minimum: float32 [N, groups of a row]; the minimum may be None for 0.
        out: bfloat16 [N, K] (written).

    All are contiguous.
    """
    run = library["decode_uint8" if q.dtype == torch.uint8 else "decode_int8"]
    run.argtypes = [*[_POINTER] * 3, _LONG, _INT, _POINTER]
    run(
        q.data_ptr(),
        scale.data_ptr(),
        _address_or_none(minimum),
        scale.numel(),
        q.numel() // scale.numel(),
        out.data_ptr(),
    )


def _function_address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(library[name], _POINTER).value


def _address_or_none(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
