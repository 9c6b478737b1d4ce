"""Gated delta rule on a CPU (Gated DeltaNet, arXiv:2412.06464, and Kimi Delta Attention,
arXiv:2510.26692).

A head's state S maps keys to values. Each token decays it, and corrects the value of its key:

    S <- exp(decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  out = S^T q

In a chunk of tokens, with g the sum of the decays from the chunk's beginning on, the corrections
solve a triangular system:

    u[i] + beta[i] sum over j < i of exp(g[i] - g[j]) (k[i] k[j]) u[j] = beta[i] (v[i] - (exp(g[i]) S)^T k[i])

Only differences g[i] - g[j] <= 0 are exponentiated, so nothing overflows. They are taken in
float64: g is large where the decay is strong, and the decays between two tokens may be small.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.models.layers.state_pool import scan_rows

_CHUNK = 64  # tokens of a chunk if a head's channels decay alike
_CHANNEL_CHUNK = 16  # if each channel has its own decay: the factors are [chunk, chunk, Dk]
_EPSILON = 1e-6  # of the norms of queries and keys


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Applies the gated delta rule to each row, in float32.

    Args:
        q: queries [T, Hk, Dk], which are L2-normalised and scaled by Dk ** -0.5.
        k: keys [T, Hk, Dk], which are L2-normalised. Value head h uses key head h // (Hv // Hk).
        v: values [T, Hv, Dv].
        decay: float32 [T, Hv], or [T, Hv, Dk] if each channel has its own; logarithms, at most 0.
        beta: float32 [T, Hv].
        states: pool [S, Hv, Dk, Dv] of float32 or bfloat16 (written).
        rows: rows of the step.

    Returns:
        Outputs [T, Hv, Dv], in the data type of `v`.
    """
    repeats = v.shape[1] // k.shape[1]
    inputs = (
        (_normalise(q) * q.shape[-1] ** -0.5).repeat_interleave(repeats, 1),
        _normalise(k).repeat_interleave(repeats, 1),
        v.float(),
        decay.view(*v.shape[:2], -1),
        beta.unsqueeze(-1),
    )
    return scan_rows(_step, _scan, inputs, states, rows, torch.empty_like(v))


def _normalise(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON)


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Updates the states [R, Hv, Dk, Dv] of rows of one token. Returns outputs [R, Hv, Dv]."""
    kept = decay.exp()
    # the state is read once for both products: S^T q = (exp(decay) S)^T q + (k q) u
    by_key, by_query = (torch.stack((k * kept, q * kept), -2) @ state).unbind(-2)
    u = beta * (v - by_key)
    state.mul_(kept.unsqueeze(-1)).addcmul_(k.unsqueeze(-1), u.unsqueeze(-2))
    return by_query + (k * q).sum(-1, keepdim=True) * u


def _scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Updates the state [Hv, Dk, Dv] of a row in chunks. Returns outputs [n, Hv, Dv]."""
    chunk = _CHUNK if decay.shape[-1] == 1 else _CHANNEL_CHUNK
    out = torch.empty_like(v)
    for begin in range(0, len(v), chunk):
        part = slice(begin, begin + chunk)
        qs, ks, vs, decays, betas = (each[part].transpose(0, 1) for each in (q, k, v, decay, beta))
        total = decays.double().cumsum(1)
        by_keys, by_queries = _decayed_products(qs, ks, total)
        since_start = total.exp().float()
        until_end = (total[:, -1:] - total).exp().float()
        u = torch.linalg.solve_triangular(
            betas * by_keys,
            betas * (vs - (ks * since_start) @ state),
            upper=False,
            unitriangular=True,
        )
        out[part] = ((qs * since_start) @ state + by_queries @ u).transpose(0, 1)
        state.mul_(since_start[:, -1].unsqueeze(-1))
        state.baddbmm_((ks * until_end).transpose(1, 2), u)
    return out


def _decayed_products(
    q: torch.Tensor, k: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns products of keys with keys, and of queries with keys, decayed between their tokens.

    Args:
        q: [H, n, Dk].
        k: [H, n, Dk].
        total: float64 [H, n, 1] or [H, n, Dk], sums of decays.

    Returns:
        Two lower triangles [H, n, n], zero above the diagonal.
    """
    between = total.unsqueeze(2) - total.unsqueeze(1)
    above = torch.ones(between.shape[1:3], dtype=torch.bool, device=q.device).triu(1)
    kept = between.float().masked_fill_(above.unsqueeze(-1), -torch.inf).exp_()
    if total.shape[-1] == 1:
        both = (
            torch.stack((k, q), 1) @ k.unsqueeze(1).transpose(2, 3) * kept.squeeze(-1).unsqueeze(1)
        )
    else:
        keys = k.unsqueeze(1) * kept  # [H, i, j, Dk]
        both = (keys @ torch.stack((k, q), -1)).movedim(-1, 1)
    by_keys, by_queries = both.unbind(1)
    return by_keys, by_queries
