"""The products that are kept ready on a CPU are limited on each thread."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

# What 80 shapes have added to the bytes in use after 40 others, on the second thread that was
# limited. (Not what the process has: that says what the system was asked for.)
CODE = """
import ctypes, os, sys, threading
import torch
from sglang_lite.runtime.host import onednn
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h hblkhd u f uordblks fordblks k".split()]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
torch.set_num_threads(1)
onednn.PRODUCTS = 40
bf16 = torch.bfloat16
def pack():
    return torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 96), 1)
def linear(rows):
    torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 96), pack(), None, "none", [], "")
def attention(length):
    torch.bmm(torch.ones(3, 24, 64, dtype=bf16), torch.ones(3, 64, 64 + length, dtype=bf16))
product = {"linear": linear, "attention": attention}[sys.argv[1]]
used = []
def compute():
    for shape in range(2, 122):
        product(shape)
        used.append(library.mallinfo2().uordblks)
onednn.limit_primitive_caches()
for work in (pack, compute):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(used[-1] - used[39])
"""
PLAIN = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_CAPACITY")}


def added(product, **users):
    done = subprocess.run(
        [sys.executable, "-c", CODE, product],
        capture_output=True,
        text=True,
        check=True,
        env=PLAIN | users,
    )
    return int(done.stdout)


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc tells what is in use"
)
@pytest.mark.parametrize(
    "product",
    [
        "linear",
        pytest.param(
            "attention",
            marks=pytest.mark.skipif(
                not torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # noqa: SLF001 # torch has no other name for it
                reason="torch multiplies bfloat16 without oneDNN on this CPU",
            ),
        ),
    ],
)
def test_products_that_are_kept_take_no_more_than_so_many(product):
    users = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    kept = added(product, **users)  # what the user has set stays
    assert kept > 5_000_000
    assert added(product) < kept / 10
