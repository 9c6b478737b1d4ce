"""Profiles an engine's steps with torch's profiler, on the loop's thread. Marks named spans in the
trace and for NVTX.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.models.layer_watch import profiler_range


class Profiler:
    """Running profile. Must be created and stopped on the thread that it records.

    Args:
        folder: folder that the trace is written to.
        device: device of the model; a GPU's kernels are recorded as well.
        with_stack: whether to record Python stacks.
        record_shapes: whether to record the shapes of operands.

    Raises:
        ParameterError: the folder is not writable.
    """

    def __init__(
        self, folder: str, device: torch.device, *, with_stack: bool, record_shapes: bool
    ) -> None:
        self._path = Path(folder) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.trace.json.gz"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise ParameterError(
                "output_dir", f"{folder!r} can't be written: {error.strerror}."
            ) from None
        self._device = device
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            with_stack=with_stack,
            record_shapes=record_shapes,
            acc_events=True,
        )
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def write_trace(self) -> str:
        """Writes the trace, on any thread, and returns its path."""
        self._profiler.export_chrome_trace(str(self._path))
        return str(self._path)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Marks the code run in this context as a span of the trace."""
        return profiler_range(name, self._device)
