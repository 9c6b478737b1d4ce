"""Time from the start of a process to an engine's first token, measured in a separate process, as
users experience it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sglang_lite.protocol import BackendError


@dataclass(frozen=True, slots=True)
class Started:
    """Measured start of an engine in a new process.

    Attributes:
        seconds: seconds until the first token.
        compiled: number of kernels that were not in the cache.
    """

    seconds: float
    compiled: int


# values of settings have many types
def measure_first_token(shape: str, settings: Mapping[str, Any]) -> Started:
    """Measures how long a process takes to start an engine of a shape with random weights and
    generate one token.

    Args:
        shape: name of the model's shape, one of SHAPES.
        settings: further settings of the engine.

    Raises:
        BackendError: the process generated no token.
    """
    # imports torch, which the process should do by itself
    from sglang_lite.bench.shapes import hf_config

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(shape)))
        command = [sys.executable, "-m", __name__, folder, json.dumps(dict(settings))]
        before = _count_cached_kernels()
        started = time.perf_counter()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - started
    if line != b"token\n":
        raise BackendError(
            f"{shape}: a process that starts an engine ended with status {process.returncode}."
        )
    return Started(seconds, _count_cached_kernels() - before)


def _count_cached_kernels() -> int:
    """Counts the kernels in Triton's cache."""
    if not find_spec("triton"):
        return 0
    import triton

    return sum(1 for _ in Path(triton.knobs.cache.dir).glob("*/*.cubin"))


def _time_first_start(folder: str, settings: str) -> None:
    from sglang_lite import Engine

    with Engine(
        folder, load_format="dummy", skip_tokenizer_init=True, **json.loads(settings)
    ) as engine:
        engine.generate(
            input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 1, "ignore_eos": True}
        )
        print("token", flush=True)


if __name__ == "__main__":
    _time_first_start(*sys.argv[1:])
