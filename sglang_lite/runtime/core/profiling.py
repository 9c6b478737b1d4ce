"""Profiles of an engine's steps: torch's profiler on the loop's thread, with named spans in the trace and for NVTX."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from sglang_lite.protocol import ParameterError


class Profiler:
    """A profile that is being recorded. Must be started and stopped on the thread that it records.

    Args:
        folder: folder that the trace is written to.
        device: device of the model; a GPU's kernels are recorded as well.
        with_stack: whether to record Python stacks.
        record_shapes: whether to record the shapes of operands.

    Raises:
        ParameterError: the folder is not writable.
    """

    def __init__(self, folder: str, device: torch.device, *, with_stack: bool, record_shapes: bool) -> None:
        self._path = Path(folder) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.trace.json.gz"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            raise ParameterError("output_dir", f"{folder!r} can't be written: {error.strerror}.") from None
        self._on_gpu = device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities, with_stack=with_stack, record_shapes=record_shapes
        )

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def write(self) -> str:
        """Writes the trace, on any thread, and returns its path."""
        self._profiler.export_chrome_trace(str(self._path))
        return str(self._path)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Marks the code run in this context as a span of the trace."""
        with torch.profiler.record_function(name):
            if not self._on_gpu:
                yield
                return
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call] # untyped in torch
            try:
                yield
            finally:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call] # untyped in torch
