"""Compiled operators of few tokens against torch's, and a compiler that is not there or fails."""

import stat

import pytest
import torch
import torch.nn.functional as F

from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.cpu_library import load_cpu_library, warn_without_compiler
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    AttentionRules,
    DecodeGroup,
    DecodeRows,
    ExtendRow,
)
from sglang_lite.runtime.kernels.cpu_small_batch import FORMATS, SOURCE, ReadSlots, SmallBatchOps
from sglang_lite.runtime.kernels.cpu_small_batch_step import SOURCE as STEP
from sglang_lite.runtime.kernels.cpu_small_batch_step import ThreadedSmallBatchOps
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.attention import attention, store_kv
from sglang_lite.runtime.models.layers.rope import rotate

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 24, 300
EPS = 1e-5
ANYWHERE = torch.arange(SLOTS) * 7 % SLOTS


@pytest.fixture(scope="module")
def library():
    found = load_cpu_library(SOURCE, cache_folder() / "compiled")  # where engines find theirs
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(scope="module")
def threaded(library):
    return load_cpu_library(STEP, cache_folder() / "compiled")


@pytest.fixture(params=sorted(FORMATS, key=str), ids=str)
def formats(request):
    torch.manual_seed(0)
    return request.param


def close(found, expected, dtype):
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    return (
        found.dtype == dtype
        and (found - expected).float().norm() <= limit * expected.float().norm()
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("added", [True, False])
def test_add_norm(library, formats, added, tokens):
    x, h, weight = (torch.randn(tokens, 100).to(formats[0]) for _ in range(3))
    expected = x + h if added else x.clone()
    found = SmallBatchOps(library, *formats).add_norm(x, h if added else None, weight[0], EPS)
    assert x.equal(expected)
    assert close(found, F.rms_norm(expected, (100,), weight[0], EPS), formats[0])


@pytest.mark.parametrize("tokens", [1, 5])
def test_silu_mul(library, formats, tokens):
    gate_up = torch.cat((torch.randn(tokens, 50) * 30, torch.randn(tokens, 50)), 1).to(formats[0])
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 0.0, -0.0])
    gate, up = gate_up.chunk(2, -1)
    assert close(SmallBatchOps(library, *formats).silu_mul(gate_up), F.silu(gate) * up, formats[0])


