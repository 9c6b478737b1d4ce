"""The experts of a layer as kernels: routing, order and products, against plain sums over experts."""

from typing import Any

import pytest
import torch

from sglang_lite.runtime.kernels import experts as experts_module
from sglang_lite.runtime.kernels.eight_bits import quantise_rows
from sglang_lite.runtime.kernels.experts import ExpertMatrices, apply_experts
from sglang_lite.runtime.kernels.experts_order import experts_order
from sglang_lite.runtime.kernels.experts_route import experts_route
from sglang_lite.runtime.kernels.experts_tiled import block_rows
from sglang_lite.runtime.kernels.reference import experts_route as route_twin
from tests.runtime.kernels import needs_kernels
from tests.runtime.kernels.test_kernels import DEVICE, GPU, close, normal

pytestmark = needs_kernels

ROUTERS: dict[str, dict[str, Any]] = {  # as families have them
    "qwen3": {"top": 8},
    "qwen2": {"top": 4, "normalise": False},
    "deepseek-v2": {"top": 6, "groups": 8, "kept_groups": 3, "normalise": False, "scale": 16.0},
    "deepseek-v3": {
        "top": 8,
        "scoring": "sigmoid",
        "groups": 8,
        "kept_groups": 4,
        "group_top": 2,
        "scale": 2.5,
    },
}


@pytest.mark.parametrize("experts", [8 * 4, 8 * 20])
@pytest.mark.parametrize("router", ROUTERS)
def test_routing_gives_what_its_twin_gives(router, experts):
    logits, options = normal(5, experts), dict(ROUTERS[router])
    if "scoring" in options:
        options["correction"] = normal(experts)
    top = options.pop("top")
    ids, weights = experts_route(logits, top, **options)
    expected, expected_weights = route_twin.experts_route(logits, top, **options)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_a_softmax_over_the_chosen_is_the_normalised_one():
    logits = normal(4, 32)
    ids, weights = experts_route(logits, 4)
    highest, expected = logits.topk(4)
    assert torch.equal(ids, expected.int())
    torch.testing.assert_close(weights, highest.softmax(-1))


