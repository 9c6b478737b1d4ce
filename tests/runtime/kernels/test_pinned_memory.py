"""Pinned memory, on a driver that only notes what it is asked. On a GPU, test_page_memory.py copies
to it.
"""

import pytest
import torch

from sglang_lite.runtime.kernels import pinned_memory


class Driver:
    def __init__(self, most):
        self.most, self.pinned = most, {}

    def cudaHostRegister(self, pointer, size, flags):
        if size > self.most:
            return 2  # cudaErrorMemoryAllocation
        self.pinned[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer):
        return 0 if self.pinned.pop(pointer, None) else 1


@pytest.fixture
def driver(monkeypatch):
    def check_error(code):
        if code:
            raise RuntimeError(f"error {code}")

    driver = Driver(1 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return driver


def test_memory_of_any_size_is_pinned_whole_and_zeroed(driver, monkeypatch):
    monkeypatch.setattr(pinned_memory, "_PIECE", 5000)
    for size in (1, 4096, 123_457):
        memory = pinned_memory.pin_memory(size)
        assert driver.pinned == {memory.data_ptr(): size}
        assert memory.shape == (size,)
        assert not memory.any()
        memory[-1] = 7
        pinned_memory.unpin_memory(memory.data_ptr())
        assert driver.pinned == {}


def test_more_than_can_be_pinned_is_an_error(driver):
    with pytest.raises(RuntimeError, match="error 2"):
        pinned_memory.pin_memory(2 << 20)
