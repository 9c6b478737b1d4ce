"""Programmatic dependent launch (CUDA programming guide, 3.2.7): a kernel is set up while the
previous one drains.

A kernel launched with `pdl_options(device)` calls `start_next()` as soon as the next kernel would
not be in its way. It calls `wait()` before it reads anything that another kernel writes, or writes
anything that another kernel reads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.device_properties import properties_of


@triton.jit
def wait(PDL: tl.constexpr):
    """Waits until all previous kernels have finished and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Lets the next kernel be set up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def pdl_options(device: torch.device) -> dict[str, Any]:  # Triton's launch options
    """Returns keyword arguments for a launch that may overlap with others. GPUs before Hopper don't
    support this, so there the arguments disable it.
    """
    return _OVERLAPPED if properties_of(device).has_pdl else _PLAIN


def first_kernel_options(device: torch.device) -> dict[str, Any]:  # Triton's launch options
    """Returns keyword arguments for a step's first kernel. It starts only when all previous kernels
    have finished, so the kernels after it need not wait for those.
    """
    return {"PDL": properties_of(device).has_pdl}


_OVERLAPPED: dict[str, Any] = {"PDL": True, "launch_pdl": True}
_PLAIN: dict[str, Any] = {"PDL": False}
