"""Matrix memories of xLSTM (mLSTM, arXiv:2405.04517) on a CPU.

    m' = max(f + m, i);  C <- e^(f + m - m') C + e^(i - m') k v^T;  n likewise with v = 1
    out = C^T q / (max(|n q|, e^-m') + eps)

In a chunk of tokens, let g be the sum of f from the chunk's beginning on, and C and m those before
the chunk. Then m[t] is the largest of g[t] + m and of g[t] - g[s] + i[s] for s <= t, and matrix
products compute the chunk:

    C[t]^T q[t] = e^(g[t] + m - m[t]) C^T q[t]
        + sum over s <= t of e^(g[t] - g[s] + i[s] - m[t]) (q[t] k[s]) v[s]

Exponents are at most 0, except -m', which the cap of the gates bounds. Chunks sum them in float64.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.kv_layout import PANEL
from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.models.layers.state_pool import scan_rows

_CHUNK = 64  # tokens


def mlstm_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    enter: torch.Tensor,
    decay: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    *,
    eps: float,
) -> torch.Tensor:
    """Reads and updates the memories of each row, in float32.

    Args:
        q: queries [T, H, Dk], which are scaled by Dk ** -0.5.
        k: keys [T, H, Dk].
        v: values [T, H, Dv].
        enter: i, float32 [T, H].
        decay: f, float32 [T, H], at most 0.
        states: pool [S, H, numbers of a memory], float32 (written), laid out as `MlstmSpec`
            describes.
        rows: rows of the step.
        eps: added to divisors.

    Returns:
        Outputs [T, H, Dv], in the data type of `v`.
    """
    dk = k.shape[2]
    dv = v.shape[2]

    def step(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        enter: torch.Tensor,
        decay: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Updates the states [R, H, numbers] of rows of one token. Returns outputs [R, H, Dv]."""
        memory, norm, peak = _parts(state, dk, dv)
        top = torch.maximum(decay + peak[..., 0], enter)
        kept = (decay + peak[..., 0] - top).exp_()
        new = k * (enter - top).exp_().unsqueeze(-1)
        memory.mul_(kept[..., None, None]).addcmul_(new.unsqueeze(-1), v.unsqueeze(-2))
        total = torch.addcmul(new, norm[..., 0, :], kept.unsqueeze(-1))
        norm.copy_(total.unsqueeze(-2).expand_as(norm))
        peak.copy_(top.unsqueeze(-1).expand_as(peak))
        out = (q.unsqueeze(-2) @ memory).squeeze(-2)
        return out / _divisors((q * total).sum(-1), top, eps)

    def scan(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        enter: torch.Tensor,
        decay: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Updates the state [H, numbers] of a row in chunks. Returns outputs [n, H, Dv]."""
        out = torch.empty_like(v)
        memory, norms, peaks = _parts(state, dk, dv)
        norm = norms[:, 0].clone()
        peak = peaks[:, 0].double()
        for begin in range(0, len(v), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            qs, ks, vs = (each[part].transpose(0, 1) for each in (q, k, v))
            total = decay[part].T.double().cumsum(1)
            levels = total.unsqueeze(2) - total.unsqueeze(1) + enter[part].T.unsqueeze(1)
            above = torch.ones(levels.shape[1:], dtype=torch.bool).triu(1)
            levels.masked_fill_(above, -torch.inf)
            since = total + peak.unsqueeze(1)
            top = torch.maximum(levels.amax(2), since)
            weights = qs @ ks.transpose(1, 2) * (levels - top.unsqueeze(2)).exp_().float()
            old = (since - top).exp_().float()
            read = weights @ vs + (qs * old.unsqueeze(2)) @ memory
            weight = weights.sum(2) + old * (qs @ norm.unsqueeze(2)).squeeze(2)
            out[part] = (read / _divisors(weight, top.float(), eps)).transpose(0, 1)
            peak = top[:, -1]
            new = ks * (levels[:, -1] - peak.unsqueeze(1)).exp_().float().unsqueeze(2)
            memory.mul_(old[:, -1, None, None]).baddbmm_(new.transpose(1, 2), vs)
            norm = norm * old[:, -1:] + new.sum(1)
        norms.copy_(norm.unsqueeze(1).expand_as(norms))
        peaks.copy_(peak.unsqueeze(1).expand_as(peaks))
        return out

    inputs = (q.float() * dk**-0.5, k.float(), v.float(), enter, decay)
    return scan_rows(step, scan, inputs, states, rows, torch.empty_like(v))


def _parts(
    state: torch.Tensor, dk: int, dv: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns views of C [..., Dk, Dv], and of the copies of n [..., panels, Dk] and m [..., panels]
    in a state [..., numbers].
    """
    panels = -(-dv // PANEL)
    memory, norm, peak = state.split_with_sizes((dk * dv, panels * dk, panels), -1)
    outer = state.shape[:-1]
    return memory.view(*outer, dk, dv), norm.view(*outer, panels, dk), peak


def _divisors(weight: torch.Tensor, peak: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes the divisors of outputs [..., 1] from n q and m."""
    return (torch.maximum(weight.abs(), (-peak).exp()) + eps).unsqueeze(-1)
