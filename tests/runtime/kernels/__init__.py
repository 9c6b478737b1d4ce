"""Kernels run on the GPU where the tests may use one, else under Triton's interpreter."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.attention import registry
from sglang_lite.runtime.attention.base import AttentionRequirements

_patch_lang = interpreter._patch_lang


def _patch_once(fn):
    """Replacement for the interpreter's patch of `tl`, which it looks for in all of `tl` at each call of a function in
    a kernel, too: half of its time."""
    seen = [module for module in fn.__globals__.values() if module is tl or module is tl.core]
    if any(tl.core.is_builtin(module.load) for module in seen):
        return _patch_lang(fn)
    return SimpleNamespace(restore=lambda: None)  # the kernel's call restores what it has patched


interpreter._patch_lang = _patch_once


@triton.jit
def _count(out, n):
    total = 0
    for i in range(0, n):
        total += i
    tl.store(out, total)


BACKENDS, PACKAGES = registry.OWN, registry.PACKAGES  # of attention


def skip_without(package: str) -> None:
    """Skips a test of attention by a package that is not there, or has no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = torch.float16
    try:
        registry.make_attention(
            package, AttentionRequirements(2, 1, 64, half, half, device, most_rows=1, most_chunks=0)
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


needs_kernels = pytest.mark.skipif(
    not _run(), reason=f"the interpreter of Triton {triton.__version__} does not run loops with numpy {np.__version__}"
)

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)
