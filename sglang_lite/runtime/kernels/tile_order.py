"""Order in which the programs of a matmul process its tiles."""

from __future__ import annotations

import triton
import triton.language as tl

# tiles of rows whose programs are adjacent for one tile of outputs
_TOGETHER: tl.constexpr = tl.constexpr(8)


@triton.jit
def tile_of_program(row_tiles, output_tiles):
    """Returns the tile of rows and the tile of outputs of this program. Programs that read the same
    weights are adjacent, so that most of these are read from memory once.
    """
    program = tl.program_id(0)
    group = program // (_TOGETHER * output_tiles)
    inside = program % (_TOGETHER * output_tiles)
    size = tl.minimum(row_tiles - group * _TOGETHER, _TOGETHER)
    return group * _TOGETHER + inside % size, inside // size
