"""Answers of every backend of attention, against the CPU's attention of each row by itself."""

import re
from typing import Any, NamedTuple

import pytest
import torch

from sglang_lite.runtime.attention import torch as torch_attention
from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.flash_attn import FlashAttention
from sglang_lite.runtime.attention.flashinfer import FlashInferAttention
from sglang_lite.runtime.attention.registry import make_attention
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules
from sglang_lite.runtime.kernels.kv_cache import KVCache
from tests.runtime.attention.described import put_in_place
from tests.runtime.kernels import BACKENDS, PACKAGES, needs_kernels, skip_without
from tests.runtime.kernels.test_kernels import (
    DEVICE,
    OPTIONS,
    Rows,
    close_by_head,
    in_eight_bits,
    normal,
    options_of,
)

# flash-attn-4 calls what its own base is about to drop.
pytestmark = [needs_kernels, pytest.mark.filterwarnings("ignore")]


class Backend(NamedTuple):
    """
    Attributes:
        limit: of the relative error.
    """

    name: str
    dtype: torch.dtype
    dim: int
    limit: float

    def attend(self, rows, cache, plan, q, **options):
        make = make_attention(
            self.name,
            AttentionRequirements(rows.heads, rows.kv_heads, rows.dim, self.dtype, cache.k[0].dtype, DEVICE, max_rows=8, max_chunks=0),
        )  # fmt: skip
        out = torch.full(
            (len(q), rows.heads, rows.dim), float("nan"), device=DEVICE, dtype=self.dtype
        )
        make.plan_step(plan).attend(q, cache, 0, out, AttentionRules(0.3, **options))
        return out


@pytest.fixture(params=[*BACKENDS, *PACKAGES, *(f"{package} as described" for package in PACKAGES)])
def backend(request, monkeypatch):
    name = request.param.split()[0]
    if request.param in PACKAGES:
        skip_without(name)
        return Backend(name, torch.float16, 64, 2e-3)
    if name in PACKAGES:
        put_in_place(monkeypatch)
    return Backend(name, torch.float32, 24, 2e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scaled", [None, False, True])  # None: no 8 bits
def test_decoding_rows_beside_blocks(backend, options, scaled):
    if scaled is not None and backend.name == "flash_attn":
        pytest.skip("it refuses those")
    if backend.name in PACKAGES and {*options} & {"chunked", "slopes"}:
        pytest.skip("it refuses those")
    options = options_of(options, 6)
    lengths = [90, 1, 64, 130, 7]
    rows = Rows([*lengths, 45, 3], (6, 2), backend.dim, backend.dtype)
    # Rows 5 and 6 have 20 and 3 new tokens, in blocks of up to 16, of which the longest come first.
    blocks = [(21, 4, 5, 41), (5, 16, 5, 25), (25, 3, 6, 0)]
    slots = [*range(5), *[5] * 20, *[6] * 3]
    positions = [*(n - 1 for n in lengths), *range(25, 45), *range(3)]
    plan = rows.plan(5, slots, positions, blocks)
    q = normal(28, 10, backend.dim, dtype=backend.dtype)[:, :6]  # as it lies in the QKV product
    cache, asked = (rows.cache, q) if scaled is None else in_eight_bits(rows, q, scaled=scaled)
    out = backend.attend(rows, cache, plan, q, **options)
    alone = [(i, 1, i, n) for i, n in enumerate(lengths)]
    rows.cache = KVCache(*(tuple(x.float() for x in side) for side in (rows.cache.k, rows.cache.v)))  # type: ignore[arg-type]  # keys and values
    expected = rows.twin(asked, [*alone, (5, 20, 5, 45), (25, 3, 6, 3)], scale=0.3, **options)
    if scaled is None:
        assert (out - expected).norm() < backend.limit * expected.norm()
    else:
        close_by_head(out, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scaled", [None, False, True])
@pytest.mark.parametrize("tokens", [1, 300])
def test_torch_takes_rows_one_by_one_or_some_together(options, scaled, tokens, monkeypatch):
    monkeypatch.setattr(torch_attention, "MAX_GATHERED_ELEMENTS", tokens * 2 * 24)
    test_decoding_rows_beside_blocks(Backend("torch", torch.float32, 24, 2e-5), options, scaled)


def test_what_lies_beyond_a_row_is_not_read(backend):
    """Another's NaN would be weighed with 0, and still be one."""
    rows = Rows([5, 30], (4, 2), backend.dim, backend.dtype)
    for side in (rows.cache.k, rows.cache.v):
        side[0][:, rows.read_at(0, 8)[5:]] = float("nan")
    plan = rows.plan(2, [0, 1], [4, 29])
    q = normal(2, 4, backend.dim, dtype=backend.dtype)
    assert backend.attend(rows, rows.cache, plan, q).isfinite().all()


@pytest.mark.parametrize(
    ("package", "settings", "reason"),
    [
        ("flashinfer", {}, None),
        ("flashinfer", {"cache": torch.float8_e4m3fn}, None),
        ("flashinfer", {"head_dim": 80}, "the head size 80 is not one of 64, 128, 256"),
        ("flashinfer", {"compute": torch.float32}, "computing in torch.float32 is not supported"),
        ("flashinfer", {"chunked": True}, "attention within chunks is not supported"),
        ("flashinfer", {"alibi": True}, "ALiBi is not supported"),
        ("flash_attn", {}, None),
        ("flash_attn", {"chunked": True}, "attention within chunks is not supported"),
        ("flash_attn", {"alibi": True}, "ALiBi is not supported"),
        (
            "flash_attn",
            {"cache": torch.float8_e4m3fn},
            "a KV cache in torch.float8_e4m3fn is not supported",
        ),
        ("flash_attn", {"head_dim": 80}, None),
        ("flash_attn", {"head_dim": 72}, "the head size 72 is not a multiple of 16 up to 256"),
        ("flash_attn", {"compute": torch.float32}, "computing in torch.float32 is not supported"),
        (
            "flashinfer",
            {"capability": (7, 5)},
            "a GPU of compute capability 8.0 .Ampere. or newer is required",
        ),
        (
            "flash_attn",
            {"capability": (8, 9)},
            "only GPUs of compute capability 9 .Hopper. to 11 are supported",
        ),
        ("flashinfer", {"spec": None}, "the package flashinfer-python is not installed"),
        ("flash_attn", {"spec": None}, "the package flash-attn-4 is not installed"),
    ],
    ids=str,
)
def test_packages_refuse_what_they_cannot(package, settings, reason, monkeypatch):
    found: dict[str, Any] = {
        "head_dim": 128,
        "compute": torch.bfloat16,
        "cache": torch.bfloat16,
        "capability": (9, 0),
        "spec": "there",
    }
    found |= settings
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found["spec"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    unsupported_reason = {"flashinfer": FlashInferAttention, "flash_attn": FlashAttention}[
        package
    ].unsupported_reason
    said = unsupported_reason(
        AttentionRequirements(
            8,
            2,
            found["head_dim"],
            found["compute"],
            found["cache"],
            torch.device("cuda"),
            max_rows=1,
            max_chunks=0,
            chunked=found.get("chunked", False),
            alibi=found.get("alibi", False),
        )
    )
    assert said == reason if reason is None else re.fullmatch(reason, said)
