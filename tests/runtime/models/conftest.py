"""Where the tests may use a GPU, those of this room use it if their marks ask for kernels or for a
GPU. All others run on the CPU, as on every other machine: what they compare with is computed there,
in float32.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from tests.runtime.kernels import needs_gpu, needs_hopper, needs_kernels

GPU_MARKS = needs_gpu.mark, needs_hopper.mark, needs_kernels.mark


def _uses_gpu(item: pytest.Item) -> bool:
    return any(mark in GPU_MARKS for mark in item.iter_markers("skipif"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hides the GPU from engines, those of shared fixtures and of other processes included."""
    if not torch.cuda.is_available() or _uses_gpu(item):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(
            "sglang_lite.runtime.loading.load_model.why_no_gpu",
            lambda _: "this test is of the CPU.",
        )
        return (yield)
