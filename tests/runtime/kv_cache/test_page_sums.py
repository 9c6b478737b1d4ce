"""Checksums of pages: the compiled ones are those of numpy, whether pages are in memory or in a
file.
"""

import os

import numpy as np
import pytest

from sglang_lite.runtime.kv_cache.page_sums import DamagedFileError, compute_page_sums


@pytest.fixture(params=["compiled", "numpy"])
def sums(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(
            "sglang_lite.runtime.kv_cache.page_sums.compile_sum_pages", lambda: None
        )
    return compute_page_sums


@pytest.mark.parametrize("size", [1, 8, 100, 4096, 4104, 600_000])
def test_they_are_those_of_the_formula(sums, size, tmp_path):
    rows = np.random.default_rng(size).integers(0, 256, (5, size), dtype=np.uint8)
    slots = np.array([4, 0, 1, 3], np.int32)
    words = np.zeros((5, -(-size // 4096), 512), np.uint64)
    words.reshape(5, -1).view(np.uint8)[:, :size] = rows
    state = [(i * 0x9E3779B97F4A7C15) % 2**64 for i in range(1, 513 + words.shape[1])]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state = [((each ^ each >> shift) * factor) % 2**64 for each in state]
    factors = [each | 1 for each in state]
    expected = [
        sum(
            factors[512 + at]
            * sum((word ^ word >> 32) * factor for word, factor in zip(line, factors))
            for at, line in enumerate(words[slot].tolist())
        )
        % 2**64
        for slot in slots
    ]
    assert sums(rows, slots).tolist() == expected
    path, into = tmp_path / "pages", np.zeros((6, size), np.uint8)
    path.write_bytes(b"head" + rows[slots].tobytes())
    places = np.array([5, 0, 2, 1], np.int32)
    with path.open("rb") as file:
        assert sums(into, places, file.fileno(), 4).tolist() == expected
        assert (into[places] == rows[slots]).all()
        with pytest.raises(DamagedFileError, match="it ends too early"):
            sums(into, places, file.fileno(), 5)
    descriptor = os.open(path, os.O_WRONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        sums(into, places, descriptor, 4)
    os.close(descriptor)
