"""Pages come back bit for bit from the host's memory, whatever a model keeps of a token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.executor.page_memory import (
    CpuPageMemory,
    GpuPageMemory,
    GpuStateMemory,
    page_bytes,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache, LayerStates, view_as_indexable
from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane
from tests.runtime.kernels import needs_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUTS = {
    "heads": KVLayout(((Plane(2, 8), Plane(2, 8)),) * 2),
    "keys and values of other sizes": KVLayout(((Plane(2, 12), Plane(2, 4)),) * 2),
    "layers of other heads": KVLayout(((Plane(2, 8), Plane(2, 8)), (Plane(1, 16), Plane(1, 16)))),
    "latents": KVLayout(((Plane(1, 18),),) * 2),
}
PAGES = 6


@needs_kernels
def test_memory_that_can_not_be_pinned_is_told(monkeypatch):
    def refused(_):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("sglang_lite.runtime.executor.page_memory.pin_memory", refused)
    plane = SimpleNamespace(device=torch.device("cuda"), shape=(2, 64, 8), itemsize=2)
    with pytest.raises(
        ModelError, match=r"0\.5 GiB of the host's memory can't be pinned: .* Lower hicache_size"
    ):
        GpuPageMemory([plane], 16, 1 << 20)  # type: ignore[list-item] # as much of a plane as is asked for


def random_cache(layout, page_size, dtype, device):
    cache = KVCache.allocate(layout, PAGES * page_size, dtype, device)
    for plane in cache.planes:
        noise = torch.randint(
            0, 256, (*plane.shape[:2], plane.shape[2] * plane.itemsize), dtype=torch.uint8
        )
        plane.view(torch.uint8).copy_(noise)
    return cache


def bits(cache):
    return [plane.view(torch.uint8).cpu().clone() for plane in cache.planes]


@pytest.mark.parametrize(
    "memory_of", [CpuPageMemory, GpuPageMemory], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_planes_come_back_bit_for_bit(layout, dtype, page_size, memory_of):
    device = DEVICE if memory_of is GpuPageMemory else torch.device("cpu")
    cache = random_cache(layout, page_size, dtype, device)
    memory, before = memory_of(cache.planes, page_size, 5), bits(cache)
    assert memory.rows.shape == (5, page_bytes(cache.planes, page_size))
    pages, slots = np.array([4, 0, 5], np.int32), np.array([1, 2, 4], np.int32)
    memory.copy_to_host(pages, slots)
    while memory.count_completed() < 1:
        pass
    for plane in cache.planes:
        view_as_indexable(plane).zero_()
    memory.copy_to_device(slots[1:], np.array([3, 1], np.int32))
    memory.copy_to_device(slots[:1], np.array([0], np.int32))
    while memory.count_completed() < 3:
        pass
    for old, new in zip(before, bits(cache)):
        old, new = (x.view(x.shape[0], PAGES, -1) for x in (old, new))
        assert torch.equal(new[:, [3, 1, 0]], old[:, [0, 5, 4]])
        assert not new[:, [2, 4, 5]].any()


def random_states(device):
    """States of two layers, between which one has none."""
    shapes = [((PAGES, 3, 5), torch.bfloat16), ((PAGES, 2, 4, 3), torch.float32)]
    noise = [
        torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device, dtype)
        for i, (shape, dtype) in enumerate(shapes * 2)
    ]
    layers = LayerStates(*noise[:2]), None, LayerStates(noise[2][:, :0], noise[3])
    return KVCache((), (), states=layers), [*noise[:2], noise[3]]


@pytest.mark.parametrize("on_gpu", [False, True], ids=["CpuPageMemory", "GpuStateMemory"])
def test_states_come_back_bit_for_bit(on_gpu):
    cache, tensors = random_states(DEVICE if on_gpu else torch.device("cpu"))
    before = [each.cpu().clone() for each in tensors]
    planes = cache.state_planes
    memory = GpuStateMemory(planes, 4) if on_gpu else CpuPageMemory(planes, 1, 4)
    assert memory.rows.shape == (4, 3 * 5 * 2 + 2 * 24 * 4)
    memory.copy_to_host(np.array([4, 0, 5], np.int32), np.array([1, 2, 3], np.int32))
    while memory.count_completed() < 1:
        pass
    for tensor in tensors:
        tensor.zero_()
    memory.copy_to_device(np.array([2, 3], np.int32), np.array([3, 1], np.int32))
    memory.copy_to_device(np.array([1], np.int32), np.array([0], np.int32))
    while memory.count_completed() < 3:
        pass
    for old, new in zip(before, tensors):
        assert torch.equal(new.cpu()[[3, 1, 0]], old[[0, 5, 4]])
        assert not new.cpu()[[2, 4, 5]].any()
    memory.close()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
def test_a_closed_memory_is_no_longer_pinned():
    memory = GpuPageMemory(random_cache(LAYOUTS["heads"], 16, torch.float32, DEVICE).planes, 16, 5)
    memory.copy_to_host(np.array([1, 2], np.int32), np.array([0, 1], np.int32))
    memory.count_completed()
    assert torch.from_numpy(memory.rows).is_pinned()
    memory.close()
    assert not torch.from_numpy(memory.rows).is_pinned()
    memory.close()


@pytest.mark.parametrize(
    "memory_of", [CpuPageMemory, GpuPageMemory], ids=lambda kind: kind.__name__
)
def test_of_two_copies_to_a_slot_the_last_one_counts(memory_of):
    device = DEVICE if memory_of is GpuPageMemory else torch.device("cpu")
    cache = random_cache(LAYOUTS["heads"], 2, torch.float32, device)
    memory, before = memory_of(cache.planes, 2, 5), bits(cache)
    memory.copy_to_host(np.array([1, 2, 3], np.int32), np.array([0, 1, 2], np.int32))
    memory.copy_to_host(np.array([4, 5], np.int32), np.array([1, 0], np.int32))
    memory.copy_to_device(np.array([0, 1, 2], np.int32), np.array([0, 2, 1], np.int32))
    while memory.count_completed() < 3:
        pass
    for old, new in zip(before, bits(cache)):
        old, new = (x.view(x.shape[0], PAGES, -1) for x in (old, new))
        assert torch.equal(new[:, [0, 2, 1]], old[:, [5, 4, 3]])
