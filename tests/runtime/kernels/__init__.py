"""Kernels run on the GPU where the tests may use one, else under Triton's interpreter."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.attention import registry
from sglang_lite.runtime.attention.base import AttentionRequirements
from tests.runtime.kernels import fast_interpreter

fast_interpreter.install()


@triton.jit
def _count(out, n):
    total = 0
    for i in range(0, n):
        total += i
    tl.store(out, total)


BACKENDS, PACKAGES = registry.BUILTIN_BACKENDS, registry.PACKAGE_BACKENDS  # of attention


def skip_without(package: str) -> None:
    """Skips a test of attention by a package that is not there, or has no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = torch.float16
    try:
        registry.make_attention(
            package, AttentionRequirements(2, 1, 64, half, half, device, max_rows=1, max_chunks=0)
        )
    except ParameterError as error:
        pytest.skip(str(error))


def _run() -> bool:
    out = torch.zeros(1, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        _count[(1,)](out, 4)
    except Exception:  # whatever it is, it is not ours
        return False
    return out.item() == 6


INTERPRETED = triton.knobs.runtime.interpret


def _missing() -> str:
    """Why kernels can't run here; only read where they can't."""
    if INTERPRETED:
        return f"the interpreter of Triton {triton.__version__} does not run loops with numpy {np.__version__}"
    return "kernels need a GPU that Triton can use, or TRITON_INTERPRET=1"


needs_kernels = pytest.mark.skipif(not _run(), reason=_missing())

needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="kernels on the CPU need Triton's interpreter"
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="no Hopper GPU",
)
