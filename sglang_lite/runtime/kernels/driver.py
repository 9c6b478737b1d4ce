"""Calls of CUDA driver functions that torch doesn't expose."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def call_driver(name: str, *args: Any) -> None:  # ctypes values
    """Calls a function of the driver.

    Raises:
        torch.OutOfMemoryError: the GPU has too little memory.
        RuntimeError: the function fails.
    """
    error = getattr(_load_driver_library(), name)(*args)
    if error == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {name}")
    if error:
        raise RuntimeError(f"{name}: CUDA error {error}")


def bus_address(index: int) -> str:
    """Returns a GPU's address on its bus, such as "0000:3b:00.0". Raises the same errors as
    `call_driver`.
    """
    device = ctypes.c_int()
    text = ctypes.create_string_buffer(32)
    call_driver("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    call_driver("cuDeviceGetPCIBusId", text, ctypes.c_int(len(text)), device)
    return text.value.decode()


@cache
def _load_driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
