"""What kernels of 4-bit numbers and their twins are asked for in test_reference.py."""

import torch

from sglang_lite.runtime.kernels.packed_weight import pack_weight
from sglang_lite.runtime.kernels.reference.experts_order import experts_order
from tests.runtime.kernels.test_kernels import DEVICE, normal

EXPERT_IDS = torch.tensor(
    [[1, 4], [4, 0], [1, 3], [4, 1], [3, 1]], dtype=torch.int32, device=DEVICE
)
SOME_ELSEWHERE = EXPERT_IDS.masked_fill(EXPERT_IDS == 4, 5)  # of five experts here


def packed_matrices():
    """With one zero everywhere, with a zero a group, which may be between two numbers, and of a
    code book.
    """
    for outputs, inputs, group, kind in (
        (130, 640, 64, "integers"),
        (40, 96, 32, "zeros"),
        (33, 80, 16, "e2m1"),
    ):
        yield _packed(outputs, inputs, group, kind)


def _packed(outputs, inputs, group, kind):
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    by = torch.rand(outputs, inputs // group, device=DEVICE).div(64).half()
    zeros = torch.randint(0, 34, by.shape, device=DEVICE) / 2 if kind == "zeros" else None
    return pack_weight(
        numbers,
        by,
        zeros=zeros,
        zero=8 if kind == "integers" else 0,
        kind="e2m1" if kind == "e2m1" else "integers",
    )


def packed_decoded(run):
    return [
        run(weight, dtype)
        for weight in packed_matrices()
        for dtype in (torch.float32, torch.float16)
    ]


def packed_few(run):
    results = []
    for weight in packed_matrices():
        outputs, inputs = weight.shape
        results += [
            run(normal(rows, inputs), weight, bias)
            for rows in (1, 17)
            for bias in (None, normal(outputs))
        ]
        results += [run(normal(3, inputs), weight, None, "silu")] if outputs % 2 == 0 else []
        results += [run(normal(5, inputs), weight, None, parts=parts).sum(0) for parts in (2, 3)]
    return results


def packed_few_on_hopper(run):
    """Groups of half a block, of a whole one and of a slice; outputs and inputs that fill up no
    tile.
    """
    results = []
    for rows, outputs, inputs, group, kind in (
        (64, 200, 1152, 128, "zeros"), (200, 200, 1152, 128, "zeros"), (100, 130, 768, 256, "integers"),
        (5, 66, 800, 32, "zeros"), (40, 66, 800, 32, "zeros"),
    ):  # fmt: skip
        weight, x = (
            _packed(outputs, inputs, group, kind),
            normal(rows, inputs, dtype=torch.bfloat16),
        )
        results += [
            run(x, weight, normal(outputs, dtype=torch.bfloat16)),
            run(x, weight, None, "silu"),
        ]
        results += [run(x, weight, None, parts=2).sum(0).to(torch.bfloat16)]
    return results


def packed_added(run):
    return [
        run(torch.randn(parts, 5, 70, device=DEVICE), dtype)
        for parts in (2, 3)
        for dtype in (torch.float32, torch.float16)
    ]


def packed_one(run):
    results = []
    for weight in packed_matrices():
        outputs, inputs = weight.shape
        x, residual, norm = normal(1, inputs), normal(1, inputs), normal(inputs)
        results += [
            *run(x, weight, None),
            *run(x, weight, normal(outputs), residual=residual, norm=norm, eps=1e-5),
        ]
        results += (
            [run(x, weight, None, norm=norm, eps=1e-5, gate="silu")[0]] if outputs % 2 == 0 else []
        )
    return results


def packed_stacks():
    """Matrices of five experts as (gates and ups, downs, biases), with groups and inputs of several
    kinds.
    """
    for inputs, width, group, kind in (
        (96, 80, 16, "e2m1"),
        (128, 64, 32, "zeros"),
        (80, 96, 16, "integers"),
    ):
        biases = (normal(5, 2 * width), normal(5, inputs)) if kind == "e2m1" else (None, None)
        yield (
            _packed(5 * 2 * width, inputs, group, kind),
            _packed(5 * inputs, width, group, kind),
            biases,
        )


def of_pairs(rows, blocks):
    """Rows that have a pair."""
    used = int((blocks.experts >= 0).sum()) * blocks.size
    return rows[:used][blocks.pairs[:used] < EXPERT_IDS.numel()]


def packed_gated(run):
    blocks, results = experts_order(EXPERT_IDS, 5, 16), []
    for gate_up, _, (bias, _) in packed_stacks():
        for kind in ("silu", "clamped"):
            rows = run(
                normal(5, gate_up.inputs),
                gate_up,
                5,
                blocks,
                2,
                kind,
                bias=bias,
                alpha=1.7,
                limit=1.0,
            )
            results.append(of_pairs(rows, blocks))
    return results


def packed_downs(run):
    blocks, some = (experts_order(ids, 5, 16) for ids in (EXPERT_IDS, SOME_ELSEWHERE))
    results = []
    for _, down, (_, bias) in packed_stacks():
        weights, hidden = torch.rand(5, 2, device=DEVICE), normal(len(blocks.pairs), down.inputs)
        for base in (None, normal(5, down.shape[0] // 5)):
            results.append(run(hidden, down, 5, blocks, weights, bias=bias, base=base))
        results.append(run(hidden, down, 5, some, weights, bias=bias, partial=True))
    return results


def packed_gated_few(run):
    results = []
    for gate_up, _, (bias, _) in packed_stacks():
        for kind in ("silu", "clamped"):
            x = normal(5, gate_up.inputs)
            results.append(run(x, gate_up, 5, EXPERT_IDS, kind, bias=bias, alpha=1.7, limit=1.0))
    return results


def packed_downs_few(run):
    results = []
    for _, down, (_, bias) in packed_stacks():
        for ids in (EXPERT_IDS, EXPERT_IDS.flatten()[:9].view(3, 3)):
            weights, hidden = torch.rand(ids.shape, device=DEVICE), normal(ids.numel(), down.inputs)
            for base in (None, normal(len(ids), down.shape[0] // 5)):
                results.append(run(hidden, down, 5, ids, weights, bias=bias, base=base))
    return results


CASES = {
    "packed_gate_up_few": packed_gated_few,
    "packed_down_few": packed_downs_few,
    "packed_gate_up": packed_gated,
    "packed_down": packed_downs,
    "decode_weight": packed_decoded,
    "packed_rows": packed_few,
    "packed_rows_hopper": packed_few_on_hopper,
    "add_parts": packed_added,
    "packed_row": packed_one,
}
