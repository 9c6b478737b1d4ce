"""Access to kernels that only run on Hopper GPUs, each in a separate module. They are written in
Gluon, Triton's language for explicit layouts and barriers.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

import triton

from sglang_lite.runtime.kernels.device_properties import DeviceProperties

logger = logging.getLogger(__name__)


@functools.cache
def hopper_kernels(properties: DeviceProperties, module: str) -> ModuleType | None:
    """Returns a module of kernels for Hopper GPUs by its name in this package, or None if the GPU
    is not a Hopper GPU or Triton is older than 3.6.
    """
    if properties.capability[0] != 9 or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    try:
        return importlib.import_module(f"sglang_lite.runtime.kernels.{module}")
    except (ImportError, AttributeError) as error:  # Gluon's names still change between versions
        logger.warning("Triton %s lacks what %s wants (%s).", triton.__version__, module, error)
        return None
