"""Kernels run on the GPU where the tests may use one, else under Triton's interpreter."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _count(out, n):
    total = 0
    for i in range(0, n):
        total += i
    tl.store(out, total)


BACKENDS = ("triton", "torch")  # of attention


def _run() -> bool:
    out = torch.zeros(1, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        _count[(1,)](out, 4)
    except Exception:  # whatever it is, it is not ours
        return False
    return out.item() == 6


needs_kernels = pytest.mark.skipif(
    not _run(), reason=f"the interpreter of Triton {triton.__version__} does not run loops with numpy {np.__version__}"
)
