"""Arithmetic for launching kernels. Triton's own functions of these names cost the host 3 µs a
call, because kernels may call them, too.
"""

from __future__ import annotations


def cdiv(size: int, part: int) -> int:
    """Returns `size` / `part`, rounded up."""
    return -(-size // part)


def round_up_to_power_of_2(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
