"""Every Triton kernel has a torch twin of the same name and parameters, which gives the same
numbers.
"""

import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_lite.runtime import kernels
from sglang_lite.runtime.executor import prefix_groups
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, SharedPrefixes
from sglang_lite.runtime.kernels.eight_bit_rows import FLOAT8, EightBitRows
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.reference.decode_attention import split_work
from sglang_lite.runtime.kernels.reference.eight_bits import quantise_rows
from sglang_lite.runtime.kernels.reference.experts_order import experts_order
from sglang_lite.runtime.kernels.reference.latent_attention import latent_prefix
from sglang_lite.runtime.kernels.reference.prefix_attention import prefix_attention
from sglang_lite.runtime.kernels.sampling import TokenMasks
from tests.runtime.kernels import (
    adapters,
    in_any_batch,
    needs_hopper,
    needs_kernels,
    packed_matrices,
    ranks,
    recurrences,
    whole_rows,
)
from tests.runtime.kernels.block_copies import blocks_copied
from tests.runtime.kernels.embeddings import CASES as EMBEDDINGS
from tests.runtime.kernels.hopper_prefixes import prefixes_on_hopper
from tests.runtime.kernels.latents import LATENT_SCALES, Latents
from tests.runtime.kernels.packed_matrices import of_pairs
from tests.runtime.kernels.public_launches import public_launches
from tests.runtime.kernels.scored_tokens import scored
from tests.runtime.kernels.test_kernels import DEVICE, PAGE, Rows, normal, sampling
from tests.runtime.kernels.whole_rows import EIGHT_BITS
from tests.runtime.kernels.whole_rows import scales as by_rows

FOUND = public_launches()


def kernel_and_twin(name):
    plain = name.removesuffix("_hopper")
    # a kernel that Hopper replaces has the same twin there
    twin = plain if plain in FOUND else name
    return (
        getattr(importlib.import_module(f"sglang_lite.runtime.kernels.{module}"), function)
        for module, function in ((FOUND[name], name), (f"reference.{FOUND[twin]}", twin))
    )


def parameters(function):
    if inspect.isclass(function):
        return [
            *inspect.signature(function.__init__).parameters.values(),
            *parameters(function.__call__),
        ]
    return list(inspect.signature(function).parameters.values())


def test_every_file_with_a_kernel_has_a_launch():
    """Jitted functions without an underscore are parts of other files' kernels."""
    files = Path(kernels.__file__).parent.glob("*.py")
    assert {
        f.stem for f in files if re.search(r"@(triton|gluon)\.jit.*\ndef _", f.read_text())
    } == set(FOUND.values())


@pytest.mark.parametrize("name", sorted(FOUND))
def test_a_kernel_and_its_twin_have_the_same_parameters(name):
    kernel, twin = kernel_and_twin(name)
    own, twins = parameters(kernel), parameters(twin)
    assert kernel is not twin
    # Hopper's may lack the last options
    assert own == (twins[: len(own)] if name.endswith("hopper") else twins)


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# Each case runs a kernel, or its twin, on the same random numbers, and gives what it returned or
# wrote.


def one_row(run):
    x, norm, bias, weight = normal(1, 48), normal(48), normal(60), normal(60, 48)
    eight = {"scales": torch.rand(60, device=DEVICE)}
    return [
        run(x, weight, None),
        *(run(x, weight.to(kind), bias, **eight) for kind in EIGHT_BITS),
        run(x, weight, bias, residual=normal(1, 48), norm=norm, eps=1e-5, gate="silu"),
    ]


def few_rows(run):
    return [run(DEVICE)(normal(3, 48), normal(70, 48), bias) for bias in (None, normal(70))]


def tiled(run):
    def half(*shape):
        return normal(*shape, dtype=torch.float16)

    return [
        run(half(3, 48), half(70, 48), None),
        run(half(3, 48), half(70, 48), half(70), "gelu"),
        run(half(3, 48), half(70, 48), half(70), out=half(3, 70)),
        *adapters.expanded_in_tiles(run),
    ]


def tiled_in_parts(run):
    x, weight = normal(3, 512, dtype=torch.float16), normal(70, 512, dtype=torch.float16)
    return [run(x, weight, 2), run(x, weight, 4), adapters.expanded_in_parts(run)]


