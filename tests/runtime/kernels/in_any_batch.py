"""Cases of `test_reference` for kernels whose results do not depend on the batch."""

from functools import partial

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, SharedPrefixes
from sglang_lite.runtime.kernels.invariant_attention import InvariantWork
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.reference.invariant_attention import plan_pieces
from tests.runtime.kernels.test_kernels import DEVICE, Rows, normal

half = partial(normal, dtype=torch.float16)


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def invariant(run):
    return [
        run(half(3, 48), half(70, 48), None),
        run(half(3, 48), half(70, 48), half(70), "gelu"),
        run(half(3, 48), half(70, 48), half(70), out=half(3, 70)),
        run(normal(70, 48, dtype=torch.float16), normal(70, 48, dtype=torch.float16), None),
    ]


def invariant_in_parts(run):
    """Of 512 and of 40 inputs, of which only the first are divided."""
    results = []
    for size in (512, 40):
        y = run(normal(3, size, dtype=torch.float16), normal(70, size, dtype=torch.float16))
        results.append((y.sum(0) if y.dim() == 3 else y).half())
    return results


def in_pieces(plan):
    """Work of a plan whose rows have at most nine pieces."""
    rows = plan.decoding
    return InvariantWork(
        items=numbers(*[[-9] * 4] * (rows + 4)), row_items=numbers(*[9] * rows),
        acc=torch.full((rows * 9 * 4, 16), float("nan"), device=DEVICE),
        ml=torch.full((rows * 9 * 4, 2), float("nan"), device=DEVICE),
        counters=torch.zeros((rows, 2), dtype=torch.int32, device=DEVICE), max_pieces=9,
    )  # fmt: skip


def with_long_rows():
    """Three rows, of which two begin with the same 512 tokens."""
    lengths = [1100, 600, 70]
    rows = Rows(lengths, shared=512)
    shared = SharedPrefixes(
        numbers(512, 512, 0), numbers(1, 1, 0), numbers(1, 0, 2), numbers([0, 2, 0, 0, 512, 0], [0] * 6), 1,
    )  # fmt: skip
    positions = [length - 1 for length in lengths]
    return (
        rows,
        rows.plan(3, [0, 1, 2], positions, shared=shared),
        rows.plan(3, [0, 1, 2], positions),
    )


def planned_pieces(run):
    results = []
    long = Rows([1] * 4).plan(4, [3, 2, 1, 0], [8191, 8192, 17_000, 1_000_000])
    for plan in (*with_long_rows()[1:], long):
        work = in_pieces(plan)
        run(plan, work)
        of_rows = work.items[:, 0] >= 0
        results += [work.items[:, 0], work.items[of_rows], work.row_items]
    return results


def in_any_company(run):
    rows, sharing, plan = with_long_rows()
    by = torch.tensor([4.0, 0.5], device=DEVICE)
    scaled = KVCache(rows.cache.k, rows.cache.v, KVScales((by,), (by,)))
    blocks = [(3, 16, 0, 1000), (19, 14, 0, 1016), (0, 3, 1, 7)]
    prompt = rows.plan(0, [1] * 3 + [0] * 30, [7, 8, 9, *range(1000, 1030)], blocks)
    results = []
    for each, cache, options in (
        (sharing, rows.cache, {}), (plan, scaled, {"window": 300}), (plan, rows.cache, {"softcap": 4.0}),
        (prompt, rows.cache, {}), (prompt, scaled, {"window": 7}),
    ):  # fmt: skip
        work, out = in_pieces(plan), torch.zeros(len(each.slots), 4, 16, device=DEVICE)
        if each.decoding:
            plan_pieces(each, work)
        run(
            normal(len(each.slots), 4, 16),
            cache,
            0,
            each,
            work,
            out,
            AttentionRules(0.3, **options),
        )
        results += [out, work.counters]
    return results


CASES = {
    "invariant_linear": invariant, "invariant_parts": invariant_in_parts, "plan_pieces": planned_pieces,
    "invariant_attention": in_any_company,
}  # fmt: skip