def test_only_experts_of_the_best_groups_are_chosen():
    logits = normal(6, 32)
    ids, _ = experts_route(logits, 4, groups=4, kept_groups=1)
    assert torch.equal(ids // 8, (logits.argmax(-1) // 8).int().unsqueeze(-1).expand(-1, 4))


def test_of_equal_experts_the_first_are_chosen():
    ids, weights = experts_route(torch.zeros(2, 12, device=DEVICE), 3, groups=4, kept_groups=2)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_broken_row_has_weights_that_tell_and_spares_the_others(scoring, broken):
    logits = normal(3, 16)
    logits[1, 5] = broken
    ids, weights = experts_route(logits, 4, scoring=scoring)
    alone, alone_weights = experts_route(logits[::2].contiguous(), 4, scoring=scoring)
    assert torch.equal(ids[::2], alone)
    assert torch.equal(weights[::2], alone_weights)
    if scoring == "sigmoid" and broken == float("inf"):
        assert ids[1, 0] == 5
        assert weights[1].isfinite().all()
    else:
        assert ids[1].tolist() == [0, 1, 2, 3]
        assert weights[1].isnan().all()


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize(
    "ids",
    [
        [[3, 1]], [[2, 5], [5, 2], [2, 0]], [[7, 0]] * 40, [[i % 8, (i + 3) % 8] for i in range(70)],
        [[i % 3, 7] for i in range(2200)],
    ],
    ids=["one token", "three", "all alike", "even", "more than are looked at together"],
)  # fmt: skip
def test_each_pair_is_in_a_block_of_its_expert(ids, size):
    ids = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    blocks = experts_order(ids, 8, size)
    used = int((blocks.experts >= 0).sum())
    assert (blocks.experts[used:] == -1).all()
    pairs = blocks.pairs[: used * size]
    there = pairs < ids.numel()
    assert torch.equal(
        pairs[there].sort().values, torch.arange(ids.numel(), device=DEVICE, dtype=torch.int32)
    )
    assert torch.equal(
        ids.flatten()[pairs[there]], blocks.experts[:used].repeat_interleave(size)[there]
    )
    full = sum(-(-count // size) for count in ids.flatten().bincount().tolist())
    assert used == full


def layer(experts, hidden, inner, dtype, *, biases):
    return ExpertMatrices(
        normal(experts, 2 * inner, hidden, dtype=dtype) / hidden**0.5,
        normal(experts, hidden, inner, dtype=dtype) / inner**0.5,
        normal(experts, 2 * inner, dtype=dtype) if biases else None,
        normal(experts, hidden, dtype=dtype) if biases else None,
    )


def plain(x, ids, weights, own, activation, alpha=1.0, limit=0.0, base=None):
    """The layer's formula in float64, expert by expert."""
    out = (
        torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        if base is None
        else base.double()
    )
    for expert in range(len(own.gate_up)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        y = x[token].double() @ own.gate_up[expert].double().T
        if own.gate_up_bias is not None:
            y += own.gate_up_bias[expert].double()
        gate, up = y.chunk(2, -1)
        if activation == "clamped":
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = (up + 1) * gate * torch.sigmoid(alpha * gate)
        else:
            hidden = torch.nn.functional.silu(gate) * up
        y = hidden @ own.down[expert].double().T
        if own.down_bias is not None:
            y += own.down_bias[expert].double()
        out = out.index_add(0, token, y * weights[token, place].double().unsqueeze(-1))
    return out


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * GPU, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 9, 70])
@pytest.mark.parametrize("activation", ["silu", "clamped"])
def test_experts_give_the_sum_over_experts(tokens, activation, dtype):
    own = layer(6, 40, 24, dtype, biases=activation != "silu")
    x, base = normal(tokens, 40, dtype=dtype), normal(tokens, 40, dtype=dtype)
    ids, weights = experts_route(normal(tokens, 6), 2)
    if dtype == torch.float32 and tokens == 70:
        ids = ids % 2  # blocks of some experts are full, others have no token
        ids[:, 1] = 5
    out = apply_experts(x, ids, weights, own, activation, alpha=1.7, limit=1.5, base=base)
    expected = plain(x, ids, weights, own, activation, 1.7, 1.5, base)
    assert out.dtype == dtype
    close(out, expected, dtype)


@pytest.mark.parametrize("tokens", [2, 20])
def test_a_token_that_is_not_a_number_spares_the_others(tokens):
    own = layer(4, 32, 16, torch.float32, biases=False)
    x, (ids, weights) = normal(tokens, 32), experts_route(normal(tokens, 4), 2)
    expected = apply_experts(x, ids, weights, own, "silu")
    x[1] = float("nan")
    out = apply_experts(x, ids, weights, own, "silu")
    assert out[1].isnan().all()
    others = torch.arange(tokens, device=DEVICE) != 1
    assert torch.equal(out[others], expected[others])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tokens", [3, 20])
def test_weights_in_eight_bits_have_a_scale_for_each_block(tokens):
    def eight(rows, columns):
        values = (normal(3, rows, columns) / columns**0.5).to(torch.float8_e4m3fn)
        return values, 0.5 + torch.rand(3, rows // 128, columns // 128, device=DEVICE)

    def decoded(values, scales):
        return values.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)

    (gate_up, gate_up_scales), (down, down_scales) = eight(2 * 128, 256), eight(256, 128)
    own = ExpertMatrices(gate_up, down, gate_up_scales=gate_up_scales, down_scales=down_scales)
    x = normal(tokens, 256, dtype=torch.bfloat16 if GPU else torch.float16)
    ids, weights = experts_route(normal(tokens, 3), 2)
    out = apply_experts(x, ids, weights, own, "silu")
    full = ExpertMatrices(decoded(gate_up, gate_up_scales), decoded(down, down_scales))
    expected = plain(x, ids, weights, full, "silu")
    limit = 0.05 if GPU else 0.15  # the interpreter rounds some numbers by twice as much
    assert (out.double() - expected).norm() <= limit * expected.norm()  # tokens are in 8 bits, too
    assert torch.equal(
        out,
        apply_experts(
            x, ids, weights, own, "silu", quantised=quantise_rows(x, torch.float8_e4m3fn)
        ),
    )


def test_parts_of_the_output_add_up_to_it():
    own = layer(4, 32, 16, torch.float32, biases=False)
    x, base, (ids, weights) = normal(20, 32), normal(20, 32), experts_route(normal(20, 4), 2)
    parts = apply_experts(x, ids, weights, own, "silu", base=base, parts=True)
    assert parts.shape == (2, 20, 32)
    assert torch.equal(parts.sum(0), apply_experts(x, ids, weights, own, "silu", base=base))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("biases", [False, True])
def test_what_ranks_with_some_of_the_experts_give_adds_up_to_the_layer(tokens, biases):
    whole = layer(7, 32, 16, torch.float32, biases=biases)
    x, base, logits = normal(tokens, 32), normal(tokens, 32), normal(tokens, 7)
    out = torch.zeros_like(x)
    for own in ([0, 1, 2], [3, 4, 5, 6]):
        local_ids = torch.full((1, 7), len(own), dtype=torch.int32, device=DEVICE)
        local_ids[0, own] = torch.arange(len(own), dtype=torch.int32, device=DEVICE)
        parts = (whole.gate_up, whole.down, whole.gate_up_bias, whole.down_bias)
        some: list[Any] = [part if part is None else part[own] for part in parts]
        ids, weights = experts_route(logits, 2, local_ids=local_ids)
        matrices = ExpertMatrices(*some, of=7)
        out += apply_experts(x, ids, weights, matrices, "silu", base=base if own[0] else None)
    close(out, plain(x, *experts_route(logits, 2), whole, "silu", base=base))


def test_matrices_whose_rows_are_no_whole_16_bytes_work():
    own = layer(4, 18, 6, torch.float32, biases=True)
    x, (ids, weights) = normal(9, 18), experts_route(normal(9, 4), 2)
    close(apply_experts(x, ids, weights, own, "silu"), plain(x, ids, weights, own, "silu"))


@pytest.mark.parametrize("tokens", [5, 64, 256, 1000, 8192])
def test_most_experts_of_an_even_router_have_one_block_or_are_full(tokens):
    ids = torch.randint(0, 128, (tokens, 8), generator=torch.Generator().manual_seed(0))
    counts, size = ids.flatten().bincount(minlength=128), block_rows(tokens, 8, 128)
    blocks = -(-counts // size)
    assert (blocks <= 1).float().mean() > 0.98 or blocks.sum() * size < 1.35 * counts.sum()


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("tokens", [3, 40])
def test_a_graph_is_valid_for_any_routing(tokens):
    own = layer(16, 64, 32, torch.bfloat16, biases=False)
    x, logits = normal(tokens, 64, dtype=torch.bfloat16), normal(tokens, 16)

    def run():
        ids, weights = experts_route(logits, 4)
        return ids, weights, apply_experts(x, ids, weights, own, "silu")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights, out = run()
    for chosen in (slice(None), slice(0, 4)):  # all experts, the same for all tokens
        x.copy_(normal(tokens, 64))
        logits.copy_(normal(tokens, 16))
        logits[:, chosen] += 9
        graph.replay()
        close(out, plain(x, ids, weights, own, "silu"), torch.bfloat16)


def test_few_tokens_are_multiplied_pair_by_pair_and_more_by_tiles(monkeypatch):
    called = []
    for name in ("experts_down_few", "experts_down"):
        function = getattr(experts_module, name)
        monkeypatch.setattr(
            experts_module,
            name,
            lambda *args, name=name, function=function, **more: (
                called.append(name) or function(*args, **more)
            ),
        )
    own = layer(4, 32, 16, torch.float32, biases=False)
    for tokens in (experts_module.MAX_PAIRWISE_TOKENS, experts_module.MAX_PAIRWISE_TOKENS + 1):
        apply_experts(normal(tokens, 32), *experts_route(normal(tokens, 4), 2), own, "silu")
    assert called == ["experts_down_few", "experts_down"]