def page_table(run):
    table = torch.zeros((3, 5), dtype=torch.int32, device=DEVICE)
    run(table, numbers(1, 14), numbers(7, 8))
    return table


def copied(run):
    cache = KVCache(
        tuple(normal(2, 12, 6) for _ in range(3)), tuple(normal(2, 12, 6) for _ in range(3))
    )
    run(cache)(torch.tensor([1, 2, 7], device=DEVICE), torch.tensor([9, 10, 0], device=DEVICE))
    return cache.k, cache.v


def stored(run):
    results = []
    for norms, factors in (((None, None), None), ((normal(16), normal(16)), by_rows(2, 8 * 16))):
        rows = Rows([9, 30])
        by = torch.tensor([4.0, 0.5], device=DEVICE)
        cache = KVCache(
            rows.cache.k, rows.cache.v, None if factors is None else KVScales((by,), (1 / by,))
        )
        qkv, tables = normal(2, 8 * 16), (normal(32, 8), normal(32, 8))
        results += [
            run(qkv, *norms, 1e-5, tables, rows.plan(0, [0, 1], [8, 28]), cache, 0, factors),
            qkv[:, : 4 * 16],
        ]
        results += [cache.k, cache.v]
    return results


def kv_stored(run):
    cache = Rows([9, 30]).cache
    k, v = (
        normal(2, 3, cache.k[0].shape[2]).transpose(0, 1)[:, :2],
        normal(3, *cache.k[0].shape[::2]),
    )
    run(k, v, numbers(7, 2, 19).long(), cache, 0)
    return [cache.k, cache.v]


def rotated(run):
    q, k = normal(1, 3, 5, 24), normal(1, 3, 2, 24)  # as products give them: token by token
    return run(q.transpose(1, 2), k.transpose(1, 2), normal(1, 3, 24), normal(1, 3, 24))


