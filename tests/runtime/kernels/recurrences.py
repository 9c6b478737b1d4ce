"""Layers with a recurrent state: random inputs, loops over tokens in float64 that share no code with
the package, and cases of kernels.
"""

from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from sglang_lite.runtime.kernels.state_rows import StateRows
from tests.runtime.kernels.test_kernels import DEVICE

PLACES = 9


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def rows_of(*rows):
    """Rows of (tokens, place to read, place to write)."""
    lengths, read, write = zip(*rows)
    return StateRows(
        ints(0, *torch.tensor(lengths).cumsum(0)), ints(*read), ints(*write), max(lengths)
    )


def moved(rows, device):
    return replace(
        rows,
        offsets=rows.offsets.to(device),
        read=rows.read.to(device),
        write=rows.write.to(device),
    )


# Loops over tokens, of one row. A state is float64 and is updated.


def delta_loop(inputs, state):
    q, k, v, decay, beta = (each.double() for each in inputs)
    heads, channels = v.shape[1], k.shape[2]
    out = torch.empty_like(v)
    for t in range(len(v)):
        for h in range(heads):
            key, query = (each[t, h // (heads // k.shape[1])] for each in (k, q))
            key = key / (key.square().sum() + 1e-6).sqrt()
            query = query / (query.square().sum() + 1e-6).sqrt() / channels**0.5
            state[h] *= decay[t, h].exp().expand(channels).unsqueeze(1)
            u = beta[t, h] * (v[t, h] - state[h].T @ key)
            state[h] += torch.outer(key, u)
            out[t, h] = state[h].T @ query
    return out


def mamba2_loop(inputs, state):
    x, b, c, dt, a, d = (each.double() for each in inputs)
    heads = x.shape[1]
    out = torch.empty_like(x)
    for t in range(len(x)):
        for h in range(heads):
            group = h // (heads // b.shape[1])
            state[h] *= (dt[t, h] * a[h]).exp()
            state[h] += dt[t, h] * torch.outer(x[t, h], b[t, group])
            out[t, h] = state[h] @ c[t, group] + d[h] * x[t, h]
    return out


def mamba1_loop(inputs, state):
    x, b, c, dt, a, d = (each.double() for each in inputs)
    out = torch.empty_like(x)
    for t in range(len(x)):
        state *= (dt[t].unsqueeze(1) * a).exp()
        state += torch.outer(dt[t] * x[t], b[t])
        out[t] = state @ c[t] + d * x[t]
    return out


def wkv_loop(inputs, state):
    k, v, r, rate, first = (each.double() for each in inputs)
    total, weight, peak = state
    peak[weight == 0] = -torch.inf
    out = torch.empty_like(v)
    for t in range(len(v)):
        top = torch.maximum(peak, k[t] + first)
        old, new = (peak - top).exp(), (k[t] + first - top).exp()
        out[t] = r[t].sigmoid() * (old * total + new * v[t]) / (old * weight + new)
        top = torch.maximum(peak + rate, k[t])
        old, new = (peak + rate - top).exp(), (k[t] - top).exp()
        total.copy_(old * total + new * v[t])
        weight.copy_(old * weight + new)
        peak.copy_(top)
    return out


def mlstm_loop(inputs, state, eps=1e-6):
    q, k, v, enter, decay = (each.double() for each in inputs)
    heads, dk = k.shape[1:]
    dv = v.shape[2]
    copies = -(-dv // 16)
    out = torch.empty_like(v)
    for h in range(heads):
        memory = state[h, : dk * dv].view(dk, dv)
        norm, peak = state[h, dk * dv :].split((copies * dk, copies))
        for t in range(len(v)):
            before, query = peak[0].clone(), q[t, h] / dk**0.5
            peak[:] = torch.maximum(decay[t, h] + before, enter[t, h])
            kept = (decay[t, h] + before - peak[0]).exp()
            new = (enter[t, h] - peak[0]).exp() * k[t, h]
            memory.copy_(kept * memory + torch.outer(new, v[t, h]))
            norm.copy_(kept * norm + new.repeat(copies))
            weight = torch.maximum((norm[:dk] @ query).abs(), (-peak[0]).exp())
            out[t, h] = query @ memory / (weight + eps)
    return out


def conv_loop(inputs, tail, activation=True):
    x, kernel = (each.double() for each in inputs)
    window = len(kernel) - 1
    seen = [*tail, *x]
    out = torch.empty_like(x)
    for t in range(len(x)):
        total = kernel[window].clone()
        for i in range(window):
            total += kernel[i] * seen[t + i]
        out[t] = functional.silu(total) if activation else total
    tail.copy_(torch.stack(seen[len(seen) - len(tail) :]) if len(tail) else tail)
    return out


# Random inputs by name of the function: those of each token, those of the layer, and its states.


def gates(*shape, decay):
    """Logarithms of decays: "none", "strong", or between."""
    if decay == "none":
        return torch.zeros(shape)
    if decay == "strong":  # with weak ones between
        return torch.where(torch.rand(shape) < 0.5, -50.0, -0.01 * torch.rand(shape))
    return -torch.rand(shape) * 0.3


def delta(tokens, dtype=torch.float32, decay="", by_channel=False, heads=(2, 4), dims=(24, 40)):
    (hk, hv), (dk, dv) = heads, dims
    of_tokens = (
        torch.randn(tokens, hk, dk).to(dtype),
        torch.randn(tokens, hk, dk).to(dtype),
        torch.randn(tokens, hv, dv).to(dtype),
        gates(tokens, hv, *[dk] * by_channel, decay=decay),
        2 * torch.rand(tokens, hv),  # up to 2 in OLMo Hybrid
    )
    return of_tokens, (), torch.randn(PLACES, hv, dk, dv)


def kimi(tokens, dtype=torch.float32, decay=""):
    return delta(tokens, dtype, decay, by_channel=True, heads=(3, 3))


def mamba2(tokens, dtype=torch.float32, decay="", heads=(6, 2), dims=(20, 12)):
    (h, g), (p, n) = heads, dims
    a = {"none": torch.full((h,), -1e-30), "strong": torch.full((h,), -1e3)}.get(
        decay, -torch.rand(h)
    )
    of_tokens = (
        torch.randn(tokens, h, p).to(dtype),
        torch.randn(tokens, g, n).to(dtype),
        torch.randn(tokens, g, n).to(dtype),
        torch.rand(tokens, h) ** 8 if decay == "strong" else torch.rand(tokens, h),
    )
    return of_tokens, (a, torch.randn(h)), torch.randn(PLACES, h, p, n)


def mamba1(tokens, dtype=torch.float32, decay="", channels=40, n=8):
    a = {"none": torch.full((channels, n), -1e-30), "strong": torch.full((channels, n), -1e3)}.get(
        decay, -torch.rand(channels, n)
    )
    of_tokens = (
        torch.randn(tokens, channels).to(dtype),
        torch.randn(tokens, n).to(dtype),
        torch.randn(tokens, n).to(dtype),
        torch.rand(tokens, channels) ** 8 if decay == "strong" else torch.rand(tokens, channels),
    )
    return of_tokens, (a, torch.randn(channels)), torch.randn(PLACES, channels, n)


def rg_lru(tokens, dtype=torch.float32, decay="", channels=40):
    return mamba1(tokens, dtype, decay, channels, n=1)


def wkv(tokens, dtype=torch.float32, decay="", channels=40):
    """Keys of hundreds if decays are extreme, whose exponentials are infinite."""
    rate = {"none": torch.full((channels,), -1e-30), "strong": torch.full((channels,), -50.0)}.get(
        decay, -torch.rand(channels)
    )
    keys = torch.randn(tokens, channels) * (200 if decay else 1)
    of_tokens = (keys, *(torch.randn(tokens, channels) for _ in range(2)))
    states = torch.randn(PLACES, 3, channels)
    states[:, 1] = 1 + states[:, 1].abs()
    return [each.to(dtype) for each in of_tokens], (rate, torch.randn(channels)), states


def mlstm(tokens, dtype=torch.float32, decay="", heads=3, dims=(24, 40)):
    """Gates of hundreds if decays are extreme, whose exponentials are infinite."""
    dk, dv = dims
    copies = -(-dv // 16)
    of_tokens = (
        torch.randn(tokens, heads, dk).to(dtype),
        torch.randn(tokens, heads, dk).to(dtype),
        torch.randn(tokens, heads, dv).to(dtype),
        torch.randn(tokens, heads) * (200 if decay else 1),
        gates(tokens, heads, decay=decay),
    )
    parts = (
        torch.randn(PLACES, heads, dk * dv),
        torch.randn(PLACES, heads, dk).repeat(1, 1, copies),
        torch.randn(PLACES, heads, 1).expand(-1, -1, copies),
    )
    return of_tokens, (), torch.cat(parts, 2)


def conv(tokens, dtype=torch.float32, decay="", channels=40, window=4):
    kernel = torch.randn(window + 1, channels)
    return (
        (torch.randn(tokens, channels).to(dtype),),
        (kernel,),
        torch.randn(PLACES, window - 1, channels).to(dtype),
    )


KINDS = {
    "delta": ("delta_scan", delta, delta_loop),
    "kimi": ("delta_scan", kimi, delta_loop),
    "mamba2": ("mamba2_scan", mamba2, mamba2_loop),
    "mamba1": ("mamba1_scan", mamba1, mamba1_loop),
    "rg-lru": ("mamba1_scan", rg_lru, mamba1_loop),
    "wkv": ("wkv_scan", wkv, wkv_loop),
    "mlstm": ("mlstm_scan", mlstm, mlstm_loop),
    "conv": ("state_conv", conv, conv_loop),
}


def expected(loop, of_tokens, of_layer, states, rows):
    """Outputs, and the pool after the step, in float64."""
    before, after = states.double(), states.double().clone()
    outs = []
    for row, (read, write) in enumerate(zip(rows.read.tolist(), rows.write.tolist())):
        part = slice(rows.offsets[row], rows.offsets[row + 1])
        state = torch.zeros_like(before[0]) if read < 0 else before[read].clone()
        outs.append(loop((*(each[part] for each in of_tokens), *of_layer), state))
        if write >= 0:
            after[write] = state
    return torch.cat(outs), after


ROWS = {
    "one": rows_of((1, 3, 4)),
    "decoding": rows_of((1, 3, 4), (1, -1, 5), (1, 6, 6), (1, 2, -1), (1, -1, -1)),
    "forks": rows_of((1, 3, 4), (1, 3, 5), (1, 3, 6)),
    "chunks": rows_of((63, 1, 1), (64, -1, 2), (65, 3, 4)),
    "mixed": rows_of((1, 1, 1), (130, 2, 3), (1, -1, 4), (17, 2, -1), (1, 7, 7), (2, 6, 8)),
    "forks of prompts": rows_of((20, 3, 4), (70, 3, 5)),
}


# Cases of test_reference.py: on tensors that are parts of others, as projections leave them.


def _case(draw, run, *rows, dtypes=(torch.float32, torch.bfloat16), **options):
    results = []
    for name in rows:
        for dtype in dtypes:
            of_tokens, of_layer, states = draw(int(ROWS[name].offsets[-1]), dtype, **options)
            inputs = [each.to(DEVICE) for each in of_tokens]
            strided = [*map(_in_wider_rows, inputs[:3]), *inputs[3:]]
            pool = states.to(DEVICE, dtype)  # matrix units round to it
            layer = (each.to(DEVICE) for each in of_layer)
            results.append((run(*strided, *layer, pool, moved(ROWS[name], DEVICE)), pool))
    return results


def _in_wider_rows(x):
    """The same numbers, with others between tokens."""
    flat = x.flatten(1)
    return torch.cat((flat, flat), 1)[:, : flat.shape[1]].unflatten(1, x.shape[1:])


def _step(draw, run, **options):
    """Rows of one token alone, and between longer ones, of which nothing is written."""

    def stepped(*arguments):
        out = torch.full_like(arguments[out_like], torch.nan).contiguous()
        run(*arguments, out)
        return out

    out_like = 2 if draw is not mamba2 else 0
    return _case(draw, stepped, "decoding", "mixed", **options)


def _normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rated(run):
    """Columns of one product; the largest and smallest values that a step may meet."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        columns = _normal(5, 14, dtype=dtype) * 30
        results += run(columns[:, :6], columns[:, 8:], -_normal(6).exp(), _normal(6), 2.0)
    return results


def gated_by_head(run):
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for heads, size in ((3, 20), (9, 128)):
            z = _normal(4, heads * size + 8, dtype=dtype)[:, 8:]
            x = _normal(4, heads, size, dtype=dtype)
            results.append(run(x, z, _normal(size, dtype=dtype), 1e-6))
    return results


CASES = {
    "state_conv": lambda run: _case(conv, run, "decoding", "mixed", channels=600),
    "delta_step": lambda run: [_step(delta, run), _step(kimi, run)],
    "delta_scan": lambda run: [_case(draw, run, "decoding", "mixed") for draw in (delta, kimi)],
    "delta_rates": rated,
    "gate_heads": gated_by_head,
    "mamba2_step": lambda run: _step(mamba2, run),
    "mamba2_scan": lambda run: _case(mamba2, run, "decoding", "mixed"),
    "mamba1_scan": lambda run: _case(mamba1, run, "decoding", "mixed"),
    "mlstm_scan": lambda run: _case(mlstm, partial(run, eps=1e-6), "decoding", "mixed"),
    "wkv_scan": lambda run: _case(wkv, run, "decoding", "mixed"),
}
