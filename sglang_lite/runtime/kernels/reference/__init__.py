"""Torch twins of Triton kernels: `reference/NAME.py` has the functions of `kernels/NAME.py`, with their parameters.

Written to be read; the tests compare kernels with them. `attention.py` and `kv_copy.py` are also what the CPU runs, and
need no Triton.
"""
