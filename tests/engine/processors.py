"""Logit processors that an engine's process finds by name."""

import ctypes
import gc
import os
import threading


def only_e(ids, logits):
    logits[:] = -100.0
    logits[36] = 0.0  # "E"
    return logits


def only(token, ids, logits):
    logits[:] = -100.0
    logits[token] = 0.0
    return logits


class Class:
    @staticmethod
    def only_f(ids, logits):
        logits[:] = -100.0
        logits[37] = 0.0
        return logits


def only_e_where_garbage_is_collected(ids, logits):
    assert gc.isenabled()
    return only_e(ids, logits)


def bad(ids, logits):
    raise LookupError("mine")


def loud(ids, logits):
    """Writes more than a pipe holds."""
    print("x" * 1_000_000, flush=True)
    return logits


def hanging(ids, logits):
    threading.Event().wait()


def loses_device(ids, logits):
    """From now on each step fails as it does where a kernel has faulted: CUDA gives no answer but
    that any more.
    """
    import torch

    from sglang_lite.runtime.executor.cpu_runner import CpuRunner

    def forward(self, batch):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    CpuRunner.forward = forward  # type: ignore[method-assign]  # as a device does
    return logits


def reads_with_pythons_lock(ids, logits):
    """Waits in C for what is written to a file, and lets no other thread of Python run meanwhile."""
    with open(os.environ["HELD"], "rb", buffering=0) as file:
        ctypes.PyDLL(None).read(file.fileno(), ctypes.create_string_buffer(1), 1)
    return logits


class Instance:
    def __call__(self, ids, logits):
        return logits


instance = Instance()
not_callable = 7
