"""Profiles of an engine's steps: torch's profiler on the loop's thread, with named spans in its trace and for NVTX."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from sglang_lite.protocol import ParameterError


class Profile:
    """Profile that is being taken. It is started and stopped on the thread whose work it shows.

    Args:
        folder: that takes its trace.
        device: of the model; of a GPU's work the trace has the kernels.
        with_stack: and the lines of Python.
        record_shapes: and the shapes of operands.

    Raises:
        ParameterError: the folder can't be written.
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
        """Marks what is done in the context."""
        with torch.profiler.record_function(name):
            if not self._on_gpu:
                yield
                return
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call] # torch says no types
            try:
                yield
            finally:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call] # torch says no types
