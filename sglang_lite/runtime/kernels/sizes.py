"""Arithmetic of launches. Triton's own functions of these names take the host 3 µs each, as kernels may call them."""

from __future__ import annotations


def cdiv(size: int, part: int) -> int:
    """Parts that hold `size`."""
    return -(-size // part)


def power_of_2(size: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(size - 1, 0).bit_length()
