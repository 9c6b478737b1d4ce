"""Torch twins of `kernels.state_step`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.reference.delta_scan import delta_scan
from sglang_lite.runtime.kernels.reference.mamba2_scan import mamba2_scan
from sglang_lite.runtime.kernels.reference.state_rows import select_single
from sglang_lite.runtime.kernels.state_rows import StateRows


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    _store_single(delta_scan(q, k, v, decay, beta, states, select_single(rows)), rows, out)


def mamba2_step(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    _store_single(mamba2_scan(x, b, c, dt, a, d, states, select_single(rows)), rows, out)


def _store_single(result: torch.Tensor, rows: StateRows, out: torch.Tensor) -> None:
    """Copies the outputs of the rows with one token."""
    at = rows.offsets[:-1][rows.offsets.diff() == 1].long()
    out[at] = result[at]
