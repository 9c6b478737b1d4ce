"""Torch references of Triton kernels: `reference/NAME.py` has the functions of `kernels/NAME.py`,
with the same parameters. A kernel `NAME_hopper` that replaces `NAME` on Hopper GPUs has the same
reference as `NAME`.

They are written for readability, and tests compare the kernels with them. The CPU runs
`attention.py`, `blocks.py` and `kv_copy.py`, which need no Triton.
"""