@pytest.mark.parametrize("nan", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(library, formats, nan):
    """The draw looks for it, and names the position."""
    row = SmallBatchOps(library, *formats)
    x, ones = torch.full((1, 40), nan).to(formats[0]), torch.ones(40).to(formats[0])
    assert not row.add_norm(x.clone(), None, ones, EPS).isfinite().any()
    assert not row.silu_mul(x).isfinite().any()
    keys, values = (torch.ones(1, 4, 40).to(formats[1]) for _ in range(2))
    q = x.view(1, 1, 40)
    reads = ReadSlots.from_plan(AttentionPlan(torch.zeros(1), (), (ExtendRow(0, 1, slice(0, 4)),)))
    assert not row.attend(q, keys, values, reads, None, 1.0).isfinite().any()


@pytest.mark.parametrize("rope_dim", [DIM, 8])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("slots", [[77], [77, 5, 6]])
def test_rope_store(library, formats, normed, rope_dim, slots):
    activations, kept = formats
    tokens, store_at = len(slots), torch.tensor(slots)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM).to(activations)
    q, k, v = qkv.clone().view(tokens, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if normed:
        norms = q_norm, k_norm = torch.randn(DIM).to(activations), torch.randn(DIM).to(activations)
        q, k = F.rms_norm(q, (DIM,), q_norm, EPS), F.rms_norm(k, (DIM,), k_norm, EPS)
    cos, sin = (torch.randn(tokens, 1, rope_dim).to(activations) for _ in range(2))
    found_k, found_v, expected_k, expected_v = (
        torch.zeros(KV_HEADS, SLOTS, DIM).to(kept) for _ in range(4)
    )
    found = SmallBatchOps(library, *formats).rope_store(
        qkv, norms, EPS, (cos, sin), found_k, found_v, store_at
    )
    expected = rotate(q, cos, sin)
    store_kv(KVCache((expected_k,), (expected_v,)), 0, store_at, expected, rotate(k, cos, sin), v)
    assert close(found, expected, activations)
    assert found_v.equal(expected_v)
    assert close(found_k, expected_k, kept)
    assert {i for i in range(SLOTS) if found_k[:, i].any()} == set(slots)


ROWS = {
    "side by side": AttentionPlan(torch.zeros(1), (), (ExtendRow(0, 1, slice(20, 221)),)),
    "anywhere": AttentionPlan(torch.zeros(1), (), (ExtendRow(0, 1, ANYWHERE[:201]),)),
    "one": AttentionPlan(torch.zeros(1), (), (ExtendRow(0, 1, ANYWHERE[:1].int()),)),
    "several tokens": AttentionPlan(torch.zeros(5), (), (ExtendRow(0, 5, ANYWHERE[:90].int()),)),
    "several rows": AttentionPlan(
        torch.zeros(8),
        (
            DecodeGroup(
                slice(0, 2),
                DecodeRows(ANYWHERE[:100].view(2, 50).int(), torch.tensor([50, 31]), True),
            ),
            DecodeGroup(
                torch.tensor([6, 2]),
                DecodeRows(ANYWHERE[:160].view(2, 80), torch.tensor([80, 80]), False),
            ),
        ),
        (ExtendRow(3, 6, slice(7, 60)), ExtendRow(7, 8, ANYWHERE[30:33])),
    ),
}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("plan", ROWS.values(), ids=list(ROWS))
def test_attend(library, formats, plan, window):
    activations, kept = formats
    k, v = (torch.randn(KV_HEADS, SLOTS, DIM).to(kept) for _ in range(2))
    q = torch.randn(len(plan.store_at), HEADS + 2, DIM).to(activations)[:, :HEADS]
    expected = attention(q, KVCache((k,), (v,)), 0, plan, AttentionRules(0.3, window=window))
    found = SmallBatchOps(library, *formats).attend(q, k, v, ReadSlots.from_plan(plan), window, 0.3)
    assert found.dtype == activations
    assert (found.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("plan", ROWS.values(), ids=list(ROWS))
def test_threads_attend_as_one_does(library, threaded, formats, plan, window, threads):
    activations, kept = formats
    k, v = (torch.randn(KV_HEADS, SLOTS, DIM).to(kept) for _ in range(2))
    q = torch.randn(len(plan.store_at), HEADS + 2, DIM).to(activations)[:, :HEADS]
    expected = SmallBatchOps(library, *formats).attend(
        q, k, v, ReadSlots.from_plan(plan), window, 0.3
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = ThreadedSmallBatchOps(threaded, *formats).attend(
            q, k, v, ReadSlots.from_plan(plan), window, 0.3
        )
    finally:
        torch.set_num_threads(before)
    assert close(found, expected, activations)


def test_a_library_is_compiled_once_and_found_again(tmp_path, library):
    (tmp_path / "a.cpp").write_text('extern "C" int seven() { return 7; }')
    load_cpu_library(tmp_path / "a.cpp", tmp_path / "compiled")
    (made,) = (tmp_path / "compiled").iterdir()
    before = made.stat()
    load_cpu_library.cache_clear()
    again = load_cpu_library(tmp_path / "a.cpp", tmp_path / "compiled")
    assert again is not None
    assert again.seven() == 7
    assert made.stat().st_mtime_ns == before.st_mtime_ns


def test_without_a_compiler_there_is_none(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    warn_without_compiler.cache_clear()
    assert load_cpu_library(SOURCE, tmp_path / "compiled") is None
    assert "no C++ compiler was found" in caplog.text


@pytest.mark.parametrize("broken", ["the source", "the compiler", "the folder"])
def test_what_can_not_be_compiled_is_said_and_left(tmp_path, monkeypatch, caplog, broken):
    source, compiler, folder = tmp_path / "a.cpp", tmp_path / "compiler", tmp_path / "folder"
    source.write_text("no C++")
    if broken == "the folder":
        folder.write_text("a file")
    if broken == "the compiler":
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(compiler))
    assert load_cpu_library(source, folder) is None
    assert "can't be compiled" in caplog.text or "no C++ compiler was found" in caplog.text
    assert not list(folder.glob("*")) if folder.is_dir() else True
