"""A case of Hopper's attention over shared prefixes, for its twin."""

import torch

from sglang_lite.runtime.executor import prefix_groups
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, SharedPrefixes
from sglang_lite.runtime.kernels.reference.decode_attention import split_work
from tests.runtime.kernels.test_kernels import DEVICE, Rows, normal


def prefixes_on_hopper(run):
    """Rows that begin with the same 160 tokens, in two pieces."""

    def numbers(*of):
        return torch.tensor(of, dtype=torch.int32, device=DEVICE)

    lengths, shared = [300, 170, 190], 160
    rows = Rows(lengths, (4, 2), 128, torch.bfloat16, page=16)
    rows.table[1:3, : shared // 16] = rows.table[0, : shared // 16].clone()
    items = numbers([0, 3, 0, 0, 144, 0], [0, 3, 0, 144, shared, 1], [0] * 6)
    prefixes = SharedPrefixes(
        numbers(*[shared] * 3), numbers(2, 2, 2), numbers(0, 1, 2), items, prefix_groups.MAX_CHUNKS
    )
    plan = rows.plan(3, [0, 1, 2], [n - 1 for n in lengths], shared=prefixes)
    work = rows.work(plan)
    split_work(plan.positions, plan.slots, plan.shared, work.items, work.rows, min_tokens=16)
    run(normal(3, 4, 128, dtype=torch.bfloat16), rows.cache, 0, plan, work, AttentionRules(0.1))
    partials = work.partials  # as exact as products are
    return [partials.prefix_acc.to(torch.bfloat16), partials.prefix_ml.to(torch.bfloat16)]
