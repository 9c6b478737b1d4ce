"""Layers with a recurrent state: each row gives what a loop over its tokens in float64 gives, on a
CPU, in torch twins and in kernels.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from sglang_lite.runtime.kernels import delta_scan as delta_kernels
from sglang_lite.runtime.kernels import mamba1_scan as mamba1_kernels
from sglang_lite.runtime.kernels import mamba2_scan as mamba2_kernels
from sglang_lite.runtime.kernels import mlstm_scan as mlstm_kernels
from sglang_lite.runtime.kernels import state_conv as conv_kernels
from sglang_lite.runtime.kernels import wkv_scan as wkv_kernels
from sglang_lite.runtime.kernels.reference import delta_scan as delta_twin
from sglang_lite.runtime.kernels.reference import mamba1_scan as mamba1_twin
from sglang_lite.runtime.kernels.reference import mamba2_scan as mamba2_twin
from sglang_lite.runtime.kernels.reference import mlstm_scan as mlstm_twin
from sglang_lite.runtime.kernels.reference import state_conv as conv_twin
from sglang_lite.runtime.kernels.reference import wkv_scan as wkv_twin
from sglang_lite.runtime.models.layers import (
    delta_scan,
    mamba_scan,
    mlstm_scan,
    state_conv,
    wkv_scan,
)
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.recurrences import (
    KINDS,
    ROWS,
    conv,
    conv_loop,
    delta,
    expected,
    kimi,
    mamba1,
    mamba2,
    moved,
    rows_of,
)
from tests.runtime.kernels.test_kernels import DEVICE

LAYERS: dict[str, Callable[..., torch.Tensor]] = {
    "state_conv": state_conv.state_conv,
    "delta_scan": delta_scan.delta_scan,
    "mamba2_scan": mamba_scan.mamba2_scan,
    "mamba1_scan": mamba_scan.mamba1_scan,
    "wkv_scan": wkv_scan.wkv_scan,
    "mlstm_scan": partial(mlstm_scan.mlstm_scan, eps=1e-6),
}
TWINS: dict[str, Callable[..., torch.Tensor]] = {
    "state_conv": conv_twin.state_conv,
    "delta_scan": delta_twin.delta_scan,
    "mamba2_scan": mamba2_twin.mamba2_scan,
    "mamba1_scan": mamba1_twin.mamba1_scan,
    "wkv_scan": wkv_twin.wkv_scan,
    "mlstm_scan": partial(mlstm_twin.mlstm_scan, eps=1e-6),
}
KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "state_conv": conv_kernels.state_conv,
    "delta_scan": delta_kernels.delta_scan,
    "mamba2_scan": mamba2_kernels.mamba2_scan,
    "mamba1_scan": mamba1_kernels.mamba1_scan,
    "wkv_scan": wkv_kernels.wkv_scan,
    "mlstm_scan": partial(mlstm_kernels.mlstm_scan, eps=1e-6),
}
ON_CPU = pytest.mark.parametrize("of", [LAYERS, TWINS], ids=["layers", "twins"])


def run(of, name, of_tokens, of_layer, states, rows, **options):
    """Outputs of a function for a pool, which it updates; kernels run on their device."""
    if of is not KERNELS:
        return of[name](*of_tokens, *of_layer, states, rows, **options)
    pool = states.to(DEVICE)
    inputs = [each.to(DEVICE) for each in (*of_tokens, *of_layer)]
    out = of[name](*inputs, pool, moved(rows, DEVICE), **options).cpu()
    states.copy_(pool)
    return out


def close(own, other, limit):
    assert torch.isfinite(own).all()
    assert (own.double() - other).norm() <= limit * other.norm() + 1e-30, (own - other).abs().max()


def check(of, kind, rows, limit, dtype=torch.float32, size=1.0, **options):
    """Compares outputs and the pool with those of a loop."""
    name, draw, loop = KINDS[kind]
    torch.manual_seed(0)
    of_tokens, of_layer, states = draw(int(rows.offsets[-1]), dtype, **options)
    states = size * states.to(dtype)
    outs, after = expected(loop, of_tokens, of_layer, states, rows)
    own = run(of, name, of_tokens, of_layer, states, rows)
    assert own.dtype == dtype
    close(own, outs, limit)
    close(states, after, limit)


def check_pieces(of, kind, cuts):
    """Compares a row that is computed in pieces with the whole."""
    name, draw, _ = KINDS[kind]
    torch.manual_seed(0)
    of_tokens, of_layer, states = draw(150)
    pool = states.clone()
    whole = run(of, name, of_tokens, of_layer, states, rows_of((150, -1, 0)))
    pieces = []
    for begin, end in zip((0, *cuts), (*cuts, 150)):
        part = [each[begin:end] for each in of_tokens]
        rows = rows_of((end - begin, 0 if begin else -1, 0))
        pieces.append(run(of, name, part, of_layer, pool, rows))
    close(torch.cat(pieces), whole.double(), 1e-5)
    close(pool, states.double(), 1e-5)


@ON_CPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_give_what_a_loop_over_their_tokens_gives(of, kind, rows):
    check(of, kind, ROWS[rows], 2e-6)


@needs_kernels
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_in_kernels_give_what_a_loop_over_their_tokens_gives(kind, rows):
    check(KERNELS, kind, ROWS[rows], 1e-5)


EXTREME = rows_of((100, 1, 1), (1, 2, 3))


@ON_CPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["none", "strong"])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_extreme_decays_and_states_stay_exact(of, kind, decay, size):
    # running maxima of 1e4 are float32, with a precision of 5e-4
    check(of, kind, EXTREME, 1e-4 if kind == "mlstm" else 1e-5, size=size, decay=decay)


@needs_kernels
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # by sigmoid, in the interpreter
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["none", "strong"])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_extreme_decays_and_states_stay_exact_in_kernels(kind, decay, size):
    # sums of each channel's decays are float32: a thousand, with a precision of 6e-5
    limit = {"kimi": 5e-4, "mlstm": 1e-4}.get(kind, 2e-5)
    check(KERNELS, kind, EXTREME, limit, size=size, decay=decay)


@ON_CPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ["decoding", "mixed"])
def test_bfloat16_rounds_inputs_outputs_and_states_alone(of, kind, rows):
    check(of, kind, ROWS[rows], 4e-3, torch.bfloat16)


@needs_kernels
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ["decoding", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_kernels(kind, rows, dtype):
    check(KERNELS, kind, ROWS[rows], 2e-2, dtype)


@ON_CPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cuts",
    [(1,), (63,), (64,), (65, 66), (20, 90, 91, 149), (64, 128), tuple(range(1, 12))],
)
def test_a_row_in_pieces_gives_what_it_gives_whole(of, kind, cuts):
    check_pieces(of, kind, cuts)


@needs_kernels
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(1,), (64,), (20, 90, 91, 149)])
def test_a_row_in_pieces_gives_what_it_gives_whole_in_kernels(kind, cuts):
    check_pieces(KERNELS, kind, cuts)


@pytest.mark.filterwarnings("ignore:(All-NaN slice|invalid value)")  # in the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1, 1), (3, 70)])
@pytest.mark.parametrize(
    "of", [LAYERS, pytest.param(KERNELS, marks=needs_kernels)], ids=["layers", "kernels"]
)
def test_a_row_without_a_place_leaves_others_alone_whatever_its_numbers(of, kind, lengths):
    name, draw, _ = KINDS[kind]
    first = lengths[0]
    of_tokens, of_layer, states = draw(sum(lengths))
    alone = states.clone()
    for each in of_tokens:
        each[first:] = torch.nan
    rows = rows_of((first, 0, 1), (lengths[1], -1, -1))
    own = run(of, name, of_tokens, of_layer, states, rows)[:first]
    part = [each[:first] for each in of_tokens]
    other = run(of, name, part, of_layer, alone, rows_of((first, 0, 1)))
    close(own, other.double(), 1e-6)
    close(states, alone.double(), 1e-6)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("rows", ["decoding", "mixed"])
@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize(
    "of", [LAYERS, TWINS, pytest.param(KERNELS, marks=needs_kernels)], ids=["layers", "twins", "kernels"]
)  # fmt: skip
def test_convolutions_of_any_window_with_and_without_activation(of, window, rows, activation):
    rows = ROWS[rows]
    of_tokens, of_layer, states = conv(int(rows.offsets[-1]), window=window)
    outs, after = expected(
        lambda inputs, tail: conv_loop(inputs, tail, activation), of_tokens, of_layer, states, rows
    )
    own = run(of, "state_conv", of_tokens, of_layer, states, rows, activation=activation)
    close(own, outs, 1e-6)
    assert torch.equal(states.double(), after)


SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": ("delta", {"heads": (1, 2), "dims": (128, 128)}),
    "OLMo Hybrid": ("delta", {"heads": (2, 2), "dims": (96, 192)}),
    "Kimi Linear": ("delta", {"heads": (2, 2), "dims": (128, 128), "by_channel": True}),
    "Nemotron-H": ("mamba2", {"heads": (4, 2), "dims": (64, 128)}),
    "Falcon-H1": ("mamba2", {"heads": (2, 1), "dims": (128, 256)}),
    "xLSTM": ("mlstm", {"heads": 2, "dims": (256, 512)}),
}


@needs_kernels
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float16, 5e-3), (torch.float32, 2e-5)]
)
def test_kernels_are_right_at_the_sizes_that_models_have(name, dtype, limit):
    """Tiles of each size are compiled otherwise on a GPU."""
    kind, options = SIZES[name]
    check(KERNELS, kind, rows_of((133, 1, 1), (1, 2, 3)), limit, dtype, **options)


@needs_kernels
@pytest.mark.parametrize("dims", [(96, 192), (16, 16), (8, 20)])
def test_kernels_of_the_delta_rule_have_heads_of_any_size(dims):
    """96 and 192 in OLMo Hybrid."""
    for by_channel in (False, True):
        of_tokens, of_layer, states = delta(70, by_channel=by_channel, heads=(1, 2), dims=dims)
        rows = rows_of((69, 1, 1), (1, 2, 3))
        pool = states.clone()
        outs = run(TWINS, "delta_scan", of_tokens, of_layer, pool, rows)
        close(run(KERNELS, "delta_scan", of_tokens, of_layer, states, rows), outs.double(), 1e-5)
        close(states, pool.double(), 1e-5)


@needs_kernels
def test_keys_that_are_alike_invert_without_loss():
    """Powers of the triangle of their products, 1 everywhere, would overflow."""
    torch.manual_seed(0)
    q, k, v, decay, beta = delta(64)[0]
    k[:] = k[0]
    states = torch.zeros(1, v.shape[1], k.shape[2], v.shape[2])
    for strength in (1.0, 2.0):
        of_tokens = (q, k, v, torch.zeros_like(decay), torch.full_like(beta, strength))
        outs = run(TWINS, "delta_scan", of_tokens, (), states.clone(), rows_of((64, -1, 0)))
        for of in (LAYERS, KERNELS):
            own = run(of, "delta_scan", of_tokens, (), states.clone(), rows_of((64, -1, 0)))
            close(own, outs.double(), 1e-4)


@needs_kernels
def test_rows_beyond_a_block_of_offsets_find_their_chunks():
    """Kernels look for a chunk's row in blocks of 128."""
    lengths = [1, 3, 20, 2, 1] * 27
    rows = rows_of(*((length, -1, row) for row, length in enumerate(lengths)))
    of_tokens, of_layer, _ = conv(sum(lengths), channels=8)
    pools = torch.zeros(2, len(lengths), 3, 8)
    outs = [
        run(of, "state_conv", of_tokens, of_layer, pool, rows) for of, pool in zip((LAYERS, KERNELS), pools)
    ]  # fmt: skip
    close(outs[1], outs[0].double(), 1e-6)
    assert torch.equal(*pools)


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
                LAYERS["delta_scan"](*of_tokens, pool, rows_of((tokens, 2, 4))),
                outs[0].double(),
                1e-5,
            )
            close(pool[4], after[0].double(), 1e-5)


@pytest.mark.parametrize("tokens", [1, 63, 150])
@pytest.mark.parametrize("family", ["bamba", "nemotron_h", "granitemoehybrid", "falcon_h1"])
def test_state_spaces_of_transformers(family, tokens):
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
    own = LAYERS["mamba2_scan"](x, b, c, dt, a, d, pool, rows_of((tokens, 2, 4)))
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
        LAYERS["mamba1_scan"](x, b, c, dt, a, d, states, rows_of((70, -1, 4))),
        outs[0].T.double(),
        1e-5,
    )
    close(states[4], after[0].double(), 1e-5)
