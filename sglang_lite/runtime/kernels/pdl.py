"""Programmatic dependent launch (CUDA programming guide, 3.2.7): a kernel is set up while the one before it drains.

A kernel that is launched with `overlapped(device)` calls `start_next()` as soon as the next one would not be in its
way. It calls `wait()` before it touches anything that another kernel writes, or writes anything that another reads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.card import card_of


@triton.jit
def wait(PDL: tl.constexpr):
    """Waits until all kernels before are through and what they wrote can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The next kernel may be set up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def overlapped(device: torch.device) -> dict[str, Any]:  # as Triton takes them
    """Keywords of such a launch: on GPUs that can (Hopper and newer)."""
    return _OVERLAPPED if card_of(device).overlaps else _PLAIN


def first_of_step(device: torch.device) -> dict[str, Any]:  # as Triton takes them
    """Keywords of a step's first overlapped kernel: it begins when all before is through, so that those after it need
    not wait for that."""
    return {"PDL": card_of(device).overlaps}


_OVERLAPPED: dict[str, Any] = {"PDL": True, "launch_pdl": True}
_PLAIN: dict[str, Any] = {"PDL": False}
