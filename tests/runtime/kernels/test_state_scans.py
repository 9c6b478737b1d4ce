"""Layers with a recurrent state, on a CPU: each row gives what a loop over its tokens in float64
gives, which shares no code with them.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.models.layers import delta_scan, mamba_scan, state_conv

LAYERS = SimpleNamespace(
    state_conv=state_conv.state_conv,
    delta_scan=delta_scan.delta_scan,
    mamba2_scan=mamba_scan.mamba2_scan,
    mamba1_scan=mamba_scan.mamba1_scan,
)
PLACES = 9


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def rows_of(*rows):
    """Rows of (tokens, place to read, place to write)."""
    lengths, read, write = zip(*rows)
    return StateRows(
        ints(0, *torch.tensor(lengths).cumsum(0)), ints(*read), ints(*write), max(lengths)
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


def close(own, other, limit):
    assert torch.isfinite(own).all()
    assert (own.double() - other).norm() <= limit * other.norm() + 1e-30, (own - other).abs().max()


ROWS = {
    "one": rows_of((1, 3, 4)),
    "decoding": rows_of((1, 3, 4), (1, -1, 5), (1, 6, 6), (1, 2, -1), (1, -1, -1)),
    "forks": rows_of((1, 3, 4), (1, 3, 5), (1, 3, 6)),
    "chunks": rows_of((63, 1, 1), (64, -1, 2), (65, 3, 4)),
    "mixed": rows_of((1, 1, 1), (130, 2, 3), (1, -1, 4), (17, 2, -1), (1, 7, 7), (2, 6, 8)),
    "forks of prompts": rows_of((20, 3, 4), (70, 3, 5)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_give_what_a_loop_over_their_tokens_gives(kind, rows):
    name, draw, loop = KINDS[kind]
    torch.manual_seed(0)
    rows = ROWS[rows]
    of_tokens, of_layer, states = draw(int(rows.offsets[-1]))
    outs, after = expected(loop, of_tokens, of_layer, states, rows)
    own = getattr(LAYERS, name)(*of_tokens, *of_layer, states, rows)
    close(own, outs, 2e-6)
    close(states, after, 2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["none", "strong"])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_extreme_decays_and_states_stay_exact(kind, decay, size):
    name, draw, loop = KINDS[kind]
    torch.manual_seed(0)
    rows = rows_of((100, 1, 1), (1, 2, 3))
    of_tokens, of_layer, states = draw(101, decay=decay)
    states *= size
    outs, after = expected(loop, of_tokens, of_layer, states, rows)
    close(getattr(LAYERS, name)(*of_tokens, *of_layer, states, rows), outs, 1e-5)
    close(states, after, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ["decoding", "mixed"])
def test_bfloat16_rounds_inputs_outputs_and_states_alone(kind, rows):
    name, draw, loop = KINDS[kind]
    torch.manual_seed(0)
    rows = ROWS[rows]
    of_tokens, of_layer, states = draw(int(rows.offsets[-1]), torch.bfloat16)
    states = states.bfloat16()
    outs, after = expected(loop, of_tokens, of_layer, states, rows)
    own = getattr(LAYERS, name)(*of_tokens, *of_layer, states, rows)
    assert own.dtype == torch.bfloat16
    close(own, outs, 4e-3)
    close(states, after, 4e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cuts", [(1,), (63,), (64,), (65, 66), (20, 90, 91, 149), (64, 128), tuple(range(1, 12))]
)
def test_a_row_in_pieces_gives_what_it_gives_whole(kind, cuts):
    name, draw, _ = KINDS[kind]
    run = getattr(LAYERS, name)
    torch.manual_seed(0)
    of_tokens, of_layer, states = draw(150)
    pool = states.clone()
    whole = run(*of_tokens, *of_layer, states, rows_of((150, -1, 0)))
    pieces = []
    for begin, end in zip((0, *cuts), (*cuts, 150)):
        part = [each[begin:end] for each in of_tokens]
        rows = rows_of((end - begin, 0 if begin else -1, 0))
        pieces.append(run(*part, *of_layer, pool, rows))
    close(torch.cat(pieces), whole.double(), 1e-5)
    close(pool, states.double(), 1e-5)


def test_a_row_without_a_place_leaves_others_alone_whatever_its_numbers():
    for name, draw, _ in KINDS.values():
        for lengths in ((1, 1), (3, 70)):
            rows = rows_of((lengths[0], 0, 1), (lengths[1], -1, -1))
            of_tokens, of_layer, states = draw(sum(lengths))
            alone = states.clone()
            for each in of_tokens:
                each[lengths[0] :] = torch.nan
            own = getattr(LAYERS, name)(*of_tokens, *of_layer, states, rows)[: lengths[0]]
            part = [each[: lengths[0]] for each in of_tokens]
            other = getattr(LAYERS, name)(*part, *of_layer, alone, rows_of((lengths[0], 0, 1)))
            close(own, other.double(), 1e-6)
            close(states, alone.double(), 1e-6)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("rows", ["decoding", "mixed"])
def test_convolutions_of_any_window_with_and_without_activation(window, rows):
    rows = ROWS[rows]
    for activation in (True, False):
        of_tokens, of_layer, states = conv(int(rows.offsets[-1]), window=window)
        outs, after = expected(
            lambda inputs, tail, activation=activation: conv_loop(inputs, tail, activation),
            of_tokens, of_layer, states, rows,
        )  # fmt: skip
        own = LAYERS.state_conv(*of_tokens, *of_layer, states, rows, activation=activation)
        close(own, outs, 1e-6)
        assert torch.equal(states.double(), after)


# transformers


@pytest.mark.parametrize("tokens", [1, 63, 150])
def test_gated_delta_rules_of_transformers(tokens):
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid
    from transformers.models.qwen3_next import modeling_qwen3_next

    for draw, functions in (
        (
            delta,
            (
                modeling_qwen3_next.torch_recurrent_gated_delta_rule,
                modeling_qwen3_next.torch_chunk_gated_delta_rule,
                modeling_olmo_hybrid.torch_chunk_gated_delta_rule,
            ),
        ),
        (
            kimi,
            (
                modeling_kimi_linear.recurrent_kimi_delta_attention,
                modeling_kimi_linear.chunk_kimi_delta_attention,
            ),
        ),
    ):
        of_tokens, _, states = draw(tokens)
        q, k, v, g, beta = (each.unsqueeze(0) for each in of_tokens)
        for function in functions:
            pool = states.clone()
            outs, after = function(
                q, k, v, g=g, beta=beta, initial_state=states[2:3].clone(),
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            close(
                LAYERS.delta_scan(*of_tokens, pool, rows_of((tokens, 2, 4))), outs[0].double(), 1e-5
            )
            close(pool[4], after[0].double(), 1e-5)


@pytest.mark.parametrize("tokens", [1, 63, 150])
@pytest.mark.parametrize("family", ["bamba", "nemotron_h", "granitemoehybrid", "falcon_h1"])
def test_state_spaces_of_transformers(family, tokens):
    import importlib

    of = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (x, b, c, dt), (a, d), states = mamba2(tokens)
    pool, stepped = states.clone(), states.clone()
    outs, after = of.mamba2_chunk_scan(
        x[None],
        dt[None],
        a,
        b[None],
        c[None],
        64,
        D=d,
        initial_states=states[2:3],
        return_final_states=True,
    )
    own = LAYERS.mamba2_scan(x, b, c, dt, a, d, pool, rows_of((tokens, 2, 4)))
    close(own, outs[0].double(), 1e-5)
    close(pool[4], after[0].double(), 1e-5)
    if tokens == 1:
        heads = [
            each.expand(x.shape[1], x.shape[2]) for each in (dt[0].unsqueeze(1), d.unsqueeze(1))
        ]
        state = stepped[2:3].clone()
        decays = a[:, None, None].expand(states[0].shape)
        out = of.mamba2_selective_state_update(state, x, heads[0][None], decays, b, c, D=heads[1])
        close(own, out.double(), 1e-5)
        close(pool[4], state[0].double(), 1e-5)


def test_the_selective_scan_of_transformers():
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan

    (x, b, c, dt), (a, d), states = mamba1(70)
    outs, after = mamba_selective_scan(
        x.T[None], dt.T[None], a, b.T[None], c.T[None], D=d, return_last_state=True
    )
    close(
        LAYERS.mamba1_scan(x, b, c, dt, a, d, states, rows_of((70, -1, 4))),
        outs[0].T.double(),
        1e-5,
    )
    close(states[4], after[0].double(), 1e-5)
