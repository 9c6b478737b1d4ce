"""Weighted averages of values in RWKV (arXiv:2305.13048) on a CPU. For each channel,

    out = sigmoid(r) (e^p A + e^(first + k) v) / (e^p B + e^(first + k))
    p' = max(p + rate, k);  A <- e^(p + rate - p') A + e^(k - p') v;  B likewise with v = 1

A chunk's p are computed first, because they don't depend on A and B: with t counted from the chunk's
beginning, p[t] - t rate is the largest k[s] - s rate so far. Exponents are at most 0, up to rounding.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.models.layers.state_pool import scan_rows

_CHUNK = 64  # tokens
_EMPTY_PEAK = -1e38  # logarithm of the scale of an empty state


def wkv_scan(
    k: torch.Tensor,
    v: torch.Tensor,
    r: torch.Tensor,
    rate: torch.Tensor,
    first: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Averages the values of each row, in float32.

    Args:
        k, v, r: keys, values and logits of the gate [T, C].
        rate: float32 [C], negative.
        first: float32 [C].
        states: pool [S, 3, C] of A, B and p, float32 (written). A state of zeros is empty.
        rows: rows of the step.

    Returns:
        Outputs [T, C], in the data type of `v`.
    """

    def step(
        k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """Updates the states [R, 3, C] of rows of one token. Returns outputs [R, C]."""
        sums = state[:, :2]
        peak = _peaks(state)
        values = torch.stack((v, torch.ones_like(v)), 1)
        out = _average(sums, peak, values, k + first)
        top = torch.maximum(peak + rate, k)
        kept = (peak + rate - top).exp_().unsqueeze(1)
        sums.mul_(kept).addcmul_((k - top).exp_().unsqueeze(1), values)
        state[:, 2] = top
        return gate * out

    def scan(
        k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """Updates the state [3, C] of a row. Returns outputs [n, C]."""
        out = torch.empty_like(v)
        last = state[:2]
        peak = _peaks(state.unsqueeze(0))
        for begin in range(0, len(v), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            values = torch.stack((v[part], torch.ones_like(v[part])), 1)
            drift = rate.double() * torch.arange(len(values) + 1).unsqueeze(1)
            levels = torch.cat((peak.double(), k[part].double() - drift[1:]))
            peaks = (levels.cummax(0).values + drift).float()
            kept = (peaks[:-1] + rate - peaks[1:]).exp_().unsqueeze(1)
            new = (k[part] - peaks[1:]).exp_().unsqueeze(1) * values
            passed = torch.empty((len(new) + 1, *last.shape))
            passed[0] = last
            for token in range(len(new)):
                last = torch.addcmul(new[token], kept[token], last, out=passed[token + 1])
            out[part] = _average(passed[:-1], peaks[:-1], values, k[part] + first)
            peak = peaks[-1:]
        state[:2] = last
        state[2] = peak[0]
        return gate * out

    inputs = (k.float(), v.float(), r.float().sigmoid())
    return scan_rows(step, scan, inputs, states, rows, torch.empty_like(v))


def _peaks(state: torch.Tensor) -> torch.Tensor:
    """Returns p [R, C] of states [R, 3, C]. B is at least 1 unless a state is empty."""
    return state[:, 2].masked_fill(state[:, 1] == 0, _EMPTY_PEAK)


def _average(
    sums: torch.Tensor, peak: torch.Tensor, values: torch.Tensor, bonus: torch.Tensor
) -> torch.Tensor:
    """Computes averages [n, C] that include the current token.

    Args:
        sums: A and B before the token, [n, 2, C].
        peak: p of A and B, [n, C].
        values: value of the token, then 1, [n, 2, C].
        bonus: first + k, [n, C].
    """
    top = torch.maximum(peak, bonus)
    old = (peak - top).exp_().unsqueeze(1)
    total, weight = torch.addcmul(old * sums, (bonus - top).exp_().unsqueeze(1), values).unbind(1)
    return total / weight
