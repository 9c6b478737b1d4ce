"""Torch twins of Triton kernels: `reference/NAME.py` has the functions of `kernels/NAME.py`, with the same parameters.
A kernel for Hopper GPUs alone has the twin of the kernel that it replaces there, `NAME` of `NAME_hopper`.

They are written for readability, and tests compare the kernels with them. The CPU runs `attention.py`, `blocks.py` and
`kv_copy.py`, which need no Triton.
"""
