"""Torch references of Triton kernels: `reference/NAME.py` has the functions of `kernels/NAME.py`,
with the same parameters. A kernel only for Hopper GPUs shares the reference of the kernel that it
replaces there: `NAME_hopper` that of `NAME`.

They are written for readability, and tests compare the kernels with them. The CPU runs
`attention.py`, `blocks.py` and `kv_copy.py`, which need no Triton.
"""
