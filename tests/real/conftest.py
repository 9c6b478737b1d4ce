"""Real models and sounds for tests, from the folder that SGLANG_LITE_REAL_MODELS names; `make
test-real` sets it. Without it nothing here is collected, so `make test` fetches and runs none of
them.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.fetch import real_files

FOLDER = os.environ.get("SGLANG_LITE_REAL_MODELS", "")
MOST_BYTES = 16 << 30

collect_ignore_glob = [] if FOLDER else ["test_*.py"]


def file_of(name: str) -> Path:
    """Returns the path of a file of `pieces.json`, which `tests.real.fetch` has put there."""
    return Path(FOLDER).absolute() / real_files()[name].file


@pytest.fixture(scope="session")
def coder() -> Path:
    """The file of Qwen2.5-Coder-0.5B-Instruct."""
    return file_of("qwen2.5-coder-0.5b")


@pytest.fixture(autouse=True, scope="session")
def _bounded_memory() -> Iterator[None]:
    """Fails a session in which this process and the largest that it started had more than 16 GiB at
    their peaks.
    """
    yield
    peaks = [
        resource.getrusage(who).ru_maxrss * 1024
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    print(
        f"peaks of memory: {peaks[0] / 2**30:.1f} GiB here, {peaks[1] / 2**30:.1f} GiB in the largest child"
    )
    assert sum(peaks) <= MOST_BYTES
