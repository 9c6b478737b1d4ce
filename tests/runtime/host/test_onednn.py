"""Products that are kept ready on a CPU are bounded, and the environment stays as it was."""

import ctypes
import os
import subprocess
import sys

import pytest

# Bytes that were in use after 40 numbers of rows, and what the next 80 have added. (Not what the
# process has: that says what the system was asked for.)
CODE = """
import ctypes, os
import torch
from sglang_lite.runtime.host import onednn
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h hblkhd u f uordblks fordblks k".split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
torch.set_num_threads(1)
before = dict(os.environ)
onednn.PRODUCTS = 40
onednn.limit_primitive_caches()
assert dict(os.environ) == before
weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 96), 1)
used = []
for rows in range(2, 122):
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 96), weight, None, "none", [], "")
    used.append(library.mallinfo2().uordblks)
print(used[-1] - used[39])
"""
PLAIN = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_CAPACITY")}


def added(**users):
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=PLAIN | users
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc tells what is in use"
)
def test_products_that_are_kept_take_no_more_than_so_many():
    users = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    kept = added(**users)  # what the user has set stays
    assert kept > 10_000_000
    assert added() < kept / 10
