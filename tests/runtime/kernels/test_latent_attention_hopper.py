"""Latent attention for Hopper GPUs, against its twin on one. test_compiled.py compiles it without
any.
"""

from dataclasses import replace

import pytest
import torch

from sglang_lite.runtime.kernels import latent_attention
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.reference.latent_attention import latent_decode, latent_prefill
from tests.runtime.kernels import needs_hopper
from tests.runtime.kernels.latents import Latents
from tests.runtime.kernels.test_kernels import DEVICE, close, normal

hopper = pytest.importorskip(
    "sglang_lite.runtime.kernels.latent_attention_hopper", reason="Triton is too old"
)
pytestmark = needs_hopper
LENGTHS = [1, 63, 64, 65, 128, 1000, 2049, 17]


def poisoned(rows):
    """The rows' cache with no numbers in pages of others and behind the end of a page, as it was
    for the twin.
    """
    there = torch.zeros(rows.cache.k[0].shape[1], dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(rows.lengths):
        there[rows.read_at(row, length)] = True
    rows.cache.k[0][:, ~there] = float("nan")
    return rows.cache


@pytest.mark.parametrize("lengths", [LENGTHS, [5000], [300, 129]], ids=str)
@pytest.mark.parametrize(
    ("heads", "dtype"),  # each is compiled, which takes seconds
    [(16, torch.bfloat16), (128, torch.bfloat16), (72, torch.float16)],
    ids=str,
)
def test_decoding_gives_what_the_twin_gives(heads, dtype, lengths):
    rows = Latents(lengths, heads, 512, 64, dtype, page=16)
    plan = rows.plan(len(lengths), [*range(len(lengths))], [n - 1 for n in lengths])
    work = rows.work(plan)
    counters = torch.zeros(len(lengths) + 1, 16, dtype=torch.int32, device=DEVICE)
    work = replace(work, partials=replace(work.partials, counters=counters))
    q = normal(len(lengths), heads, 576, dtype=dtype)
    expected = torch.zeros_like(q)
    latent_decode(q, rows.cache, 0, plan, work, expected, rank=512, scale=0.1)
    cache = poisoned(rows)
    for _ in range(3):
        out = torch.full_like(q, float("nan"))
        hopper.latent_decode_hopper(q, cache, 0, plan, work, out, rank=512, scale=0.1)
        close(out[..., :512], expected[..., :512], dtype)
        assert not counters.any()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    "cases", [[(0, 1)], [(0, 300), (5, 200)], [(130, 257), (64, 64), (1000, 3)]], ids=str
)
def test_prefill_gives_what_the_twin_gives(heads, cases):
    """Cases: tokens before the new ones and count of those, by row."""
    blocks, first = [], 0
    for row, (before, new) in enumerate(cases):
        blocks += [(first + at, min(128, new - at), row, before + at) for at in range(0, new, 128)]
        first += new
    rows = Latents([before + new for before, new in cases], heads, 512, 64, torch.bfloat16, page=16)
    plan = rows.plan(0, [0] * first, [0] * first, blocks, 128)
    q = normal(first, heads, 576, dtype=torch.bfloat16)
    expected, out = torch.zeros_like(q), torch.full_like(q, float("nan"))
    latent_prefill(q, rows.cache, 0, plan, expected, rank=512, scale=0.1)
    hopper.latent_prefill_hopper(q, poisoned(rows), 0, plan, out, rank=512, scale=0.1)
    close(out[..., :512], expected[..., :512], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_kernels_for_all_cards_give_what_the_twin_gives(dtype, monkeypatch):
    """Of latents of that size, to the last token of rows that fill no block: one launch was
    compiled wrongly there.
    """
    monkeypatch.setattr(latent_attention, "hopper_module", lambda *args: None)
    rows = Latents(LENGTHS, 16, 512, 64, torch.bfloat16, page=16)
    plane = rows.cache.k[0].to(dtype)
    scales = KVScales(
        (torch.tensor([0.5, 2.0], device=DEVICE),), (torch.tensor([0.5], device=DEVICE),)
    )
    cache = KVCache((plane,), (plane,), scales if dtype.itemsize == 1 else None)
    plan = rows.plan(len(LENGTHS), [*range(len(LENGTHS))], [n - 1 for n in LENGTHS])
    work = rows.work(plan)
    counters = torch.zeros(len(LENGTHS) + 1, 16, dtype=torch.int32, device=DEVICE)
    work = replace(work, partials=replace(work.partials, counters=counters))
    q = normal(len(LENGTHS), 16, 576, dtype=torch.bfloat16)
    expected, out = torch.zeros_like(q), torch.full_like(q, float("nan"))
    latent_decode(q, cache, 0, plan, work, expected, rank=512, scale=0.1)
    latent_attention.latent_decode(q, cache, 0, plan, work, out, rank=512, scale=0.1)
    close(out[..., :512], expected[..., :512], torch.bfloat16)
