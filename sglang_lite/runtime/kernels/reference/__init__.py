"""Torch twins of Triton kernels: `reference/NAME.py` has the functions of `kernels/NAME.py`, with the same parameters.

They are written for readability, and tests compare the kernels with them. The CPU runs `attention.py` and `kv_copy.py`,
which need no Triton.
"""
