"""Adapters' matrices in shuffled pages, and tokens of them, for tests of kernels."""

import torch

from sglang_lite.runtime.kernels.lora import lora_rows
from sglang_lite.runtime.kernels.lora_weights import RANKS, LoraStep, LoraWeights
from sglang_lite.runtime.kernels.reference.lora_few import join_ranks, shrink
from sglang_lite.runtime.kernels.reference.lora_own import own_ranks, own_shrink

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def first(made):
    """What a step's first kernels have made, once they have ended, as its other kernels find it:
    they do not wait for them.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return made


def lora_step(ranks, longest=None):
    """Adapters of these ranks. Slots 0, 1, ... have one each; the last slot has none."""
    longest = longest or max(ranks)
    pages = torch.randperm(len(ranks) * longest // RANKS, device=DEVICE).int().view(len(ranks), -1)
    of_slot = torch.arange(len(ranks) + 1, dtype=torch.int32, device=DEVICE)
    return LoraStep(of_slot, pages, torch.tensor(ranks, dtype=torch.int32, device=DEVICE), ())


def lora_weights(step, inputs, outputs, dtype=torch.float32):
    """Matrices whose products have about the size of their inputs; NaN in pages beyond an adapter's
    rank.
    """
    pages = step.pages.numel()
    a = torch.randn(pages, len(outputs), RANKS, inputs, device=DEVICE) / inputs**0.5
    b = (
        torch.randn(pages, RANKS, sum(outputs), device=DEVICE)
        / (step.pages.shape[1] * RANKS) ** 0.5
    )
    for own, rank in zip(step.pages, step.ranks):
        a[own[int(rank) // RANKS :].long()] = torch.nan
        b[own[int(rank) // RANKS :].long()] = torch.nan
    # rows are pages of both
    split, whole = a[0].numel(), torch.cat((a.flatten(1), b.flatten(1)), 1).to(dtype)
    return LoraWeights(whole[:, :split].view(a.shape), whole[:, split:].view(b.shape), outputs)


# up to those of linear attention: queries, keys, values, gates, and two numbers a head
PARTS = ((150,), (40, 40), (150, 20, 20), (70, 20, 20, 70), (130, 40, 70, 70, 4, 4))


def _each(run, parts):
    step, results = lora_step((8, 24, 0)), []
    for outputs in parts:
        weights = lora_weights(step, 300, outputs)
        for slots in (torch.tensor(each, device=DEVICE) for each in ([3], [0, 3, 1, 1, 2, 0])):
            x = torch.randn(len(slots), 300, device=DEVICE)
            product = torch.randn(len(slots), sum(outputs), device=DEVICE)
            results.append(run(x, weights, first(lora_rows(step, slots)), product))
    return results


def added(run):
    return _each(run, PARTS)


def gated(run):
    return _each(lambda *arguments: run(*arguments, "silu"), ((40, 40), (150, 150)))


def rows_sorted(run):
    step = lora_step((8, 24, 16), longest=32)
    for slots in ([3], [0, 3, 1, 1, 2, 0], [1] * 40 + [0] * 17, [3, 1] * 200):
        rows = run(step, torch.tensor(slots, device=DEVICE))
        used = rows.ranks[: rows.used[1]] > 0  # pages of others are not read
        yield rows.used, rows.ranks, rows.pages[: rows.used[1]][used], rows.blocks.experts
        yield rows.blocks.pairs[: rows.used[1] * rows.blocks.size]


def ranks_joined(run):
    step = lora_step((8, 24, 0, 16), longest=32)
    for slots in ([4], [0, 4, 1, 1, 2, 0], [1] * 40 + [3] * 17):
        ranks = run(step, torch.tensor(slots, device=DEVICE))
        yield (
            ranks.of_token,
            ranks.used,
            ranks.pages[: ranks.used],
            ranks.owners[: ranks.used],
            ranks.counters,
        )


def _shrinking(outputs, dtype=torch.float32, inputs=1100, slots=(0, 4, 1, 1, 2, 3, 0)):
    """Arguments of `shrink`; the ranks take a part of a tile."""
    step = lora_step((8, 24, 0, 16), longest=32)
    ranks = join_ranks(step, torch.tensor(slots, device=DEVICE))
    return (
        torch.randn(len(slots), inputs, device=DEVICE).to(dtype),
        lora_weights(step, inputs, outputs, dtype),
        ranks,
    )


def shrunk(run):
    for outputs in ((40,), (150, 20, 20)):
        ranks = run(*_shrinking(outputs)).ranks
        yield run(*_shrinking(outputs)).hidden[..., : ranks.used * RANKS], ranks.counters


def _expanding(run, parts):
    for outputs in parts:
        low = shrink(*_shrinking(outputs))
        yield run(low, torch.randn(low.hidden.shape[1], sum(outputs), device=DEVICE))


def expanded(run):
    return _expanding(run, PARTS)


def expanded_and_gated(run):
    return _expanding(lambda *arguments: run(*arguments, "silu"), ((40, 40), (150, 150)))


def expanded_in_tiles(run):
    """`linear_by_tiles` with adapters."""
    for outputs, gate in (((64, 32, 40), ""), ((40, 40), "silu"), ((70,), "")):
        low = shrink(*_shrinking(outputs, torch.float16, 264))
        x = torch.randn(low.hidden.shape[1], 264, device=DEVICE).half()
        yield run(
            x, (torch.randn(sum(outputs), 264, device=DEVICE) / 16).half(), None, gate, shrunk=low
        )


def expanded_in_parts(run):
    """`linear_split_k` with adapters, summed, as either part may have them."""
    low = shrink(*_shrinking((70,), torch.float16, 512))
    x = torch.randn(low.hidden.shape[1], 512, device=DEVICE).half()
    return run(x, (torch.randn(70, 512, device=DEVICE) / 16).half(), 2, low).sum(0)


def ranks_of_tokens(run):
    step = lora_step((8, 24, 0, 16), longest=32)
    ranks = run(step, torch.tensor([4, 0, 4, 1, 2, 3], device=DEVICE))
    used = torch.arange(4, device=DEVICE) * RANKS < ranks.ranks[:, None]
    return ranks.ranks, ranks.pages[used]


def _own_shrinking(run, outputs):
    step = lora_step((8, 24, 0, 16), longest=32)
    ranks = own_ranks(step, torch.tensor([0, 4, 1, 1, 2, 3, 0], device=DEVICE))
    return run(torch.randn(7, 1100, device=DEVICE), lora_weights(step, 1100, outputs), ranks)


def own_shrunk(run):
    """Sums over splits, as each may be split elsewhere, of the ranks that tokens have."""
    for outputs in ((40,), (150, 20, 20)):
        low = _own_shrinking(run, outputs)
        own = torch.arange(32, device=DEVICE) < low.ranks.ranks[:, None, None]
        yield low.hidden.where(own, 0.0).sum(0)


def own_expanded(run):
    for outputs, gate in (((150,), ""), ((40, 40), ""), ((1150, 20, 20), ""), ((600, 600), "silu")):
        yield run(
            _own_shrinking(own_shrink, outputs), torch.randn(7, sum(outputs), device=DEVICE), gate
        )


CASES = {
    "own_ranks": ranks_of_tokens, "own_shrink": own_shrunk, "own_expand": own_expanded,
    "lora_rows": rows_sorted, "lora_add": added, "lora_add_and_gate": gated, "join_ranks": ranks_joined, "shrink": shrunk,
    "expand": expanded, "expand_and_gate": expanded_and_gated,
}  # fmt: skip
