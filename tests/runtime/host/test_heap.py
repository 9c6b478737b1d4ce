"""Memory that was freed between blocks in use is returned to the system."""

import ctypes
import subprocess
import sys

import pytest

# 200 MB in blocks of 60 kB, of which every second one is freed: the gaps stay with glibc.
CODE = """
import os
from sglang_lite.runtime.host import heap
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
blocks = [bytearray(b"x" * 60_000) for _ in range(3400)]
del blocks[::2]
before = resident()
trimmed = __import__("threading").Event()
trim = heap.trim
heap.trim = lambda: (trim(), trimmed.set())
heap.start_trimming(0.0)
trimmed.wait()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps it")
def test_gaps_between_blocks_are_returned_to_the_system():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50_000_000
