"""Selective state spaces on a CPU: Mamba 2 (arXiv:2405.21060) and Mamba (arXiv:2312.00752).

    S <- exp(dt a) S + dt x b^T;  out = S c + d x

In Mamba 2, a head's states decay alike, so that a chunk of tokens is computed with products of
matrices. With g the sum of dt a from the chunk's beginning on:

    out[i] = exp(g[i]) S c[i] + sum over j <= i of exp(g[i] - g[j]) (c[i] b[j]) dt[j] x[j] + d x[i]

As in `delta_scan`, only differences <= 0 are exponentiated, and they are taken in float64.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.models.layers.state_pool import scan_rows

_CHUNK = 64  # tokens


def mamba2_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Applies Mamba 2's state space to each row, in float32.

    Args:
        x: inputs [T, H, P].
        b: [T, G, N]. Head h uses group h // (H // G).
        c: [T, G, N].
        dt: float32 [T, H], positive step sizes.
        a: float32 [H], negative.
        d: float32 [H], weight of the input in the output.
        states: pool [S, H, P, N] of float32 or bfloat16 (written).
        rows: rows of the step.

    Returns:
        Outputs [T, H, P], in the data type of `x`.
    """
    repeats = x.shape[1] // b.shape[1]
    wide = x.float()
    inputs = (
        wide * dt.unsqueeze(-1),
        b.float().repeat_interleave(repeats, 1),
        c.float().repeat_interleave(repeats, 1),
        dt * a,
        wide * d.unsqueeze(-1),
    )
    return scan_rows(_step2, _scan2, inputs, states, rows, torch.empty_like(x))


def _step2(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    decay: torch.Tensor,
    skipped: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Updates the states [R, H, P, N] of rows of one token. Returns outputs [R, H, P]."""
    state.mul_(decay.exp()[..., None, None]).addcmul_(x.unsqueeze(-1), b.unsqueeze(-2))
    return (state @ c.unsqueeze(-1)).squeeze(-1) + skipped


def _scan2(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    decay: torch.Tensor,
    skipped: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Updates the state [H, P, N] of a row in chunks. Returns outputs [n, H, P]."""
    out = skipped.clone()
    for begin in range(0, len(x), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        xs, bs, cs = (each[part].transpose(0, 1) for each in (x, b, c))
        total = decay[part].transpose(0, 1).double().cumsum(1)
        between = total.unsqueeze(2) - total.unsqueeze(1)
        above = torch.ones(between.shape[1:], dtype=torch.bool, device=x.device).triu(1)
        kept = between.float().masked_fill_(above, -torch.inf).exp_()
        since_start = total.exp().float().unsqueeze(-1)
        until_end = (total[:, -1:] - total).exp().float().unsqueeze(-1)
        new = (cs @ bs.transpose(1, 2) * kept) @ xs
        new += (cs * since_start) @ state.transpose(1, 2)
        out[part] += new.transpose(0, 1)
        state.mul_(since_start[:, -1:])
        state.baddbmm_((xs * until_end).transpose(1, 2), bs)
    return out


def mamba1_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Applies Mamba's state space to each row, in float32.

    Args:
        x: inputs [T, C].
        b: [T, N].
        c: [T, N].
        dt: float32 [T, C], positive step sizes.
        a: float32 [C, N], negative.
        d: float32 [C], weight of the input in the output.
        states: pool [S, C, N] of float32 or bfloat16 (written).
        rows: rows of the step.

    Returns:
        Outputs [T, C], in the data type of `x`.
    """

    def step(
        x: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        dt: torch.Tensor,
        skipped: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Updates the states [R, C, N] of rows of one token. Returns outputs [R, C]."""
        state.mul_((dt.unsqueeze(-1) * a).exp_()).addcmul_(x.unsqueeze(-1), b.unsqueeze(-2))
        return (state @ c.unsqueeze(-1)).squeeze(-1) + skipped

    def scan(
        x: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        dt: torch.Tensor,
        skipped: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Updates the state [C, N] of a row. Returns outputs [n, C].

        Each number decays at its own rate, so products of matrices can't compute a chunk. Each
        token's operations are on C * N numbers, so the overhead of a loop over tokens matters
        little.
        """
        out = skipped.clone()
        last = state
        for begin in range(0, len(x), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            kept = (dt[part].unsqueeze(-1) * a).exp_()
            new = x[part].unsqueeze(-1) * b[part].unsqueeze(-2)
            passed = torch.empty_like(new)
            for token in range(len(new)):
                last = torch.addcmul(new[token], kept[token], last, out=passed[token])
            out[part] += (passed @ c[part].unsqueeze(-1)).squeeze(-1)
        state.copy_(last)
        return out

    wide = x.float()
    inputs = (wide * dt, b.float(), c.float(), dt, wide * d)
    return scan_rows(step, scan, inputs, states, rows, torch.empty_like(x))