def decoding():
    """Three rows, of which two begin with the same 64 tokens, in two pieces."""
    lengths, shared = [150, 90, 70], 64
    rows = Rows(lengths)
    rows.table[1, : shared // PAGE] = rows.table[0, : shared // PAGE]
    prefixes = SharedPrefixes(
        numbers(shared, shared, 0), numbers(2, 2, 0), numbers(0, 1, 0),
        numbers(*[[0, 2, 0, 0, 40, 0], [0, 2, 0, 40, shared, 1], [0] * 6]).view(-1, 6), prefix_groups.MAX_CHUNKS,
    )  # fmt: skip
    plan = rows.plan(3, [0, 1, 2], [n - 1 for n in lengths], shared=prefixes)
    return rows, plan, normal(3, 4, 16)


def split(run):
    results = []
    for shared in (None, decoding()[1].shared):
        work, row_work = numbers(*[[9] * 4] * 20), numbers(*[[9] * 2] * 3)
        run(numbers(149, 89, 69), numbers(5, 0, 2), shared, work, row_work, min_tokens=32)
        results += [work, row_work]
    for lengths in ((1499, 899, 699), (24_999, 2999, 199)):
        work, row_work = numbers(*[[9] * 4] * 20), numbers(*[[9] * 2] * 3)
        run(
            numbers(*lengths),
            numbers(5, 0, 2),
            None,
            work,
            row_work,
            min_tokens=32,
            concurrent_programs=5,
        )
        results += [work, row_work]
    for lengths in ((127, 128, 0), (1499, 899, 699)):
        work, row_work = numbers(*[[9] * 4] * 20), numbers(*[[9] * 2] * 3)
        run(
            numbers(*lengths), numbers(5, 0, 2), None, work, row_work, min_tokens=128, round_up=True
        )
        results += [work, row_work]
    return results


def worked(rows, plan):
    work = rows.work(plan)
    split_work(plan.positions, plan.slots, plan.shared, work.items, work.rows, min_tokens=16)
    return work


def prefixes(run):
    rows, plan, q = decoding()
    results = []
    for softcap in (None, 4.0):
        work = worked(rows, plan)
        run(q, rows.cache, 0, plan, work, AttentionRules(0.3, softcap=softcap))
        results += [work.partials.prefix_acc, work.partials.prefix_ml]
    return results


def decoded(run):
    rows, plan, q = decoding()
    by = torch.tensor([4.0, 0.5], device=DEVICE)
    scaled = KVCache(rows.cache.k, rows.cache.v, KVScales((by,), (by,)))
    work = worked(rows, plan)
    prefix_attention(q, rows.cache, 0, plan, work, AttentionRules(0.3))
    alone = rows.plan(3, [0, 1, 2], plan.positions.tolist())
    out = [torch.zeros(3, 4, 16, device=DEVICE) for _ in range(3)]
    run(q, rows.cache, 0, plan, work, out[0], AttentionRules(0.3))
    run(q, scaled, 0, alone, worked(rows, alone), out[1], AttentionRules(0.3, window=75))
    run(q, rows.cache, 0, alone, worked(rows, alone), out[2], AttentionRules(0.3, softcap=4.0))
    return out


def turned_and_decoded(run):
    """The same rows, none of which shares anything, with a product before attention."""
    results = []
    for options, norms, factors in (
        ({}, (None, None), None),
        ({"window": 75}, (normal(16), normal(16)), by_rows(3, 8 * 16)),
        ({"softcap": 4.0}, (normal(16), normal(16)), None),
        ({"window": 75, "chunked": True}, (normal(16), normal(16)), None),
        ({"slopes": torch.linspace(0.01, 0.3, 4, device=DEVICE)}, (None, None), None),
    ):
        rows = Rows([150, 90, 1])
        by = torch.tensor([4.0, 0.5], device=DEVICE)
        cache = KVCache(
            rows.cache.k, rows.cache.v, None if factors is None else KVScales((by,), (1 / by,))
        )
        plan = rows.plan(3, [0, 1, 2], [149, 89, 0])
        out, tables = torch.zeros(3, 4, 16, device=DEVICE), (normal(150, 8), normal(150, 8))
        run(
            normal(3, 8 * 16), *norms, 1e-5, tables, cache, 0, out, plan=plan, work=worked(rows, plan), scales=factors,
            rules=AttentionRules(0.3, **options),
        )  # fmt: skip
        results.append((out, cache.k, cache.v))
    return results


def prefilled(run):
    rows = Rows([50, 9])
    by = torch.tensor([4.0, 0.5], device=DEVICE)
    cache = KVCache(rows.cache.k, rows.cache.v, KVScales((by,), (by,)))
    plan = rows.plan(
        0,
        [1] * 2 + [0] * 20,
        [7, 8, *range(30, 50)],
        [(2, 16, 0, 30), (18, 4, 0, 46), (0, 2, 1, 7)],
    )
    q, results = normal(22, 4, 16), []
    for options in ({}, {"window": 7}, {"window": 7, "chunked": True}, {"softcap": 4.0}):
        out = torch.zeros(22, 4, 16, device=DEVICE)
        run(q, cache, 0, plan, out, AttentionRules(0.3, **options))
        results.append(out)
    return results


def prefilled_on_hopper(run):
    rows = Rows([300, 140], (4, 2), 128, torch.bfloat16, page=16)
    blocks = [(0, 128, 0, 100), (128, 72, 0, 228), (200, 40, 1, 100)]
    plan = rows.plan(0, [0] * 200 + [1] * 40, [*range(100, 300), *range(100, 140)], blocks, 128)
    out = torch.zeros(240, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    run(normal(240, 4, 128, dtype=torch.bfloat16), rows.cache, 0, plan, out, AttentionRules(0.1))
    return out


def latents_sharing(run):
    """Three rows, of which two begin with the same 64 tokens, in two pieces."""
    results = []
    for heads, scales in ((5, None), (20, LATENT_SCALES)):
        lengths, shared = [150, 90, 70], 64
        rows = Latents(lengths, heads, 24, 8)
        rows.table[1, : shared // PAGE] = rows.table[0, : shared // PAGE]
        cache = KVCache(rows.cache.k, rows.cache.v, scales)
        prefixes = decoding()[1].shared
        plan = rows.plan(3, [0, 1, 2], [n - 1 for n in lengths], shared=prefixes)
        work, q = worked(rows, plan), normal(3, heads, 32)
        partials = replace(
            work.partials, counters=torch.zeros(3, 8, dtype=torch.int32, device=DEVICE),
            prefix_acc=torch.zeros(3 * prefixes.max_chunks * heads, 24, device=DEVICE),
            prefix_ml=torch.zeros(3 * prefixes.max_chunks * heads, 2, device=DEVICE),
        )  # fmt: skip
        results += run(q, cache, plan, replace(work, partials=partials))
    return results


def latents_of_prefixes(run):
    def one(q, cache, plan, work):
        run(q, cache, 0, plan, work, rank=24, scale=0.3)
        return [work.partials.prefix_acc, work.partials.prefix_ml]

    return latents_sharing(one)


def latents_stored(run):
    rows, heads = Latents([9, 30], 5, 24, 8), 5
    plan, q, absorbed = rows.plan(0, [0, 1], [8, 28]), normal(2, heads, 20), normal(2, heads, 32)
    caches = rows.cache, KVCache(rows.cache.k, rows.cache.v, LATENT_SCALES)
    for out, cache in zip((absorbed[..., 24:], q[..., 12:]), caches):
        product = normal(2, 11 + 32)
        run(
            product,
            q[..., 12:],
            out,
            normal(24),
            1e-5,
            (normal(32, 8), normal(32, 8)),
            plan,
            cache,
            0,
        )
    return q, absorbed, rows.cache.k


def convolved(run):
    """Tokens whose earlier ones are in the step, in the cache, partly in each, or not there."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        channels = 600
        rows = Latents([9, 30, 1, 12], 1, channels - 8, 8, dtype)
        # a prompt, the end of another, one token, a continued prompt
        starts = [(0, 0, 9), (1, 28, 30), (2, 0, 1), (3, 7, 12)]
        slots = [slot for slot, start, end in starts for _ in range(start, end)]
        positions = [at for _, start, end in starts for at in range(start, end)]
        plan = rows.plan(0, slots, positions)
        product = normal(len(slots), 3 * channels, dtype=dtype)
        for window in (1, 3, 5):
            out = run(product, normal(window + 1, channels), plan, rows.cache, 0)
            results.append((out, rows.cache.k[0].clone()))
    return results


def latents_decoded(run):
    def with_prefixes(q, cache, plan, work):
        out = torch.zeros_like(q)
        latent_prefix(q, cache, 0, plan, work, rank=24, scale=0.3)
        run(q, cache, 0, plan, work, out, rank=24, scale=0.3)
        return [out]

    results = latents_sharing(with_prefixes)
    for dtype in (torch.float32, torch.float16):
        # in one block of heads and in several
        for heads, lengths in ((5, [70, 1, 33]), (72, [20])):
            rows = Latents(lengths, heads, 24, 8, dtype)
            plan = rows.plan(len(lengths), [*range(len(lengths))], [n - 1 for n in lengths])
            work, out = (
                worked(rows, plan),
                torch.zeros(len(lengths), heads, 32, dtype=dtype, device=DEVICE),
            )
            counters = torch.zeros(len(lengths), 5, dtype=torch.int32, device=DEVICE)
            work = replace(work, partials=replace(work.partials, counters=counters))
            q = normal(len(lengths), heads, 32, dtype=dtype)
            run(q, rows.cache, 0, plan, work, out, rank=24, scale=0.3)
            results += [out, counters]
    return results


def latents_sharing_on_hopper(run):
    """Seven rows of 16 heads, of which six begin alike: two blocks of queries, in two pieces."""
    lengths = [300, 200, 170, 161, 500, 333, 80]
    rows = Latents(lengths, 16, 512, 64, torch.bfloat16, page=16)
    rows.table[1:6, :9] = rows.table[0, :9]
    shared = SharedPrefixes(
        numbers(*[144] * 6, 0), numbers(*[2] * 6, 0), numbers(4, 1, 2, 3, 0, 5, 0),
        numbers([0, 4, 0, 0, 64, 0], [0, 4, 0, 64, 144, 1], [4, 2, 0, 0, 64, 0], [4, 2, 0, 64, 144, 1], [0] * 6), 2,
    )  # fmt: skip
    plan = rows.plan(7, [*range(7)], [n - 1 for n in lengths], shared=shared)
    work, q = worked(rows, plan), normal(7, 16, 576, dtype=torch.bfloat16)
    partials = replace(
        work.partials, counters=torch.zeros(8, 4, dtype=torch.int32, device=DEVICE),
        prefix_acc=torch.zeros(7 * 2 * 16, 512, device=DEVICE), prefix_ml=torch.zeros(7 * 2 * 16, 2, device=DEVICE),
    )  # fmt: skip
    return run(q, rows.cache, plan, replace(work, partials=partials))


def latents_of_prefixes_on_hopper(run):
    def one(q, cache, plan, work):
        run(q, cache, 0, plan, work, rank=512, scale=0.1)
        # as exact as products are
        return [x.to(q.dtype) for x in (work.partials.prefix_acc, work.partials.prefix_ml)]

    return latents_sharing_on_hopper(one)


def latents_decoded_on_hopper(run):
    def with_prefixes(q, cache, plan, work):
        out = torch.zeros_like(q)
        latent_prefix(q, cache, 0, plan, work, rank=512, scale=0.1)
        run(q, cache, 0, plan, work, out, rank=512, scale=0.1)
        return [out, work.partials.counters]

    results = latents_sharing_on_hopper(with_prefixes)
    for heads, lengths in ((5, [70, 1, 333, 64]), (72, [2000])):
        rows = Latents(lengths, heads, 512, 64, torch.bfloat16, page=16)
        plan = rows.plan(len(lengths), [*range(len(lengths))], [n - 1 for n in lengths])
        work = worked(rows, plan)
        counters = torch.zeros(len(lengths), 4, dtype=torch.int32, device=DEVICE)
        work = replace(work, partials=replace(work.partials, counters=counters))
        q = normal(len(lengths), heads, 576, dtype=torch.bfloat16)
        out = torch.zeros_like(q)
        run(q, rows.cache, 0, plan, work, out, rank=512, scale=0.1)
        results += [out, counters]
    return results


def fresh_on_hopper(run):
    """Rows of 300, 3 and 128 new tokens after 5 that are decoded."""
    blocks = [
        (261, 44, 0, 256),
        (133, 128, 0, 128),
        (5, 128, 0, 0),
        (305, 3, 1, 0),
        (308, 128, 2, 0),
    ]
    plan = Rows([4]).plan(5, [0] * 436, [0] * 436, blocks, 128)
    half, out = torch.bfloat16, torch.zeros(436, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    keys, values = (normal(4, 431, 128, dtype=half) for _ in range(2))
    run(
        normal(436, 4, 192, dtype=half),
        keys,
        normal(431, 576, dtype=half),
        values,
        plan,
        out,
        scale=0.07,
    )
    return out


def latents_prefilled_on_hopper(run):
    rows = Latents([150, 9], 5, 512, 64, torch.bfloat16, page=16)
    blocks = [(2, 16, 0, 120), (18, 14, 0, 136), (0, 2, 1, 7)]
    plan = rows.plan(0, [1] * 2 + [0] * 30, [7, 8, *range(120, 150)], blocks)
    q = normal(32, 5, 576, dtype=torch.bfloat16)
    out = torch.zeros_like(q)
    run(q, rows.cache, 0, plan, out, rank=512, scale=0.1)
    return out


def latents_prefilled(run):
    rows = Latents([50, 9], 5, 24, 8)
    plan = rows.plan(
        0,
        [1] * 2 + [0] * 20,
        [7, 8, *range(30, 50)],
        [(2, 16, 0, 30), (18, 4, 0, 46), (0, 2, 1, 7)],
    )
    results = []
    for scales in (None, LATENT_SCALES):
        out = torch.zeros(22, 5, 32, device=DEVICE)
        cache = KVCache(rows.cache.k, rows.cache.v, scales)
        run(normal(22, 5, 32), cache, 0, plan, out, rank=24, scale=0.3)
        results.append(out)
    return results


def drawn(run):
    """Rows of all kinds: greedy, drawn, filtered, masked, and broken ones."""
    count, size = 8, 4200
    logits = normal(count, size) * 3
    logits[6, 40], logits[7] = float("nan"), float("-inf")
    parameters = {
        "temperature": [0.0, 0.7, 1.0, 1.3, 0.5, 1.0, 1.0, 1.0],
        "top_k": [0, 0, 5, 0, 0, 40, 0, 0],
        "top_p": [1.0, 1.0, 1.0, 0.4, 1.0, 0.8, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.3, 0.01, 0.0, 0.0],
        "sequential": [0, 0, 1, 1, 0, 1, 0, 0],
        "seed": [0, 1, 2, 2**40 + 3, -5, 6, 7, 8],
    }
    table, masks = (
        sampling(count, **parameters),
        torch.randint(-(2**31), 2**31, (2, -(-size // 32)), device=DEVICE),
    )
    masked = {"masks": TokenMasks(masks.int(), numbers(0, 1, -1, 0, 1, 0, -1, -1))}
    results = []
    for options in ({}, {"softcap": 20.0, **masked}):
        last, tokens = numbers(*[-9] * count), numbers(*[-9] * count)
        slots, positions = numbers(*range(count)), numbers(*range(0, 10 * count, 10))
        run(logits, slots, positions, table, last, tokens, **options)
        results += [last, tokens]
    return results


def routed(run):
    logits, counts = normal(4, 24), numbers(*range(24))
    logits[3, 7] = float("nan")
    return [
        run(logits, 3),
        run(
            logits,
            3,
            scoring="sigmoid",
            correction=normal(24),
            groups=4,
            kept_groups=2,
            group_top=2,
            scale=2.5,
        ),
        run(logits, 3, groups=4, kept_groups=2, normalise=False),
        run(normal(3, 4, 24), 3),
        run(
            logits,
            3,
            local_ids=torch.randint(9, (3, 24), dtype=torch.int32, device=DEVICE),
            counts=counts,
        ),
        counts,
    ]


EXPERT_IDS = [[1, 4], [4, 0], [1, 3], [4, 1], [3, 1]]
SOME_ELSEWHERE = [[1, 5], [5, 0], [1, 3], [5, 5], [5, 1]]  # of five experts here


def ordered(run):
    both = run(numbers(*EXPERT_IDS), 6, 2), run(numbers(*SOME_ELSEWHERE), 5, 2)
    return [
        (each.experts, each.pairs[: int((each.experts >= 0).sum()) * each.size]) for each in both
    ]


def by_experts(dtype=torch.float32):
    """Experts' matrices, in `dtype`, with biases, or in 8 bits, with scales."""
    return [
        (normal(5, 2 * 24, 40, dtype=dtype), normal(5, 40, 24, dtype=dtype), None, None, normal(5, 48), normal(5, 40)),
        (
            normal(5, 2 * 128, 256).to(torch.float8_e4m3fn), normal(5, 256, 128).to(torch.float8_e4m3fn),
            torch.rand(5, 2, 2, device=DEVICE), torch.rand(5, 2, 1, device=DEVICE), None, None,
        ),
    ]  # fmt: skip


def gated_few(run):
    return [
        run(
            normal(2, gate_up.shape[2]),
            gate_up,
            numbers(*ids[:2]),
            kind,
            scales=by,
            bias=bias,
            alpha=1.7,
            limit=1.0,
            partial=partial,
        )
        for gate_up, _, by, _, bias, _ in by_experts()
        for kind, ids, partial in (
            ("silu", EXPERT_IDS, False),
            ("clamped", EXPERT_IDS, False),
            ("silu", SOME_ELSEWHERE, True),
        )
    ]


def summed_few(run):
    weights = torch.rand(2, 2, device=DEVICE)
    return [
        run(
            normal(4, down.shape[2]), down, numbers(*ids[:2]), weights, scales=by, bias=bias,
            base=base and normal(2, down.shape[1]), partial=partial,
        )
        for _, down, _, by, _, bias in by_experts()
        for base, ids, partial in ((None, EXPERT_IDS, False), (True, EXPERT_IDS, False), (True, SOME_ELSEWHERE, True))
    ]  # fmt: skip


def gated_by_tiles(run):
    blocks, results = experts_order(numbers(*EXPERT_IDS), 5, 16), []
    for gate_up, _, by, _, bias, _ in by_experts():
        x = normal(5, gate_up.shape[2])
        rows = run(
            x if by is None else quantise_rows(x, FLOAT8),
            gate_up,
            blocks,
            2,
            "clamped",
            scales=by,
            bias=bias,
            alpha=1.7,
            limit=1.0,
        )
        results.append(of_pairs(rows, blocks))
    return results


def down_by_tiles(run):
    blocks, some = (experts_order(numbers(*ids), 5, 16) for ids in (EXPERT_IDS, SOME_ELSEWHERE))
    results = []
    for _, down, _, by, _, bias in by_experts():
        hidden = normal(len(blocks.pairs), down.shape[2])
        weights = torch.rand(5, 2, device=DEVICE)
        hidden = hidden if by is None else quantise_rows(hidden, FLOAT8)
        results.append(run(hidden, down, blocks, weights, scales=by, bias=bias))
        results.append(
            run(hidden, down, blocks, weights, scales=by, bias=bias, base=normal(5, down.shape[1]))
        )
        results.append(run(hidden, down, some, weights, scales=by, bias=bias, partial=True))
    return results


def summed(run):
    return run(normal(2, 3, 70)), run(normal(3, 2, 70, dtype=torch.float16))


CASES = packed_matrices.CASES | whole_rows.CASES | in_any_batch.CASES | adapters.CASES | EMBEDDINGS | ranks.CASES | recurrences.CASES | {
    "linear_single_row": one_row, "SmallBatchLinear": few_rows,
    "linear_by_tiles": tiled, "linear_split_k": tiled_in_parts, "update_pages": page_table, "KVCopy": copied, "BlockCopy": blocks_copied, "rope_store": stored,
    "rotate": rotated, "kv_store": kv_stored,
    "split_work": split, "prefix_attention": prefixes, "decode_attention": decoded, "prefill_attention": prefilled,
    "rope_attention": turned_and_decoded, "prefix_attention_hopper": prefixes_on_hopper,
    "prefill_attention_hopper": prefilled_on_hopper, "uncached_attention_hopper": fresh_on_hopper, "draw": drawn, "token_scores": scored, "experts_route": routed, "experts_order": ordered,
    "experts_gate_up_few": gated_few, "experts_down_few": summed_few, "experts_gate_up": gated_by_tiles,
    "experts_down": down_by_tiles, "experts_sum": summed, "latent_store": latents_stored, "short_conv": convolved,
    "latent_decode": latents_decoded, "latent_prefill": latents_prefilled, "latent_prefix": latents_of_prefixes,
    "latent_decode_hopper": latents_decoded_on_hopper, "latent_prefill_hopper": latents_prefilled_on_hopper,
    "latent_prefix_hopper": latents_of_prefixes_on_hopper,
}  # fmt: skip


def tensors(result):
    """All tensors of a result; rows in 8 bits as what they stand for."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, EightBitRows):
        scales = result.scales[: result.rows]
        wide = [] if result.unquantised is None else [result.unquantised]
        return [scales, result.values[: result.rows].float() * scales.unsqueeze(1), *wide]
    return [tensor for part in result for tensor in tensors(part)]


@needs_kernels
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_hopper if name.endswith("hopper") else ())
        for name in sorted(FOUND)
    ],
)
def test_a_kernel_gives_what_its_twin_gives(name):
    results = []
    for function in kernel_and_twin(name):
        torch.manual_seed(0)
        results.append(tensors(CASES[name](function)))
    fp8 = "eight" in name or name == "quantise_rows"
    for own, twins in zip(*results, strict=True):
        assert own.dtype == twins.dtype
        if not own.is_floating_point():
            assert torch.equal(own, twins)
            continue
        limit = 2e-5 if own.dtype == torch.float32 else 1e-2
        if fp8 and own.dim() > 1:  # rounding up to a power of two gives the interpreter half of it
            limit = 1e-2 if DEVICE.type == "cuda" else 0.1
        # what was not written is NaN
        own, twins = own.double().nan_to_num(99), twins.double().nan_to_num(99)
        assert (own - twins).norm() <= limit * twins.norm(), (own - twins).abs().max()


def test_the_twin_of_rows_in_eight_bits_rounds_to_the_nearest():
    x = normal(5, 64)
    eight = quantise_rows(x, FLOAT8)
    steps = 2.0 ** (
        torch.floor(torch.log2((x / eight.scales[:5].unsqueeze(1)).abs())).clamp_min(-6) - 3
    )
    errors = x - eight.values[:5].float() * eight.scales[:5].unsqueeze(1)
    assert (errors.abs() <= 0.501 * steps * eight.scales[:5].unsqueeze(1)).all()
