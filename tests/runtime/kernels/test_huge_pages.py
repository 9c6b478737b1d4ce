"""Memory in huge pages: as the system counts it."""

from pathlib import Path

import pytest
import torch

from sglang_lite.runtime.kernels.huge_pages import allocate_huge_page_tensor

HUGE = 2 << 20
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_at(address):
    """Returns bytes and flags of the mapping of an address, as /proc/self/smaps tells them."""
    size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            start, end = (int(each, 16) for each in head.split("-"))
            size = end - start if start <= address < end else 0
        elif size and head == "VmFlags:":
            return size, rest
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not MODE.exists() or "VmFlags" not in Path("/proc/self/smaps").read_text(),
                    reason="the system has no transparent huge pages, or doesn't tell")  # fmt: skip
def test_the_system_is_asked_for_huge_pages_where_whole_ones_fit():
    tensor = allocate_huge_page_tensor(5 * HUGE + 100_000)
    assert tensor.data_ptr() % HUGE == 0
    size, flags = mapping_at(tensor.data_ptr())
    assert size == 5 * HUGE
    assert "hg" in flags
    assert "hg" not in mapping_at(tensor.data_ptr() + 5 * HUGE)[1]


@pytest.mark.parametrize("size", [0, 1, HUGE - 1, HUGE, 3 * HUGE + 1])
def test_each_byte_can_be_written_and_read(size):
    tensor = allocate_huge_page_tensor(size)
    assert tensor.shape == (size,)
    assert tensor.dtype == torch.uint8
    tensor.copy_(torch.arange(size) % 251)
    assert torch.equal(tensor, (torch.arange(size) % 251).to(torch.uint8))


def test_a_part_of_it_keeps_it():
    part = allocate_huge_page_tensor(2 * HUGE)[HUGE:].fill_(3)
    assert int(part.sum()) == 3 * HUGE
