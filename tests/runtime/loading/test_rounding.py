"""Rounding to few bits: the nearest numbers, and with errors fed back."""

import pytest
import torch

from sglang_lite.runtime.loading.rounding import RoundingGrid, round_to_nearest, round_with_feedback


def layer(rows, columns, inputs, seed):
    """A matrix, and inputs that depend on each other."""
    random = torch.Generator().manual_seed(seed)
    mixed = (
        torch.randn(columns, columns, generator=random)
        * torch.rand(columns, generator=random).square()
    )
    return torch.randn(rows, columns, generator=random), torch.randn(
        inputs, columns, generator=random
    ) @ mixed


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 48), (4, 96), (8, 32)])
def test_feedback_changes_products_less(bits, group):
    for seed in range(3):
        weight, inputs = layer(40, 96, 300, seed)
        grid = RoundingGrid(bits, group, torch.bfloat16)
        nearest = round_to_nearest(weight, grid).values()
        fed_back = round_with_feedback(weight, inputs.t() @ inputs, grid)
        assert fed_back.scale.shape == (40, 96 // group)
        assert fed_back.scale.dtype == torch.bfloat16
        loss = (inputs @ (fed_back.values() - weight).t()).norm()
        assert loss < 0.8 * (inputs @ (nearest - weight).t()).norm()


def test_the_numbers_are_those_of_the_paper():
    weight, inputs = layer(1, 24, 100, seed=5)
    grid, moments = RoundingGrid(4, 8, torch.float32), inputs.t() @ inputs
    rounded = round_with_feedback(weight, moments.clone(), grid)

    # Column by column with whole inverses, of which a rounded column's row and column are removed.
    left = weight[0].double()
    inverse = (moments.double() + 0.0003 * moments.diagonal().mean() * torch.eye(24)).inverse()
    blocks = moments.diagonal().view(3, 8).sum(1).argsort(descending=True)
    for block in blocks.tolist():
        results = []
        for scale in grid.candidate_scales(left[8 * block :][:8].float()).tolist():
            values, remaining, numbers, loss = left.clone(), inverse.clone(), [], 0.0
            for i in range(8 * block, 8 * block + 8):
                numbers.append(min(max(round(values[i].item() / scale), -8), 7))
                error = (values[i] - numbers[-1] * scale) / remaining[i, i]
                loss += (error.square() * remaining[i, i]).item()
                values -= error * remaining[i]
                remaining = remaining - torch.outer(remaining[i], remaining[i]) / remaining[i, i]
            results.append((loss, numbers, scale, values, remaining))
        _, numbers, scale, left, inverse = min(results, key=lambda result: result[0])
        assert rounded.numbers[0, 8 * block :][:8].tolist() == numbers
        assert rounded.scale[0, block].item() == pytest.approx(scale, rel=1e-3)


@pytest.mark.parametrize(
    "inputs", [torch.zeros(3, 64), torch.ones(1, 64), torch.eye(64)[:5] * 1e4], ids=str
)
def test_few_inputs_are_enough(inputs):
    weight, _ = layer(20, 64, 1, seed=1)
    rounded = round_with_feedback(
        weight, inputs.t() @ inputs, RoundingGrid(4, 32, torch.float16)
    ).values()
    assert (rounded - weight).norm() < 0.3 * weight.norm()
    assert (inputs @ (rounded - weight).t()).norm() <= 0.2 * (inputs @ weight.t()).norm()


def test_parts_of_many_rows_are_rounded_as_each_row_alone(monkeypatch):
    weight, inputs = layer(9, 32, 80, seed=2)
    grid, moments = RoundingGrid(4, 16, torch.float32), inputs.t() @ inputs
    whole = round_with_feedback(weight, moments.clone(), grid)
    monkeypatch.setattr("sglang_lite.runtime.loading.rounding._ELEMENTS", 1)
    alone = round_with_feedback(weight, moments.clone(), grid)
    assert torch.equal(whole.numbers, alone.numbers)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_the_grid_stay(sign):
    """The least number, -8, is that of the block's largest value, whatever its sign."""
    weight = torch.tensor([[*range(-8, 8)], [-8, 7] * 8]) * sign * 0.25
    assert torch.equal(
        round_to_nearest(weight, RoundingGrid(4, 16, torch.float16)).values(), weight
    )


def test_zeros_have_a_scale():
    for rounded in (
        round_to_nearest(torch.zeros(2, 32), RoundingGrid(4, 16, torch.float16)),
        round_with_feedback(torch.zeros(2, 32), torch.eye(32), RoundingGrid(4, 16, torch.float16)),
    ):
        assert rounded.scale.all()
        assert not rounded.values().any()
